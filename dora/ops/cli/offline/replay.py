"""``dora replay``"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.errors import InvalidValue, one_of
from dora.ops.cli import completion
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_json, stderr, stdout

if TYPE_CHECKING:
    from dora.orchestrator.recording.eventlog import EventLog
    from dora.orchestrator.recovery.replay import Decision, Replay

EXAMPLE = "dora replay out/state --from 100 --to 200 --only StepCommitted"


def replay(
    file: Annotated[Path, typer.Argument(metavar="LOG", help="State folder of a service with service.keep_events.")],
    first: Annotated[int, typer.Option("--from", min=1, metavar="N", help="First event to show.")] = 1,
    last: Annotated[int | None, typer.Option("--to", min=1, metavar="N", help="Stop after event N.")] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...",
            autocompletion=completion.event_kinds,
            help="Show only events of these kinds, and events that caused commands of these kinds.",
        ),
    ] = None,
    decisions: Annotated[
        bool,
        typer.Option(
            "--decisions", metavar="", help="Show only events at which the core made a decision or refused something."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a service's event log through the core again, and show what the core knew and decided at each event.

    If a bug in the core ended the service, the replay ends at the same event, and the command exits with 1.
    """
    from dora.orchestrator.plugins import load_strategies
    from dora.orchestrator.recording.eventlog import EventLog
    from dora.orchestrator.recovery.replay import Replay

    load_strategies()
    if last is not None and last < first:
        raise InvalidValue("--to", last, f"at least --from, {first}")
    kinds = _kinds(only)
    log = EventLog(file)
    events = sum(1 for _ in islice(log, last))  # refuses a damaged log before printing anything
    if log.torn_bytes:
        stderr().print(f"dora: {file}: the last {log.torn_bytes} bytes are incomplete (crash)", soft_wrap=True)

    def shown(decision: "Decision") -> bool:
        return (
            decision.number >= first
            and (not decisions or decision.chose)
            and (not kinds or not kinds.isdisjoint(decision.kinds()))
        )

    run = Replay(log.config, islice(log, events))
    (_print_json if as_json else _print_text)(log, run, (decision for decision in run if shown(decision)))
    if run.summary().failed:
        raise typer.Exit(ExitCode.FAILED)


def _print_text(log: "EventLog", run: "Replay", decisions: Iterator["Decision"]) -> None:
    from dora.ops.view.decisions import CONTINUED, block, summary_table
    from dora.ops.view.tables import WIDEST, Note

    console = stdout()
    for decision in decisions:
        text = block(decision, decision.now_s - log.now_s)
        if console.is_terminal:
            console.print(Note(text, indent=CONTINUED, widest=WIDEST))
        else:
            console.print(text, soft_wrap=True)
    console.print(summary_table(f"{log.path}", run.summary()))


def _print_json(log: "EventLog", run: "Replay", decisions: Iterator["Decision"]) -> None:
    from dataclasses import asdict

    from dora.ops.view.decisions import ReplayTree, tree

    trees = [tree(decision, decision.now_s - log.now_s) for decision in decisions]
    print_json(
        ReplayTree(started_at=log.started_at, torn_bytes=log.torn_bytes, decisions=trees, summary=asdict(run.summary()))
    )


def _kinds(only: str | None) -> frozenset[str]:
    from dora.orchestrator.recovery.replay import KINDS

    spelled = {kind.lower(): kind for kind in KINDS}
    found = set()
    for name in only.split(",") if only is not None else ():
        kind = spelled.get(name.strip().lower())
        if kind is None:
            raise InvalidValue("--only", name, one_of(name.strip(), KINDS, cutoff=0.6))
        found.add(kind)
    return frozenset(found)
