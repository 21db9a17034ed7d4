"""Follows the file of the owner's token: a new one is valid at once, the one before for an overlap."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.errors import InvalidValue
from dora.rpc.roles import Role, ServiceTokens, TokenGeneration
from dora.system.secret_file import read_token

log = logging.getLogger("dora.service")

LOOK_S: Final = 1.0


def with_token(config: Config) -> Config:
    """Returns the configuration with its own token, or that of ``service.token_file``. Raises InvalidValue."""
    service = config.service
    if service.token or not service.token_file:
        return config
    token = read_token(Path(service.token_file))
    return config.model_copy(update={"service": service.model_copy(update={"token": token})})


async def follow_token(file: Path, tokens: ServiceTokens, overlap_s: float, changed: Callable[[], None]) -> None:
    """Looks at the file until it is cancelled. Calls ``changed`` once new tokens are valid.

    A file that cannot be used leaves the tokens as they are; one line is logged.
    """
    seen, refused = _stamp(file), ""
    while True:
        await asyncio.sleep(LOOK_S)
        stamp = _stamp(file)
        if stamp == seen:
            continue
        try:
            owner = read_token(file)
            if not owner:
                raise InvalidValue("service.token_file", str(file), "a file with a token", why="is empty")
            if owner != tokens.of[Role.OWNER]:
                tokens.replace(await asyncio.to_thread(TokenGeneration.following, owner), overlap_s)
                log.info("the owner's token was replaced; the one before stays valid for %g s", overlap_s)
                changed()
        except InvalidValue as error:
            if str(error) != refused:
                log.warning("the tokens stay as they are: %s", error)
            refused = str(error)
            continue
        seen, refused = stamp, ""


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
