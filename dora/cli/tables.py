"""Tables for people: pure functions from the service's answers to rich tables."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from dora.rpc.dora_pb2 import Status, TrajectoryStatus, WorkerStatus

STATE_STYLES = {"ready": "green", "loading": "yellow", "vacating": "cyan", "draining": "cyan", "lost": "bold red"}
VERSION_STYLES = tuple(f"bold white on {name}" for name in ("blue", "dark_orange3", "green4", "purple4", "deep_pink4"))


def status_table(status: Status) -> Table:
    """The service in one screen: where the window stands, then every counter."""
    table = Table(title="service", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    table.add_row("model", status.model)
    table.add_row("uptime", duration(status.uptime_s))
    table.add_row("state", "draining" if status.draining else "serving")
    table.add_row("trainer", status.trainer or "none attached")
    table.add_row("window", f"{status.window_versions} versions, newest v{status.newest_version}")
    table.add_row("filling step", filling(status))
    table.add_row("workers", ", ".join(f"{worker.worker_id} {worker.state}" for worker in status.workers) or "none")
    table.add_row("generation", pace(status))
    table.add_row("prompts queued", f"{status.prompts_queued:,}")
    table.add_section()
    for name in sorted(status.counters):
        table.add_row(name, number(status.counters[name]))
    return table


def versions_table(status: Status) -> Table:
    """The live policy versions, newest first."""
    table = _table("live versions", "version", "deadline step", "DP groups", "open", "finished", "running", "waiting")
    for row in sorted(status.versions, key=lambda row: -row.version):
        table.add_row(
            version_cell(row.version, " newest" if row.newest else ""),
            *(str(n) for n in (row.deadline_step, row.workers, row.groups_open, row.groups_finished)),
            *(str(n) for n in (row.requests_running, row.requests_waiting)),
        )
    return table


def groups_table(status: Status) -> Table:
    """The DP groups, by the version they host."""
    columns = ("worker", "state", "version", "running", "waiting", "slots", "KV use", "tokens/s", "pid", "reason")
    table = _table("DP groups", *columns)
    for worker in by_version(status.workers):
        table.add_row(
            worker.worker_id,
            Text(worker.state, style=STATE_STYLES.get(worker.state, "dim")),
            hosted_version(worker),
            *(str(n) for n in (worker.running, worker.waiting, worker.slots)),
            f"{worker.kv_use:.0%}",
            f"{worker.tokens_per_s:,.0f}",
            str(worker.pid),
            worker.reason,
        )
    return table


def trajectories_table(trajectories: Iterable[TrajectoryStatus], total: int) -> Table:
    """Requests that are not committed yet."""
    columns = ("trajectory", "state", "version", "deadline step", "worker", "tokens", "age", "moves", "prompt")
    table = _table("trajectories", *columns)
    shown = 0
    for row in trajectories:
        shown += 1
        table.add_row(
            row.trajectory_id,
            row.state,
            version_cell(row.version),
            str(row.deadline_step),
            row.worker or "-",
            f"{row.tokens}/{row.max_tokens}",
            duration(row.age_s),
            str(row.moves),
            row.prompt_id,
        )
    if shown < total:
        table.caption = f"{shown} of {total} (--limit shows more)"
    return table


def by_version(workers: Iterable[WorkerStatus]) -> list[WorkerStatus]:
    """Newest version first, then by name."""
    return sorted(workers, key=lambda worker: (-worker.version, worker.worker_id))


def hosted_version(worker: WorkerStatus) -> Text:
    """The version a DP group holds, and the one it is on its way to."""
    cell = version_cell(worker.version) if worker.version >= 0 else Text("none", style="dim")
    if worker.target_version >= 0 and worker.target_version != worker.version:
        cell = Text.assemble(cell, " to ", version_cell(worker.target_version))
    return cell


def version_cell(version: int, suffix: str = "") -> Text:
    """A version as a coloured cell; neighbouring versions never share a colour."""
    return Text.assemble((f" v{version} ", VERSION_STYLES[version % len(VERSION_STYLES)]), suffix)


def filling(status: Status) -> str:
    """How far the step is that is being filled."""
    if status.groups_per_step == 0:
        return f"{status.filling_step}, its size is not set yet (a trainer sets it)"
    taken = status.groups_per_step - status.filling_left
    return f"{status.filling_step}, {taken} of {status.groups_per_step} groups taken"


def pace(status: Status) -> str:
    """Whether generation keeps up with training, and what would let it."""
    if not status.HasField("dp_groups_to_add"):
        return "its pace is known after two steps of a trainer that says how long it waited"
    count = status.dp_groups_to_add
    if not count:
        return "keeps up with training"
    return f"lags training: {count} more DP group{'s' * (count > 1)} would keep up"


def duration(seconds: float) -> str:
    """``3725`` as ``1 h 2 min``, ``62`` as ``1 min 2 s``, ``1.5`` as ``1.5 s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.1f} s"


def number(value: float) -> str:
    """Counts without a fraction, measurements with two places."""
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    words = {"worker", "state", "version", "trajectory", "prompt", "reason"}
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table
