"""``dora simulate presets``"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from dora.cli.options import JsonOption
from dora.cli.output import print_json, print_whole, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from dora.sim.scenario import Scenario

EXAMPLE = "dora simulate presets"
HEADINGS = ("GPUs\ntrain:rollout", "GPUs\na worker", "window", "groups\na step", "group\nsize", "longest\nresponse")


@dataclass(frozen=True, slots=True)
class PresetRow:
    """What tells presets apart, under the default strategy."""

    preset: Annotated[str, "its name"]
    train_gpus: Annotated[int, "accelerators that train"]
    rollout_gpus: Annotated[int, "accelerators that generate"]
    gpus_per_engine: Annotated[int, "accelerators of one worker"]
    window: Annotated[int, "policy versions that may be live"]
    groups_per_step: Annotated[int, "prompt groups a step"]
    group_size: Annotated[int, "responses to one prompt"]
    cap_tokens: Annotated[int, "longest response"]


def presets(as_json: JsonOption = False) -> None:
    """List what --preset takes, each as the default strategy runs it."""
    from dora.config import DEFAULT_POLICY
    from dora.sim.presets import NAMES, scenario_for

    rows = [_row(scenario_for(name, DEFAULT_POLICY)) for name in NAMES]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_whole(stdout(), _table(rows))


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


def _table(rows: list[PresetRow]) -> "Table":
    from dora.view.tables import sheet

    table = sheet(("preset", *HEADINGS))
    for row in rows:
        numbers = (row.gpus_per_engine, row.window, row.groups_per_step, row.group_size, row.cap_tokens)
        table.add_row(row.preset, f"{row.train_gpus}:{row.rollout_gpus}", *(f"{number:,}" for number in numbers))
    return table
