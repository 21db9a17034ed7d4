"""``dora simulate presets``"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_result

if TYPE_CHECKING:
    from dora.lab.sim.scenario import Scenario
    from dora.ops.view.tables import Sheet

EXAMPLE = "dora simulate presets"


@dataclass(frozen=True, slots=True)
class PresetRow:
    """The differences between presets, under the default strategy."""

    preset: Annotated[str, "its name"]
    train_gpus: Annotated[int, "accelerators that train"]
    rollout_gpus: Annotated[int, "accelerators that generate"]
    gpus_per_engine: Annotated[int, "accelerators per worker"]
    window: Annotated[int | str, "maximum number of live policy versions"]
    groups_per_step: Annotated[int, "prompt groups a step"]
    group_size: Annotated[int, "responses per prompt"]
    cap_tokens: Annotated[int, "longest response"]


def presets(as_json: JsonOption = False) -> None:
    """List the values of --preset, each as run by the default strategy."""
    from dora.config import DEFAULT_POLICY
    from dora.lab.sim.presets import NAMES, scenario_for

    rows = [_row(scenario_for(name, DEFAULT_POLICY)) for name in NAMES]
    print_result([asdict(row) for row in rows], _table(rows), as_json)


def _row(scenario: "Scenario") -> PresetRow:
    cluster, workload = scenario.cluster, scenario.workload
    return PresetRow(
        scenario.name,
        cluster.train_gpus,
        cluster.rollout_gpus,
        cluster.gpus_per_engine,
        scenario.window.size,
        scenario.trainer.groups_per_step,
        workload.group_size,
        workload.lengths.cap_tokens,
    )


def _table(rows: list[PresetRow]) -> "Sheet[PresetRow]":
    from dora.ops.view.tables import SHEET, Column, Sheet

    columns: Sequence[Column[PresetRow]] = (
        Column("preset", "", lambda row: row.preset, words=True),
        Column("GPUs\ntrain:rollout", "", lambda row: f"{row.train_gpus}:{row.rollout_gpus}"),
        Column("GPUs\na worker", "", lambda row: f"{row.gpus_per_engine:,}", rank=1),
        Column("window", "", lambda row: f"{row.window}"),
        Column("groups\na step", "", lambda row: f"{row.groups_per_step:,}"),
        Column("group\nsize", "", lambda row: f"{row.group_size:,}"),
        Column("longest\nresponse", "", lambda row: f"{row.cap_tokens:,}"),
    )
    return Sheet(columns, rows, looks=(SHEET,))
