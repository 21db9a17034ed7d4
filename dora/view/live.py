"""The live view of a service: pure functions from a status to something rich can draw."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from dora.rpc.dora_pb2 import Status, WorkerStatus
from dora.view.numbers import duration, number
from dora.view.service import HOSTED, KV_USE, PACE, STATE, WAITING, by_version, filling, state_style
from dora.view.tables import Column, table_of

BAR_CELLS = 24
SPARKS = " ▁▂▃▄▅▆▇█"
SHOWN_COUNTERS = (
    "groups_admitted", "groups_trained", "migrations_kv", "migrations_reprefill", "tokens_reprefilled",
    "blackout_ms_p50", "staleness_max", "workers_lost", "c1_violations",
)  # fmt: skip
WORKER_COLUMNS: Sequence[Column[WorkerStatus]] = (
    Column("worker", "its id", lambda worker: worker.worker_id, words=True),
    STATE,
    HOSTED,
    Column("running", "requests that it decodes, of its slots", lambda worker: _slots(worker), words=True),
    WAITING,
    KV_USE,
    PACE,
)


def service_view(status: Status, title: str, steps_asked: int = 0) -> RenderableType:
    """Progress, workers, versions, reward and counters in one panel. ``steps_asked`` 0: no end in sight."""
    workers = table_of(None, WORKER_COLUMNS, by_version(status.workers), box=None, padding=(0, 2, 0, 0))
    return Panel(
        Group(_progress(status, steps_asked), Text(), workers, Text(), _rewards(status), _counters(status)),
        title=title,
        title_align="left",
        border_style="dim",
    )


def bar(share: float, cells: int, style: str) -> Text:
    """A bar ``cells`` wide, filled to ``share`` (0 to 1)."""
    full = round(min(max(share, 0.0), 1.0) * cells)
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"))


def spark_line(values: list[float]) -> str:
    """One character a value, scaled from 0 to the largest."""
    top = max([*values, 0.0])
    if top <= 0:
        return SPARKS[1] * len(values)
    return "".join(SPARKS[max(1, round(max(value, 0.0) / top * (len(SPARKS) - 1)))] for value in values)


def _slots(worker: WorkerStatus) -> Text:
    filled = bar(worker.running / max(worker.slots, 1), BAR_CELLS, state_style(worker))
    return filled.append(f"  {worker.running}/{worker.slots}")


def _progress(status: Status, steps_asked: int) -> Text:
    committed = status.newest_version
    text = Text.assemble(("steps ", "bold"), f"{committed}")
    if steps_asked:
        text.append_text(Text.assemble(f" of {steps_asked}  ", bar(committed / steps_asked, BAR_CELLS, "green")))
    return text.append_text(
        Text.assemble(("   filling ", "bold"), filling(status), f"   up {duration(status.uptime_s)}")
    )


def _rewards(status: Status) -> Text:
    finished = sum(version.groups_finished for version in status.versions)
    rewards = [step.mean_reward for step in status.steps][-40:]
    latest = f"{spark_line(rewards)} {rewards[-1]:.3f}" if rewards else "no step committed yet"
    return Text.assemble(("reward ", "bold"), latest, ("   groups finished, not taken ", "bold"), str(finished))


def _counters(status: Status) -> Text:
    parts = [(name, status.counters[name]) for name in SHOWN_COUNTERS if name in status.counters]
    return Text("   ").join(Text.assemble((f"{name} ", "dim"), number(value)) for name, value in parts)
