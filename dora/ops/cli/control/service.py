"""The commands that call a running service."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dora.errors import MISSING, InvalidValue
from dora.ops.cli import completion
from dora.ops.cli.control.conversation import show_conversation
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import AddressOption, JsonOption, TokenOption, source_of
from dora.ops.cli.output import json_text, plain, print_json, print_reply, print_result, stdout
from dora.ops.stored_token import DEFAULT_ADDRESS, WHERE, secret_for
from dora.tls import Tls

if TYPE_CHECKING:
    from dora.client import Operator, Prompts
    from dora.rpc.dora_pb2 import Status

Answer = TypeVar("Answer")
LISTENS_S = 2.0
DEMO_RECORD = Path("out/demo/record")


class TrajectoryState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"
    PARKED = "parked"
    IDLE = "idle"
    FINISHED = "finished"
    LEASED = "leased"
    COMMITTED = "committed"


def status(
    everything: Annotated[bool, typer.Option("--all", help="Show counters that are 0, too.")] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of the service: window, steps, workers and counters."""
    from dora.ops.view.service import status_table

    answer = ask(address, token, lambda operator: operator.status())
    print_result(plain(answer), status_table(answer, everything), as_json)


def versions(
    workers: Annotated[bool, typer.Option("--workers", help="List the workers (DP groups) of each version.")] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the live policy versions: deadline, workers, prompt groups and requests."""
    _list("groups" if workers else "versions", address, token, as_json)


def workers(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the workers by name: version, state, requests, KV use, tokens/s."""
    _list("workers", address, token, as_json)


def pools(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the pools: the parked requests that each stores, in memory and on disk."""
    _list("pools", address, token, as_json)


def hosts(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the hosts, the service's own and those that joined with `dora host`, with their workers and capacity."""
    _list("hosts", address, token, as_json)


def _list(name: str, address: str, token: str | None, as_json: bool) -> None:
    from dora.ops.view.service import LISTS

    answer = ask(address, token, lambda operator: operator.status())
    rows, table = LISTS[name]
    print_result({name: [plain(row) for row in rows(answer)]}, table(answer), as_json)


def trajectories(
    state: Annotated[
        TrajectoryState | None,
        typer.Option(
            metavar="STATE",
            help="Only those waiting, running, moving, parked, finished or leased; or committed ones of the record.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Maximum number to list.")] = 100,
    shown: Annotated[
        str | None,
        typer.Option(
            "--show", metavar="ID", help="Show one that a step has trained on, as a conversation, from the record."
        ),
    ] = None,
    record: Annotated[
        Path, typer.Option(metavar="DIR", help="The record for --show: a folder of `--record DIR`.")
    ] = DEMO_RECORD,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the trajectories that are not committed, with the request ids for `dora migrate`.

    With --show, print a whole recorded session instead: its turns, who gave their tokens and when, and its rewards.
    """
    if shown is not None:
        return show_conversation(shown, record, as_json)
    from dora.ops.view.service import trajectories_table

    requested = state.value if state is not None else ""
    answer = ask(address, token, lambda operator: operator.trajectories(requested, limit))
    print_result(plain(answer), trajectories_table(answer.trajectories, answer.total), as_json)


def migrate(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", autocompletion=completion.requests, help="A trajectory id of `dora trajectories`."
        ),
    ],
    worker: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WORKER",
            autocompletion=completion.ends,
            help="A worker that hosts the same version, or a pool, which parks the request.",
        ),
    ],
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a request, with its KV cache, to another worker of its version, or park it in a pool.

    A parked request resumes at the named worker. If the service has a pool, that worker must have a free slot.
    """
    print_reply(ask(address, token, lambda operator: operator.migrate(request, worker)), as_json)


def drain(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|HOST",
            autocompletion=completion.drained,
            help="A worker id of `dora workers`, or a host of `dora hosts`.",
        ),
    ],
    within_s: Annotated[
        float,
        typer.Option("--within", min=0.0, metavar="S", help="A host's deadline in seconds; default: none."),
    ] = 0.0,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker, or all workers of a host, out of service: their requests move elsewhere, then the workers end.

    The agent of a joined host ends after its last worker. With --within it ends after S seconds at the latest: KV
    leaves it until then, and requests that are still there resume elsewhere.
    """
    print_reply(ask(address, token, lambda operator: operator.drain(worker, within_s)), as_json)


def scale(
    workers: Annotated[int, typer.Option("--workers", min=0, max=65_536, metavar="N", help="Target worker count.")],
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", autocompletion=completion.hosts, help="The host to scale; default: all hosts together."
        ),
    ] = "",
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start workers, or drain and end some, while the service runs.

    Without a host, workers start on the hosts that have the fewest, and end on those that have the most.
    """
    print_reply(ask(address, token, lambda operator: operator.scale(workers, host)), as_json)


def rebalance(address: AddressOption = DEFAULT_ADDRESS, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """Plan now which workers host which version, and begin the resulting moves and loads."""
    print_reply(ask(address, token, lambda operator: operator.rebalance()), as_json)


def checkpoint(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Also keep the newest version under this name, for `dora serve --from`.")
    ] = "",
    trainer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --name: also keep that version's checkpoint in the trainer's --checkpoints."
        ),
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write all generated and acknowledged data to disk, and show the state that a restart would continue from."""
    from dora.ops.view.service import checkpoint_line

    if trainer is not None and not name:
        raise InvalidValue("--trainer", str(trainer), "left out, or with --name")
    reply = ask(address, token, lambda operator: operator.checkpoint(name))
    if trainer is not None:
        _keep_trainer(trainer, reply.kept_version, name)
    if as_json:
        print_json(plain(reply))
    else:
        sys.stdout.write(checkpoint_line(reply))


def _keep_trainer(folder: Path, step: int, name: str) -> None:
    from dora.system.files import link_or_copy, sync_folder

    source, unfinished = folder / f"step-{step}", folder / f".{name}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for file in sorted(source.iterdir()):
            link_or_copy(file, unfinished / file.name)
        unfinished.rename(folder / name)
        sync_folder(folder)
    except OSError as error:
        allowed = f"the folder of --checkpoints, with {source.name} and without {name} ({error.strerror})"
        raise InvalidValue("--trainer", str(folder), allowed) from error


def cancel(
    names: Annotated[list[str], typer.Argument(metavar="PROMPT_OR_GROUP...", help="Prompt ids, or group ids.")],
    reason: Annotated[str, typer.Option(help="Reason for the run record, at most 200 characters.")] = "",
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel prompts: a queued prompt leaves the queue, and an admitted group is cancelled with the reason.

    A group that a step has taken stays. The command may be repeated. It exits with 4 if a prompt stays or is unknown.
    """
    from dora.client import Prompts
    from dora.ops.view.service import cancelled_line

    outcomes = ask(address, token, lambda prompts: prompts.cancel(names, reason), Prompts)
    if as_json:
        print_json({"cancelled": [asdict(outcome) for outcome in outcomes]})
    else:
        sys.stdout.write("".join(cancelled_line(outcome.name, outcome.state, outcome.group_id) for outcome in outcomes))
    if any(outcome.state in ("taken", "unknown") for outcome in outcomes):
        raise typer.Exit(ExitCode.REFUSED)


def watch(
    period_ms: Annotated[int, typer.Option(min=50, max=60_000, metavar="MS", help="Time between updates.")] = 500,
    updates: Annotated[
        int, typer.Option(min=0, metavar="N", help="Exit after this many updates; 0: when the service ends.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON document per update, each on a line.")
    ] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
) -> None:
    """Watch a service live. If stdout is not a terminal, print one line per notable event."""

    async def follow(operator: "Operator") -> None:
        statuses = _first(operator.watch(period_ms), updates)
        if as_json:
            await _print_lines(statuses)
        elif sys.stdout.isatty():
            await _draw(statuses, address)
        else:
            await _narrate(statuses)

    ask(address, token, follow)


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "status": (status, "dora status --address 127.0.0.1:7070"),
    "versions": (versions, "dora versions --json"),
    "workers": (workers, "dora workers --address 127.0.0.1:7070"),
    "pools": (pools, "dora pools --json"),
    "hosts": (hosts, "dora hosts --json"),
    "trajectories": (trajectories, "dora trajectories --show g12.0 --record out/demo/record"),
    "migrate": (migrate, "dora migrate g12.0 --to w1"),
    "drain": (drain, "dora drain w1"),
    "scale": (scale, "dora scale --workers 4 --host gpu-7"),
    "rebalance": (rebalance, "dora rebalance --json"),
    "checkpoint": (checkpoint, "dora checkpoint --name tuned"),
    "cancel": (cancel, "dora cancel q17 g3 --reason mistyped"),
    "watch": (watch, "dora watch --period-ms 500"),
}  # each with an example


def ask(
    address: str,
    token: str | None,
    call: Callable[[Any], Awaitable[Answer]],
    kind: "Callable[[str, str | Path], Prompts] | None" = None,
) -> Answer:
    """Runs ``call`` with a connected client: an operator's, or one of ``kind``.

    If ``token`` is None or empty, uses the one that a service stored on this host.
    """
    from dora.client import Operator
    from dora.rpc.errors import NoAnswer, ServiceUnavailable, Unauthenticated

    secret = token or secret_for(address)

    async def run() -> Answer:
        async with (kind or Operator)(address, source_of(secret)) as client:
            try:
                return await call(client)
            except ServiceUnavailable as error:
                if isinstance(error, NoAnswer) or await _listens(address):
                    hint = "" if Tls.from_environment() else "; a service under TLS needs --tls"
                    raise NoAnswer(
                        f"{address} accepts connections, but no service answered in time{hint}: {error}"
                    ) from error
                raise ServiceUnavailable(f"no service answers at {address}: {error}") from error
            except Unauthenticated as error:
                if secret:
                    raise
                allowed = f"the service's token for this role, or its owner's: {WHERE}"
                raise Unauthenticated("token", MISSING, allowed) from error

    return asyncio.run(run())


async def _listens(address: str) -> bool:
    """Whether the address accepts connections. The kernel accepts them even for a service that hangs."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LISTENS_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError):  # TimeoutError is an OSError
        return False
    writer.close()
    return True


async def _first(statuses: "AsyncIterator[Status]", updates: int) -> "AsyncIterator[Status]":
    seen = 0
    async for status in statuses:
        yield status
        seen += 1
        if seen == updates:
            return


async def _print_lines(statuses: "AsyncIterator[Status]") -> None:
    async for status in statuses:
        sys.stdout.write(json_text(plain(status)) + "\n")
        sys.stdout.flush()


async def _draw(statuses: "AsyncIterator[Status]", address: str) -> None:
    from rich.live import Live

    from dora.ops.view.live import service_view

    with Live(console=stdout(), auto_refresh=False) as live:
        async for status in statuses:
            live.update(service_view(status, f"dora {address}"), refresh=True)


async def _narrate(statuses: "AsyncIterator[Status]") -> None:
    from dora.ops.view.narration import Narrator

    narrator = Narrator()
    clock = asyncio.get_running_loop().time
    async for status in statuses:
        for line in narrator.tell(status, clock()):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
