"""``dora environment``"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.config import load_config, overrides_of
from dora.errors import MISSING
from dora.ops.cli.exits import say
from dora.ops.cli.options import SettingsOption, token_option
from dora.ops.stored_token import DEFAULT_ADDRESS, WHERE, find_token
from dora.system.signals import drain_on_signals

if TYPE_CHECKING:
    from dora.agents.environment.run import EnvironmentOptions

EXAMPLE = "dora environment my_environments:Guess --service 127.0.0.1:7070"


def environment(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="module:Class, gymnasium:ID, openenv:URL or verifiers:NAME.")
    ],
    service: Annotated[
        str,
        typer.Option("--service", "--join", metavar="HOST:PORT", envvar="DORA_ADDRESS", help="Address of the service."),
    ] = DEFAULT_ADDRESS,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model's folder on this host; default: the service's (owner's token)."),
    ] = None,
    settings: SettingsOption = None,
    token: Annotated[
        str | None,
        token_option(
            "File (mode 0600) with the environment's token; default: DORA_TOKEN, or what your service here stored."
        ),
    ] = None,
) -> None:
    """Drive the sessions of prompts that name this environment, until the service ends or Ctrl-C.

    Any number may join one service, from any host, and leave it. --set gives the settings of `environment`.
    """
    from dora.agents.environment.run import EnvironmentOptions
    from dora.rpc.errors import Unauthenticated

    secret = token or find_token(service)
    if not secret:
        raise Unauthenticated("token", MISSING, f"the environment's or owner's token: {WHERE}")
    config = load_config(None, [*(settings or ()), *overrides_of({"environment.spec": spec})])
    options = EnvironmentOptions(service=service, token=secret, settings=config.environment, model=model)
    try:
        asyncio.run(_run(options))
    except asyncio.CancelledError:  # by a signal
        return


async def _run(options: "EnvironmentOptions") -> None:
    from dora.agents.environment.run import run_environment

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dora").setLevel(logging.INFO)
    running = asyncio.current_task()
    assert running is not None

    def end() -> None:
        running.cancel()

    drain_on_signals(end, end)
    await run_environment(options, lambda: say(f"dora: {options.settings.spec} drives sessions of {options.service}"))
