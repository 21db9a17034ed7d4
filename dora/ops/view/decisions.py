"""Decisions of a replay, for people and programs: pure functions of data from ``dora.orchestrator.recovery.replay``."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypedDict

from rich.text import Text

from dora.core.commands import Command
from dora.core.events import Event
from dora.ops.view.tables import Facts, version_cell
from dora.orchestrator.recovery.replay import Decision, Known, KnownWorker, Summary, line_of

WORKERS_SHOWN = 8  # more workers are shown by version
COMMANDS_SHOWN = 8  # of one kind in one decision; --json lists all
INDENT = " " * 9
CONTINUED = 11  # indent of a continuation line


class DecisionTree(TypedDict):
    """One event of a replay."""

    number: Annotated[int, "number of the event, from 1"]
    time_s: Annotated[float, "seconds since the service's start"]
    event: Annotated[dict[str, Any], "its kind and its fields, as in `dora/core/events.py`"]
    known: Annotated[dict[str, Any], "what the core knew before the event"]
    commands: Annotated[list[dict[str, Any]], "kind and fields of each, as in `dora/core/commands.py`"]
    refused: Annotated[str | None, "the error with which the core refused the event, or null"]
    failed: Annotated[str | None, "the bug that ended the service at this event, or null"]


class ReplayTree(TypedDict):
    """A replay as a whole."""

    started_at: Annotated[float, "start of the service, in seconds of Unix time"]
    torn_bytes: Annotated[int, "bytes of an incomplete record at the end of the log, after a crash"]
    decisions: Annotated[list[DecisionTree], "the events shown"]
    summary: Annotated[dict[str, Any], "the final state of the replay"]


def block(decision: Decision, time_s: float) -> Text:
    """One event: its time and kind, the core's knowledge and its commands. ``time_s`` counts from the log's start."""
    text = Text.assemble(
        (f"#{decision.number}", "bold"), f"  {time_s:+.3f} s  ", (line_of(decision.event), "bold cyan")
    )
    text.append("\n  known  ", "dim").append(_known_line(decision.known))
    for line in _worker_lines(decision.known.workers):
        text.append(f"\n{INDENT}").append_text(line)
    if decision.failure:
        return text.append("\n  failed  ", "bold red").append(f"{decision.failure}; this ended the service\n")
    if decision.refusal:
        return text.append("\n  refused  ", "bold red").append(decision.refusal).append("\n")
    text.append("\n  chose  ", "dim" if not decision.chose else "green")
    return text.append(f"\n{INDENT}".join(_command_lines(decision.commands)) or "nothing").append("\n")


def tree(decision: Decision, time_s: float) -> DecisionTree:
    """Returns the whole decision as JSON values; ``refused`` and ``failed`` are null if the core accepted the event."""
    return {
        "number": decision.number,
        "time_s": time_s,
        "event": _message_tree(decision.event),
        "known": asdict(decision.known),
        "commands": [_message_tree(command) for command in decision.commands],
        "refused": decision.refusal or None,
        "failed": decision.failure or None,
    }


def summary_table(title: str, summary: Summary) -> Facts:
    table = Facts(title)
    table.add_row("events", _counted(summary.events))
    table.add_row("commands", _counted(summary.commands))
    table.add_row("refused", f"{summary.refused:,}")
    if summary.failed:
        table.add_row("failed", Text(summary.failed, "bold red"))
    table.add_row("filling step", str(summary.step))
    table.add_row("newest version", version_cell(summary.newest))
    table.add_section()
    for name, value in summary.counters.items():
        table.add_row(name, f"{value:,}")
    return table


def _message_tree(message: Event | Command) -> dict[str, Any]:
    return {"kind": type(message).__name__, **asdict(message)}


def _known_line(known: Known) -> str:
    parts = [
        f"step {known.step} takes {known.left} more",
        f"newest v{known.newest}",
        f"slack {' '.join(map(str, known.slack))}",
        f"admissible {_by_version(known.admissible)}",
        f"backlog {known.backlog}",
    ]
    if known.rejected:
        parts.append(f"rejected {' '.join(f'v{version}' for version in known.rejected)}")
    for name, count in (("waiting", known.waiting), ("finished", known.finished)):
        if count:
            parts.append(f"{name} {_by_version(count)}")
    for name, number in (("leased", known.leased), ("handoffs", known.handoffs)):
        if number:
            parts.append(f"{name} {number}")
    return "; ".join(parts)


def _by_version(counts: Mapping[int, int]) -> str:
    return " ".join(f"v{version}:{count}" for version, count in counts.items())


def _worker_lines(workers: tuple[KnownWorker, ...]) -> list[Text]:
    if len(workers) <= WORKERS_SHOWN:
        return [_load(worker.worker_id, [worker]) for worker in workers]
    versions = sorted({worker.target for worker in workers}, reverse=True)
    members = ([worker for worker in workers if worker.target == version] for version in versions)
    return [_load(f"{len(group)} workers", group) for group in members]


def _load(name: str, group: list[KnownWorker]) -> Text:
    first, capacity = group[0], sum(worker.kv_tokens for worker in group)
    on_the_way = sum(worker.hosts != worker.target for worker in group)
    line = Text.assemble(f"{name} ", version_cell(first.target) if first.target >= 0 else "no version")
    line.append(f" {sum(worker.held for worker in group)}/{sum(worker.slots for worker in group)} requests")
    line.append(f", KV {sum(worker.kv_used_tokens for worker in group) / capacity:.0%}")
    line.append(f" ({sum(worker.kv_claimed_tokens for worker in group) / capacity:.0%} claimed)")
    if len(group) > 1:
        return line.append(f", {on_the_way} not there yet") if on_the_way else line
    if first.draining:
        line.append(", draining")
    if first.loaded != first.target:
        line.append(f", still v{first.loaded}" if first.loaded >= 0 else ", no weights yet")
    return line


def _command_lines(commands: Iterable[Command]) -> list[str]:
    lines: list[str] = []
    seen: Counter[str] = Counter()
    for command in commands:
        kind = type(command).__name__
        seen[kind] += 1
        if seen[kind] <= COMMANDS_SHOWN:
            lines.append(line_of(command))
    return lines + [f"{kind} {count - COMMANDS_SHOWN} more" for kind, count in seen.items() if count > COMMANDS_SHOWN]


def _counted(kinds: Mapping[str, int]) -> str:
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(kinds.values()):,}" + "".join(f"\n  {count:,} {kind}" for kind, count in ordered)
