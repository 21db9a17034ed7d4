"""Shared by all kinds of environments: the option that names one, errors of its code, seeds."""

from hashlib import blake2b
from typing import Final

from dora.errors import DoraError, described

OPTION: Final = "--environment"


def one_line(error: BaseException) -> str:
    """Returns an error of user code in one printable line."""
    said = str(error) if isinstance(error, DoraError) else described(error)
    return " ".join("".join(each if each.isprintable() else " " for each in said).split())


def seed_of(prompt_id: str) -> int:
    """Returns the seed that all sessions of a prompt share."""
    return int.from_bytes(blake2b(prompt_id.encode(), digest_size=4).digest())
