"""docs/reports.md explains every field of the JSON that it is about; docs/operations.md has every command."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora.cli.app import COMMANDS, app
from dora.orchestrator.core.state import Counters
from dora.planning.profile import fit, validate
from dora.planning.samples import DecodeSample, Experts, Measurement, MixedRequest, PrefillSample
from dora.replay import Known, KnownWorker, Summary
from dora.sim.fault import Fault
from dora.sim.report import BrokenReport
from dora.sim.sweep import SweepFailure, SweepReport
from dora.view.profile import profile_tree as profile_report

DOCS = Path(__file__).parents[2] / "docs"
ONE, ALL, PRESETS, SWEEP, PLAN, PROFILE, REPLAY = (
    "One run: `dora simulate`",
    "All policies: `dora simulate --compare`",
    "Presets: `dora simulate presets`",
    "Fault sweeps: `dora simulate sweep`",
    "Splits: `dora plan`",
    "Cost of an engine: `dora profile`",
    "Event logs: `dora replay`",
)
SMALL = ("simulate", "--preset", "small", "--steps", "2", "--warmup", "1")


def named(*sections: str) -> set[str]:
    """What stands in backticks in these sections of docs/reports.md."""
    text = (DOCS / "reports.md").read_text()
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    return {name for section in sections for name in re.findall(r"`([^`]+)`", parts[section])}


def answer(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def keys(tree: Any) -> Iterator[str]:
    """The names of all fields, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield name
            yield from keys(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from keys(each)


def names_of(*kinds: Any) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


@pytest.mark.parametrize(
    ("arguments", "sections"),
    [
        (SMALL, (ONE,)),
        (("simulate", "--preset", "dora-64", "--policy", "sync", "--steps", "1", "--warmup", "0"), (ONE, ALL)),
        ((*SMALL, "--compare"), (ONE, ALL)),
        (("simulate", "presets"), (PRESETS,)),
        (("simulate", "sweep", "--seeds", "2"), (SWEEP,)),
        (("plan", "--gpus", "64"), (PLAN, PROFILE)),
        (("plan", "--generation-s", "600", "--training-s", "300", "--engines", "2"), (PLAN,)),
    ],
)
def test_every_field_that_a_command_prints_is_explained(arguments: tuple[str, ...], sections: tuple[str, ...]) -> None:
    assert set(keys(answer(*arguments))) <= named(*sections)


def test_every_field_of_what_went_wrong_is_explained() -> None:
    assert names_of(BrokenReport) <= named(ONE)
    assert names_of(SweepReport, SweepFailure, Fault) <= named(SWEEP)


def test_every_field_of_a_profile_is_explained() -> None:
    decode = tuple(
        DecodeSample(running, float(kv), 0.01 + 1e-6 * kv + 1e-3 * running)
        for running in (1, 2, 4)
        for kv in (10 * running, 100 * running)
    )
    mixed = (MixedRequest(10, 20),)
    measured = Measurement(4, decode, (PrefillSample(1, 10, 0.1),), mixed, 1.0, (1.0,), 2.0, Experts(8, 2))
    fitted = fit(measured.decode, measured.prefill, measured.experts)
    tree = profile_report("tiny", measured, fitted, validate(fitted.coefficients, measured))
    assert {*keys(tree), "passed"} <= named(PROFILE)


def test_every_field_of_a_replay_is_explained() -> None:
    decision = {"number", "time_s", "event", "known", "commands", "refused", "failed"}  # dora/cli/decisions.py
    document = {"started_at", "torn_bytes", "decisions", "summary"}
    assert decision | document | names_of(Known, KnownWorker, Summary) <= named(REPLAY)


def test_every_command_and_every_counter_is_in_the_operators_handbook() -> None:
    text = (DOCS / "operations.md").read_text()
    commands = {*COMMANDS, "simulate", "simulate presets", "simulate sweep"}
    assert {name for name in commands if not re.search(rf"^\| `dora {name}[ `]", text, re.MULTILINE)} == set()
    assert {name for name in names_of(Counters) if name not in text} == set()
