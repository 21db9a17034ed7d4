"""``dora front``"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.errors import MISSING, InvalidValue, one_of
from dora.ops.cli.exits import say
from dora.ops.cli.options import token_option
from dora.ops.stored_token import DEFAULT_ADDRESS, WHERE, secret_for
from dora.system.environment import PAGE_TOKEN, taken
from dora.system.secret_file import read_token
from dora.system.signals import drain_on_signals
from dora.tls import Tls
from dora.tls.options import CLIENTS

if TYPE_CHECKING:
    from dora.agents.front.run import FrontOptions

EXAMPLE = "dora front --service 127.0.0.1:7070 --http 127.0.0.1:8000"


def front(
    service: Annotated[
        str, typer.Option("--service", metavar="HOST:PORT", envvar="DORA_ADDRESS", help="Address of the service.")
    ] = DEFAULT_ADDRESS,
    listen: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Address for agents; port 0: a free one.")
    ] = "127.0.0.1:8000",
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model's folder on this host; default: the service's.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key-file", metavar="FILE", help="File (mode 0600) with the key of all agents; default: any key will do."
        ),
    ] = None,
    tool_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="hermes, llama or mistral; default: as the chat template shows.")
    ] = "",
    tls_clients: Annotated[
        str,
        typer.Option(
            "--tls-clients",
            metavar="certificate|token",
            help="What agents must have under TLS: a certificate, or a key alone.",
        ),
    ] = CLIENTS[0],
    token: Annotated[
        str | None,
        token_option(
            "File (mode 0600) with the token of the role environment, or the owner's; default: DORA_TOKEN, or what "
            "your service here stored."
        ),
    ] = None,
) -> None:
    """Serve agents over HTTP, in the protocols of OpenAI and vLLM, until Ctrl-C.

    Several may serve one service. The sessions of an agent stay with the front that it began with. With --tls agents
    connect under TLS, and the front's certificate replaces the token.
    """
    from dora.agents.front.run import FrontOptions
    from dora.rpc.errors import Unauthenticated

    if tls_clients not in CLIENTS:
        raise InvalidValue("--tls-clients", tls_clients, one_of(tls_clients, CLIENTS))
    tls = Tls.from_environment()
    secret = token or secret_for(service)
    if not secret and tls is None:
        raise Unauthenticated("token", MISSING, f"the token of the role environment, or the owner's: {WHERE}")
    options = FrontOptions(
        service=service,
        token=secret,
        listen=listen,
        model=model,
        key="" if key is None else read_token(key, "--key-file"),
        tool_format=tool_format,
        tls=tls,
        mutual=tls_clients == CLIENTS[0],
    )
    try:
        asyncio.run(_run(options))
    except asyncio.CancelledError:  # by a second Ctrl-C
        raise KeyboardInterrupt from None


async def _run(options: "FrontOptions") -> None:
    from dora.agents.front.run import run_front
    from dora.ops.page import mounted

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dora").setLevel(logging.INFO)
    stop = asyncio.Event()
    running = asyncio.current_task()
    assert running is not None
    drain_on_signals(stop.set, running.cancel)
    mount = mounted(options.service, taken(PAGE_TOKEN) or options.token, options.tls)

    def ready(url: str) -> None:
        say(f"dora: agents reach {options.service} at {url}/v1; the operator's page is {url}/")

    await run_front(options, stop, ready, mount)
