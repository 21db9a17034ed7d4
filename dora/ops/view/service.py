"""Tables of a running service: pure functions of its replies."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from time import localtime, strftime
from typing import Any, Final

from rich.text import Text

from dora.data.counters import COUNTERS
from dora.data.mismatch import RATIO_HIGH, RATIO_LOW
from dora.data.step_parts import named
from dora.ops.view.conversation import escaped
from dora.ops.view.evaluation import evaluated_line, evaluation_line
from dora.ops.view.hosts import hosts_line, hosts_table, notice_rows
from dora.ops.view.metrics import alarms, metrics
from dora.ops.view.numbers import NONE, duration, measured, number
from dora.ops.view.pools import pools_line, pools_table
from dora.ops.view.tables import Column, Facts, Sheet, version_cell
from dora.rpc.dora_pb2 import (
    CheckpointReply,
    KvTierStatus,
    LogLine,
    Mismatch,
    Status,
    StepMetrics,
    TrajectoryStatus,
    VersionStatus,
    WorkerStatus,
)

STATE_STYLES: Final = {
    "ready": "green",
    "loading": "yellow",
    "vacating": "cyan",
    "draining": "cyan",
    "lost": "bold red",
}
DRAINED: Final = "drained"  # the state of a worker that has left as was asked

VERSION_STYLES: Final = {"suspect": "yellow", "rejected": "bold red", "unavailable": "red"}

PROMPTS_DONE: Final = ("groups_trained", "groups_cancelled", "prompts_cancelled", "prompts_refused")
PROMISES: Final = ("c1_violations", "groups_lost", "staleness_max", "versions_live_max")  # shown even if they are 0
FAULTS: Final = "faults and other events"
COUNTER_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "promises": (),
    "groups and prompts": ("groups_", "prompts_cancelled", "prompts_refused", "trajectories_"),
    "tokens": ("tokens_",),
    "moves": ("migrations_", "handoffs_", "blackout_", "kv_bytes", "kv_fallbacks", "rebalances"),
    "parked requests": ("requests_parked", "requests_resumed", "parked_", "pool_", "kv_tokens"),
    "KV tier": ("tier_",),
    FAULTS: (),
}  # the beginnings of the names of each group's counters

CANCELLED: Final = {
    "dequeued": "removed from the queue",
    "cancelled": "its group {group} is cancelled",
    "before": "was cancelled before",
    "taken": "its group {group} stays: a step has taken it",
    "unknown": "unknown: no waiting prompt or open group has this name",
}  # results of a cancellation

STATE: Final[Column[WorkerStatus]] = Column(
    "state",
    "`starting`: its process has not connected yet; `joining`: no weights yet; `loading`: loading new weights; "
    "`ready`; `vacating`: its requests leave before it changes version; `draining`: they leave before it ends; "
    "`lost`: its connection broke (the reason is below the table). Workers that ended as requested are below it too",
    lambda worker: Text(worker.state, style=state_style(worker)),
    words=True,
)
HOSTED: Final[Column[WorkerStatus]] = Column(
    "version",
    "the policy version it hosts; `v2 to v3` while it changes to another",
    lambda worker: hosted_version(worker),
    words=True,
)
WAITING: Final[Column[WorkerStatus]] = Column(
    "waiting", "requests queued in its engine", lambda worker: f"{worker.waiting:,}", rank=2
)
KV_USE: Final[Column[WorkerStatus]] = Column(
    "KV\nuse",
    "share of its KV cache in use; above `balance.pressure`, requests are moved away",
    lambda worker: f"{worker.kv_use:.0%}",
    rank=1,
)
PACE: Final[Column[WorkerStatus]] = Column(
    "tokens/s", "tokens generated, over the last five seconds", lambda worker: number(worker.tokens_per_s, 0)
)
WORKER_COLUMNS: Final[Sequence[Column[WorkerStatus]]] = (
    Column("worker", "its id, for `migrate --to` and `drain`", lambda worker: worker.worker_id, words=True),
    STATE,
    HOSTED,
    Column("running", "requests being decoded", lambda worker: f"{worker.running:,}"),
    WAITING,
    Column("slots", "maximum number of requests decoded at once", lambda worker: f"{worker.slots:,}", rank=3),
    KV_USE,
    PACE,
    Column("pid", "the worker's process", lambda worker: str(worker.pid or NONE), rank=4),
)
DRAFTS: Final[Column[WorkerStatus]] = Column(
    "per step",
    "tokens of a request in a step, with accepted drafts; shown if a worker drafts",
    lambda worker: f"{worker.tokens_per_step:.2f}" if worker.tokens_per_step else NONE,
    rank=2,
)
KIND: Final[Sequence[Column[WorkerStatus]]] = (
    Column("kind", "of its machine; shown if they differ", lambda worker: worker.kind or NONE, words=True, rank=2),
    Column(
        "speed",
        "of its steps, measured, as a multiple of that of `balance.cost`; shown if kinds differ",
        lambda worker: f"{worker.speed:.2f}" if worker.speed else NONE,
        rank=2,
    ),
)
RANKS: Final[Column[WorkerStatus]] = Column(
    "ranks",
    "processes of its engine, as tensor times pipeline parallelism; shown if a worker has several",
    lambda worker: f"{worker.tensor_parallel}x{worker.pipeline_parallel}" if worker.tensor_parallel else NONE,
    rank=2,
)
VERSION_COLUMNS: Final[Sequence[Column[VersionStatus]]] = (
    Column(
        "version",
        "a live policy version",
        lambda row: version_cell(row.version, " newest" if row.newest else ""),
        words=True,
    ),
    Column(
        "deadline\nstep",
        "the last step that may train on its groups: version + window - 1",
        lambda row: f"{row.deadline_step:,}",
    ),
    Column("workers", "workers that host it or are about to", lambda row: f"{row.workers:,}"),
    Column("open", "prompt groups admitted and not yet taken by a step", lambda row: f"{row.groups_open:,}"),
    Column("finished", "open groups, complete and waiting for a step", lambda row: f"{row.groups_finished:,}", rank=1),
    Column("running", "its requests on a worker", lambda row: f"{row.requests_running:,}", rank=2),
    Column("waiting", "its requests on no worker", lambda row: f"{row.requests_waiting:,}", rank=3),
    Column("idle", "its sessions between two turns", lambda row: f"{row.sessions_idle:,}", rank=4),
    Column(
        "state",
        "`published`; `suspect`: a worker refused its weights and none has loaded them yet; `rejected`: its trainer "
        "must republish it; `unavailable`: no host has its weights, and nothing needs them",
        lambda row: Text(row.state, style=VERSION_STYLES.get(row.state, "")),
        words=True,
    ),
)
TRAJECTORY_COLUMNS: Final[Sequence[Column[TrajectoryStatus]]] = (
    Column("trajectory", "the request's id, for `migrate`", lambda row: row.trajectory_id, words=True),
    Column(
        "state",
        "`waiting`, `running`, `moving` (in a handoff), `parked` (waiting, with its KV in a pool), `finished`, or "
        "`leased` (with the trainer, not committed)",
        lambda row: row.state,
        words=True,
    ),
    Column("version", "the version that samples it", lambda row: version_cell(row.version), words=True),
    Column("deadline\nstep", "the last step that may train on it", lambda row: f"{row.deadline_step:,}", rank=2),
    Column("worker", "its worker, or the pool that stores it", lambda row: row.worker or NONE, words=True),
    Column(
        "tokens",
        "generated tokens, out of the maximum; of a session, those of all turns, given ones included",
        lambda row: f"{row.tokens:,}/{row.max_tokens:,}" if row.max_tokens else f"{row.tokens:,}",
    ),
    Column("age", "time since its group was admitted", lambda row: duration(row.age_s), rank=1),
    Column("moves", "handoffs so far", lambda row: f"{row.moves:,}", rank=3),
    Column("prompt", "the prompt's id", lambda row: row.prompt_id, words=True, rank=4),
)
MISMATCHES_SHOWN: Final = 2  # versions, the latest
EVALUATED_SHOWN: Final = 3  # ended evaluations, the latest
PARTS_SHOWN: Final = 4  # of a step's time, the longest
WARNINGS_SHOWN: Final = 3  # the latest
AGENTS_SHARE: Final = 0.1  # of a step's time that waits for agents, from which on it is told
WORKERS_NAMED: Final = 8  # if there are more, only their number is shown


def status_table(status: Status, everything: bool = False) -> Facts:
    """The service on one screen: the window, the last step, then the counters in groups.

    Counters that are 0 are hidden, except for those of the promises, unless ``everything`` is asked for.
    """
    table = Facts("service")
    table.add_row("model", status.model)
    table.add_row("uptime", duration(status.uptime_s))
    table.add_row("state", "draining" if status.draining else "serving")
    for name, told in (*drain_rows(status), *notice_rows(status)):
        table.add_row(name, told)
    table.add_row("storage", storage(status))
    table.add_row("trainer", trainer_line(status))
    for window in window_lines(status):
        table.add_row("window", window)
    table.add_row("filling step", filling(status))
    if status.HasField("window_wait"):
        table.add_row("waits for", status.window_wait.reason)
    for refused in refusals(status):
        table.add_row("weights", refused)
    there, left = without_drained(status.workers)
    table.add_row("workers", _workers_line(there) + (f"; left: {_listed(left)}" if left else ""))
    table.add_row("pools", pools_line(status))
    if len(status.hosts) > 1:
        table.add_row("hosts", hosts_line(status))
    table.add_row("generation", f"{tokens_per_s(status.workers)} tokens/s; {pace(status)}")
    if drafts := drafts_line(status.counters):
        table.add_row("drafts", drafts)
    if status.HasField("kv_tier"):
        table.add_row("KV tier", tier(status.kv_tier, len(status.workers)))
    oldest = min((row.version for row in status.versions), default=0)
    for evaluation in status.evaluations:
        table.add_row("evaluation", evaluation_line(evaluation, oldest))
    for evaluated in status.evaluated[-EVALUATED_SHOWN:]:
        table.add_row("evaluated", evaluated_line(evaluated))
    for found in status.mismatches[:MISMATCHES_SHOWN]:
        table.add_row("mismatch", mismatch_line(found))
    if status.prompts_failed:
        table.add_row("prompts", Text(f"failed: {status.prompts_failed}", "bold red"))
    table.add_row("prompts queued", f"{status.prompts_queued:,}")
    table.add_row("prompts done", prompts_done(status))
    for line in status.warnings[-WARNINGS_SHOWN:]:
        table.add_row(line.level, warning(line))
    if status.steps:
        table.add_section()
        for name, value in step_rows(status.steps[-1]):
            table.add_row(name, value)
    _add_counters(table, status, everything)
    return table


def mismatch_line(found: Mismatch) -> str:
    """Says how far a version's engines are from the trainer's policy."""
    moved = f", with what {found.staleness} steps have changed since" if found.staleness else ""
    return (
        f"v{found.version} in {found.precision or 'full precision'}: KL {found.kl:.2g} nats a token, "
        f"{found.ratio_outside:.1%} of ratios outside {RATIO_LOW} to {RATIO_HIGH}{moved}"
    )


def drain_rows(status: Status) -> list[tuple[str, str]]:
    """Returns the reason for which a service drains, what it waits for and the remedy; empty while it serves."""
    drain = status.drain
    if not drain.ended:
        return []
    return [("ended", drain.ended), ("waits for", drain.waits_for or "nothing"), ("to do", drain.remedy)]


def _add_counters(table: Facts, status: Status, everything: bool) -> None:
    shown = {name: value for name, value in status.counters.items() if value or everything or name in PROMISES}
    texts = {name: number(value) for name, value in shown.items()}
    width = max(map(len, texts.values()), default=0)
    for group in COUNTER_GROUPS:
        names = sorted(name for name in texts if counter_group(name) == group)
        if names:
            table.add_section()
            table.add_row(Text(group, "dim"), "")
        for name in names:
            table.add_row(f"  {name}", texts[name].rjust(width), COUNTERS.get(name, ""))
    if hidden := len(status.counters) - len(shown):
        table.notes.append(f"{hidden} counters that are 0 are not shown; `dora status --all` shows them.")


def counter_group(name: str) -> str:
    """Returns the group in which a counter is shown. Counters without a group come into the last one."""
    if name in PROMISES:
        return next(iter(COUNTER_GROUPS))
    return next((group for group, starts in COUNTER_GROUPS.items() if starts and name.startswith(starts)), FAULTS)


def drafts_line(counters: Mapping[str, float]) -> str:
    """Returns what drafts saved, or an empty text if no token was drafted."""
    drafted, accepted = counters.get("tokens_drafted", 0), counters.get("tokens_accepted", 0)
    steps = counters.get("tokens_generated", 0) - accepted
    if not drafted or steps <= 0:
        return ""
    share, per_step = accepted / drafted, (steps + accepted) / steps
    return f"{accepted:,.0f} of {drafted:,.0f} drafted tokens accepted ({share:.0%}); {per_step:.2f} tokens a step"


def tokens_per_s(workers: Iterable[WorkerStatus]) -> str:
    """The tokens that all workers generate in a second, over the last five seconds."""
    return number(sum(worker.tokens_per_s for worker in workers), 0)


def without_drained(workers: Iterable[WorkerStatus]) -> tuple[list[WorkerStatus], list[str]]:
    """The workers, and the names of those that have left as was asked."""
    rows = list(workers)
    return [row for row in rows if row.state != DRAINED], [row.worker_id for row in rows if row.state == DRAINED]


def sessions_idle(status: Status) -> int:
    """Counts the sessions between two turns, while their tools run."""
    return sum(version.sessions_idle for version in status.versions)


def versions_table(status: Status) -> Sheet[VersionStatus]:
    """The live policy versions, newest first; below them the reasons of refusals by workers."""
    rows = sorted(status.versions, key=lambda row: row.version, reverse=True)
    return Sheet(VERSION_COLUMNS, rows, "live versions", notes=[line.plain for line in refusals(status)])


def workers_table(workers: Sequence[WorkerStatus]) -> Sheet[WorkerStatus]:
    """Shows workers in the given order, and below them the reasons of losses."""
    more = [RANKS] if any(map(ranks, workers)) else []
    more += KIND if len({worker.kind for worker in workers if worker.speed}) > 1 else []
    more += [DRAFTS] if any(worker.tokens_per_step for worker in workers) else []
    there, left = without_drained(workers)
    notes = [*_reasons(there), *([f"left, as was asked: {_listed(left)}"] if left else [])]
    return Sheet([*WORKER_COLUMNS, *more], there, "workers", notes=notes)


def trajectories_table(trajectories: Sequence[TrajectoryStatus], total: int) -> Sheet[TrajectoryStatus]:
    """Shows the requests that are not committed."""
    notes = [f"{len(trajectories):,} of {total:,} (--limit shows more)"] if len(trajectories) < total else []
    return Sheet(TRAJECTORY_COLUMNS, trajectories, "trajectories", notes=notes)


def step_rows(step: StepMetrics) -> Iterator[tuple[str, str | Text]]:
    """The last committed step: the service's measurements, then the trainer's alarms and metrics."""
    took = duration(step.took_s) if step.HasField("took_s") else ""
    waited = f"the trainer waited {duration(step.waited_s)} of it" if step.HasField("waited_s") and took else ""
    yield "last step", ", ".join(part for part in (str(step.step), took and f"took {took}", waited) if part)
    if parts := named(step.parts_s):
        yield "  went to", ", ".join(f"{words} {duration(time_s)}" for words, time_s in parts[:PARTS_SHOWN])
    yield "  mean reward", measured(step.mean_reward)
    yield "  staleness", f"mean {step.staleness_mean:.2f}, largest {step.staleness_max}{_by_staleness(step)}"
    yield "  tokens", f"{step.tokens:,}"
    yield from (("  alarm", Text(line, "bold red")) for line in alarms(step.metrics))
    yield from ((f"  trainer: {name}", value) for name, value in metrics(step.metrics))


def _by_staleness(step: StepMetrics) -> str:
    groups = step.staleness_groups
    return f"; groups by staleness from 0: {', '.join(map(str, groups))}" if groups else ""


def _workers_line(workers: Sequence[WorkerStatus]) -> str:
    if len(workers) <= WORKERS_NAMED:
        return ", ".join(f"{worker.worker_id} {_state(worker)}" for worker in workers) or "none"
    states = Counter(map(_state, workers))
    return f"{len(workers):,}: " + ", ".join(f"{count:,} {state}" for state, count in states.most_common())


def _state(worker: WorkerStatus) -> str:
    return f"{worker.state} ({found} ranks)" if (found := ranks(worker)) else worker.state


def ranks(worker: WorkerStatus) -> str:
    """The ranks of a worker's engine, tensor x pipeline; empty for a single rank."""
    several = max(worker.tensor_parallel, worker.pipeline_parallel) > 1
    return f"{worker.tensor_parallel}x{worker.pipeline_parallel}" if several else ""


