"""The clock of a fleet: the simulator's step time of a mode, which two cores that share everything cannot show."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dora.lab.sim.presets import scenario_for
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from experiments.convergence.plan import Store, read_json, write_json
from experiments.convergence.rows import Row

PREDICTOR = "statistics"  # of lengths: a service's default


@dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated runs of every mode."""

    preset: str = "dora-64"
    steps: int = 10
    warmup: int = 5
    seed: int = 0


def fleet_scenario(row: Row, preset: str) -> Scenario:
    """The preset as the row's policy has it: splits and training times are the preset's own for it."""
    assert row.fleet is not None
    policy, window = row.fleet
    scenario = scenario_for(preset, policy, window)  # type: ignore[arg-type]
    return scenario.model_copy(update={"balance": scenario.balance.model_copy(update={"predictor": PREDICTOR})})


def stored_report(row: Row, fleet: Fleet, store: Store) -> Mapping[str, Any] | None:
    """The simulator's report of the row; None: there is none, or it is of something else."""
    found = read_json(_path(row, store))
    return found["report"] if found is not None and found["asked"] == _asked(row, fleet) else None


def fleet_report(row: Row, fleet: Fleet, store: Store) -> Mapping[str, Any]:
    """The same; simulated where it is not there. Raises as ``simulate``."""
    if (found := stored_report(row, fleet, store)) is not None:
        return found
    scenario = fleet_scenario(row, fleet.preset)
    report = asdict(simulate(scenario, steps=fleet.steps, warmup=fleet.warmup, seed=fleet.seed))
    write_json(_path(row, store), {"asked": _asked(row, fleet), "report": report})
    return report


def _asked(row: Row, fleet: Fleet) -> dict[str, Any]:
    return {"fleet": asdict(fleet), "scenario": fleet_scenario(row, fleet.preset).model_dump(mode="json")}


def _path(row: Row, store: Store) -> Path:
    return store.fleet / f"{row.name}.json"
