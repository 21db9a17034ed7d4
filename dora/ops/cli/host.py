"""``dora host``"""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from dora.errors import MISSING
from dora.ops.cli.exits import say
from dora.ops.cli.options import source_of, token_option
from dora.ops.stored_token import WHERE, secret_for
from dora.system.log_lines import TEXT
from dora.system.signals import drain_on_signals
from dora.tls import Tls

if TYPE_CHECKING:
    from dora.host.agent import AgentOptions

EXAMPLE = "dora host --join 10.0.0.5:7070 --workers 2"


def host(
    join: Annotated[
        str, typer.Option("--join", metavar="HOST:PORT", help="Address of the service.", show_default=False)
    ],
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=256, metavar="N", help="Worker count; default: as the service's own host."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Prefix of its workers' ids; default: the machine's host name.")
    ] = "",
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="cpu, cuda, or cuda:0,1; default: all GPUs, or cpu if there are none."),
    ] = "",
    gpus_for_trainer: Annotated[
        int, typer.Option(min=0, metavar="N", help="GPUs, the last ones, that no worker gets.")
    ] = 0,
    model: Annotated[
        str, typer.Option(metavar="DIR", help="The service's model, if on this host; default: fetch it.")
    ] = "",
    folder: Annotated[
        str,
        typer.Option(metavar="DIR", help="Permanent in-memory folder for weights; default: a temporary one."),
    ] = "",
    kv_host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address for other hosts; default: the one used for the service.")
    ] = "",
    zone: Annotated[
        str, typer.Option(metavar="NAME", help="Its datacentre, if not the service's: each version is sent there once.")
    ] = "",
    rejoin_s: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="How long to try to rejoin after the service is lost.")
    ] = 600.0,
    probes: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of /live and /ready for a scheduler; default: none.")
    ] = "",
    notice_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=1e5, metavar="S", help="How long it lasts once TERM or USR1 came; default: host.notice_s."
        ),
    ] = None,
    token: Annotated[
        str | None,
        token_option("File (mode 0600) with the service's host token, or its owner's; default: DORA_TOKEN."),
    ] = None,
) -> None:
    """Join this machine to a service: its workers generate with the service's own, until Ctrl-C or `dora drain`.

    It needs only the address and the token. The model comes from the service.

    The first Ctrl-C drains the workers, as TERM and USR1 do; a second one ends them at once. If the service is lost,
    the host tries to rejoin.
    """
    from dora.host.agent import AS_THE_SERVICE, AgentOptions
    from dora.rpc.errors import Unauthenticated

    tls = Tls.from_environment()
    if tls is not None:
        tls.check(serves=True)  # its workers and its relay listen
    secret = token or secret_for(join)
    if not secret and tls is None:
        raise Unauthenticated("token", MISSING, f"the service's host token, or its owner's: {WHERE}")
    options = AgentOptions(
        address=join,
        token=source_of(secret),
        name=name or socket.gethostname().partition(".")[0],
        workers=AS_THE_SERVICE if workers is None else workers,
        device=device,
        gpus_for_trainer=gpus_for_trainer,
        model=model,
        folder=folder,
        kv_host=kv_host,
        zone=zone,
        rejoin_s=rejoin_s,
        probes=probes,
        notice_s=notice_s or 0.0,
        tls=tls,
    )
    try:
        asyncio.run(_run(options))
    except asyncio.CancelledError:  # by a second Ctrl-C
        raise KeyboardInterrupt from None


async def _run(options: "AgentOptions") -> None:
    from dora.host.agent import run_agent

    logging.basicConfig(format=TEXT)
    logging.getLogger("dora").setLevel(logging.INFO)
    stop = asyncio.Event()
    running = asyncio.current_task()
    assert running is not None
    drain_on_signals(stop.set, running.cancel)
    reason = await run_agent(options, stop, lambda line: say(f"dora: {line}"))
    say(f"dora: {options.name} has left: {reason}")