def _reasons(workers: Iterable[WorkerStatus]) -> list[str]:
    names: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        if worker.reason:
            names[worker.reason].append(worker.worker_id)
    return [f"{_listed(found)}: {reason}" for reason, found in names.items()]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - WORKERS_NAMED
    return ", ".join(names[:WORKERS_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def by_name(workers: Iterable[WorkerStatus]) -> list[WorkerStatus]:
    return sorted(workers, key=lambda worker: worker.worker_id)


def by_version(workers: Iterable[WorkerStatus]) -> list[WorkerStatus]:
    """Sorts by version, newest first, then by name."""
    return sorted(workers, key=lambda worker: (-worker.version, worker.worker_id))


# The lists of a status, by command and JSON key: their rows, and their table.
LISTS: Final[Mapping[str, tuple[Callable[[Status], Sequence[Any]], Callable[[Status], Sheet[Any]]]]] = {
    "versions": (lambda status: status.versions, versions_table),
    "groups": (lambda status: by_version(status.workers), lambda status: workers_table(by_version(status.workers))),
    "workers": (lambda status: by_name(status.workers), lambda status: workers_table(by_name(status.workers))),
    "pools": (lambda status: status.pools, pools_table),
    "hosts": (lambda status: status.hosts, hosts_table),
}


def cancelled_line(name: str, state: str, group_id: str) -> str:
    return f"{name}: {CANCELLED.get(state, state).format(group=group_id)}\n"


def checkpoint_line(reply: CheckpointReply) -> str:
    groups = f"{reply.groups} groups ({reply.groups_leased} with the trainer), {reply.prompts_queued} queued prompts"
    size = (
        f"log {reply.log_bytes / 1e6:.1f} MB in {reply.segments} segments, {reply.live_bytes / 1e6:.1f} MB of it live"
    )
    kept = (
        f"version {reply.kept_version} is kept: dora serve --state NEW --from {reply.folder}@{Path(reply.kept).name}\n"
    )
    return f"{reply.folder}: step {reply.step}, {groups}; {size}\n{kept if reply.kept else ''}"


def state_style(worker: WorkerStatus) -> str:
    return STATE_STYLES.get(worker.state, "dim")


def hosted_version(worker: WorkerStatus) -> Text:
    cell = version_cell(worker.version) if worker.version >= 0 else Text("none", style="dim")
    if worker.target_version >= 0 and worker.target_version != worker.version:
        cell = Text.assemble(cell, " to ", version_cell(worker.target_version))
    return cell


def refusals(status: Status) -> list[Text]:
    return [
        Text(f"v{row.version} {row.state} ({row.reason})", style=VERSION_STYLES[row.state])
        for row in status.versions
        if row.state in VERSION_STYLES
    ]


def window_lines(status: Status) -> Iterator[str]:
    """The current window; for an adaptive one also its bounds and the reason of its last change."""
    line = f"{status.window_versions} versions, newest v{status.newest_version}"
    if not status.HasField("adaptive_window"):
        yield line
        return
    adaptive = status.adaptive_window
    yield f"{line}; adapts from {adaptive.min} to {adaptive.max}"
    if adaptive.HasField("last_change"):
        last = adaptive.last_change
        yield f"from {last.before} to {last.size} after step {last.step}: {last.reason}"
    else:
        yield "has not changed yet"


def filling(status: Status) -> str:
    if status.groups_per_step == 0:
        return f"{status.filling_step}; a trainer must set its size"
    taken = status.groups_per_step - status.filling_left
    return f"{status.filling_step}, {taken} of {status.groups_per_step} groups taken"


def trainer_line(status: Status) -> Text:
    if not status.trainer_stalled:
        return Text(status.trainer or "none attached")
    return Text(f"{status.trainer}: {status.trainer_stalled}; another may attach without take_over", "bold red")


def storage(status: Status) -> Text:
    """Whether all folders can be written; otherwise the faults and their effect."""
    if not status.storage_faults:
        return Text("well")
    return Text(f"{faults_of(status)}; no group is admitted until it can be written", "bold red")


def faults_of(status: Status) -> str:
    """The folders that cannot be written now, with the reasons; empty if there are none."""
    return "; ".join(f"{fault.place}: {fault.reason}" for fault in status.storage_faults)


def tier(found: KvTierStatus, workers: int) -> Text:
    if not found.up:
        return Text(f"down: {found.reason}; workers compute all KV", "yellow")
    used, size = found.used_bytes / 2**20, found.size_bytes / 2**20
    return Text(f"up, {used:,.0f} of {size:,.0f} MiB in {found.chunks:,} chunks, {found.workers} of {workers} workers")


def prompts_done(status: Status) -> str:
    """The prompts that are trained on or cancelled, and the time to go if the number of all is known."""
    done = int(sum(status.counters.get(name, 0) for name in PROMPTS_DONE))
    if not status.HasField("prompts_total"):
        return f"{done:,}"
    left = max(0, status.prompts_total - done)
    text = f"{status.prompts_total - left:,} of {status.prompts_total:,}"
    if not (left and status.step_s and status.groups_per_step):
        return text
    return f"{text}; {duration(ceil(left / status.groups_per_step) * status.step_s)} to go"


def warning(line: LogLine) -> str:
    return f"{strftime('%H:%M:%S', localtime(line.at))} {escaped(line.text)}"


def advice(status: Status) -> str:
    """The number of hosts that is advised, if another one is."""
    found = status.fleet_advice
    if found.hosts_wanted == found.hosts:
        return ""
    does = "follows" if found.act else "advised"
    return f"; {does}: {found.hosts_wanted} joined hosts, not {found.hosts} ({found.reason})"


def pace(status: Status) -> str:
    if status.window_wait.waits_for == "agents":
        return "waits for agents: more workers would not help"
    if not status.HasField("dp_groups_to_add"):
        return "unknown until a trainer has reported its waiting time for two steps"
    count, share = status.dp_groups_to_add, status.agents_wait_s / (status.step_s or 1.0)
    text = f"lags training: {count} more worker{'s' * (count > 1)} would keep up" if count else "keeps up with training"
    text += f"; {share:.0%} of a step's time waits for agents" if share >= AGENTS_SHARE else ""
    return text + advice(status)
