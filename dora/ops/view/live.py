"""The live view of a service: pure functions from a status to rich renderables."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from dora.ops.view.hosts import notice_rows
from dora.ops.view.metrics import alarms, metrics
from dora.ops.view.numbers import duration, measured, number
from dora.ops.view.service import (
    HOSTED,
    KV_USE,
    PACE,
    STATE,
    WAITING,
    by_version,
    drain_rows,
    filling,
    refusals,
    sessions_idle,
    state_style,
    storage,
    tokens_per_s,
    without_drained,
)  # fmt: skip
from dora.ops.view.tables import PLAIN, Column, Note, Sheet
from dora.rpc.dora_pb2 import Status, WorkerStatus

BAR_CELLS = 24
SLOTS_CELLS = 10  # width of a worker's bar
SPARKS = " ▁▂▃▄▅▆▇█"
WORKERS_SHOWN = 16  # more workers are shown by version and state
PACE_STEPS = 8  # whose times tell how long the others take
METRICS_SHOWN = 8  # `dora status` shows all
SHOWN_COUNTERS = (
    "groups_admitted", "groups_trained", "migrations_kv", "migrations_reprefill", "tokens_reprefilled",
    "blackout_ms_p50", "staleness_max", "workers_lost", "c1_violations",
)  # fmt: skip
WORKER_COLUMNS: Sequence[Column[WorkerStatus]] = (
    Column("worker", "its id", lambda worker: worker.worker_id, words=True),
    STATE,
    HOSTED,
    Column("running", "requests being decoded, out of its slots", lambda worker: _slots(worker)),
    WAITING,
    KV_USE,
    PACE,
)


def service_view(status: Status, title: str, steps_planned: int = 0) -> RenderableType:
    """Shows progress, workers, reward, the trainer's metrics and counters. ``steps_planned`` 0 means without an end."""
    workers = Sheet(WORKER_COLUMNS, _shown(without_drained(status.workers)[0]), looks=(PLAIN,), tell=False)
    leaving = (*drain_rows(status), *notice_rows(status))
    drain = [Text(f"{name}: {told}", "cyan") for name, told in leaving]
    head = [_progress(status, steps_planned), *drain, *_faults(status), *refusals(status)]
    below = [Note(_rewards(status)), *map(Note, _sessions(status)), *_metrics(status), _counters(status)]
    return Panel(
        Group(*(Note(line) for line in head), Text(), workers, Text(), *below),
        title=title,
        title_align="left",
        border_style="dim",
    )


def _shown(workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    if len(workers) <= WORKERS_SHOWN:
        return by_version(workers)
    alike: dict[tuple[int, int, str], list[WorkerStatus]] = defaultdict(list)
    for worker in workers:
        alike[-worker.version, -worker.target_version, worker.state].append(worker)
    return [_together(members) for _, members in sorted(alike.items())]


def _together(workers: Sequence[WorkerStatus]) -> WorkerStatus:
    first = workers[0]
    return WorkerStatus(
        worker_id=first.worker_id if len(workers) == 1 else f"{len(workers):,} workers",
        state=first.state,
        version=first.version,
        target_version=first.target_version,
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        slots=sum(worker.slots for worker in workers),
        kv_use=sum(worker.kv_use for worker in workers) / len(workers),
        tokens_per_s=sum(worker.tokens_per_s for worker in workers),
    )


def bar(share: float, cells: int, style: str) -> Text:
    """A bar of ``cells`` characters, filled to ``share`` (0 to 1)."""
    full = round(min(max(share, 0.0), 1.0) * cells)
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"))


def spark_line(values: list[float]) -> str:
    """One character per value, scaled from 0 to the largest."""
    top = max([*values, 0.0])
    if top <= 0:
        return SPARKS[1] * len(values)
    return "".join(SPARKS[max(1, round(max(value, 0.0) / top * (len(SPARKS) - 1)))] for value in values)


def _slots(worker: WorkerStatus) -> Text:
    filled = bar(worker.running / max(worker.slots, 1), SLOTS_CELLS, state_style(worker))
    return filled.append(f"  {worker.running:,}/{worker.slots:,}")


def _progress(status: Status, steps_planned: int) -> Text:
    committed = status.newest_version
    text = Text.assemble(("steps ", "bold"), f"{committed}")
    if steps_planned:
        text.append_text(Text.assemble(f" of {steps_planned}  ", bar(committed / steps_planned, BAR_CELLS, "green")))
        if (left_s := to_go_s(status, steps_planned)) is not None:
            text.append(f"  {duration(left_s)} to go")
    text.append_text(Text.assemble(("   filling ", "bold"), filling(status), f"   up {duration(status.uptime_s)}"))
    return text.append(f"   {tokens_per_s(status.workers)} tokens/s")


def to_go_s(status: Status, steps_planned: int) -> float | None:
    """The time to the last step, at the mean pace of the latest steps; None before two steps or after the last."""
    took = [step.took_s for step in status.steps if step.HasField("took_s")][-PACE_STEPS:]
    left = steps_planned - status.newest_version
    return left * fmean(took) if took and left > 0 else None


def _faults(status: Status) -> list[Text]:
    lines = [storage(status)] if status.storage_faults else []
    failed = status.prompts_failed
    lines += [Text(f"prompts: failed: {failed}", "bold red")] if failed else []
    last = status.steps[-1:]
    return lines + [Text(f"step {step.step}: {line}", "bold red") for step in last for line in alarms(step.metrics)]


def _rewards(status: Status) -> Text:
    finished = sum(version.groups_finished for version in status.versions)
    rewards = [step.mean_reward for step in status.steps][-40:]
    latest = f"{spark_line(rewards)} {measured(rewards[-1])}" if rewards else "no step committed yet"
    return Text.assemble(("reward ", "bold"), latest, ("   groups finished, not taken ", "bold"), str(finished))


def _sessions(status: Status) -> list[Text]:
    idle, counted = sessions_idle(status), status.counters
    turns = int(counted.get("turns_ended", 0))
    if not (idle or turns):
        return []
    sampling = sum(version.requests_running for version in status.versions)
    parts = (
        *(("sessions ", "bold"), f"{sampling:,} sampling, {idle:,} in tool time"),
        *(("   turns ", "bold"), f"{turns:,} ended, {counted.get('turns_resumed', 0):,.0f} resumed with their KV, "),
        f"{counted.get('turns_reprefilled', 0):,.0f} prefilled anew",
    )
    return [Text.assemble(*parts)]


def _metrics(status: Status) -> list[RenderableType]:
    sent = metrics(status.steps[-1].metrics) if status.steps else []
    if not sent:
        return []
    more = [f"and {len(sent) - METRICS_SHOWN} more"] if len(sent) > METRICS_SHOWN else []
    shown = [f"{name} {value}" for name, value in sent[:METRICS_SHOWN]]
    return [Note(Text.assemble((f"trainer, step {status.steps[-1].step} ", "bold"), "   ".join([*shown, *more])))]


def _counters(status: Status) -> RenderableType:
    parts = [(name, status.counters[name]) for name in SHOWN_COUNTERS if name in status.counters]
    return Columns([Text.assemble((f"{name} ", "dim"), number(value)) for name, value in parts], padding=(0, 3))
