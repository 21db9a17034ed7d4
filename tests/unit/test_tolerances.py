"""The tolerance that ``dora verify`` applies, its message, and older records."""

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from dora.data.run_record import ROLLOUT_FILE, CommittedStep, Recorder
from dora.data.types import PLAIN_NUMERICS, EngineNumerics
from dora.errors import InvalidValue
from dora.ops.cli.app import app
from dora.ops.verify.tolerances import (
    BFLOAT16_ENGINES,
    BFLOAT16_WEIGHTS,
    BY_DEVICE,
    FLOAT32,
    FP8_ENGINES,
    INT8_ENGINES,
    INVARIANT,
    KV_ENGINES,
    Tolerance,
    exactness_of,
    numerics_of,
    tolerance_of,
)
from dora.weights.canary_bounds import CANARY_BOUNDS, KV_BOUND, QUANTISED_BOUNDS
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused
from tests.snippets import ROOT

HALF = EngineNumerics(dtype="bfloat16")
EVERY = [
    EngineNumerics(*each) for each in product(("", "int8", "fp8"), ("float32", "bfloat16"), (False, True), ("", "fp8"))
]


def expected(weights: torch.dtype, engines: EngineNumerics) -> Tolerance:
    if engines.kv_dtype:
        return KV_ENGINES
    if engines.quantisation == "fp8":
        return FP8_ENGINES
    if weights != torch.float32:
        return BFLOAT16_WEIGHTS
    if engines.dtype == "bfloat16":
        return BFLOAT16_ENGINES
    return INT8_ENGINES if engines.quantisation else FLOAT32


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tolerance_follows_from_weights_and_engines(weights: torch.dtype, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2, dtype=weights)}, tmp_path / "model.safetensors")
    for engines in EVERY:
        assert tolerance_of(tmp_path, engines) == expected(weights, engines), engines


@pytest.mark.parametrize("engines", EVERY)
def test_what_a_service_records_of_its_engines_is_read_back(engines: EngineNumerics, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with Recorder(tmp_path / "record", engines) as recorder:
        kept = recorder.keep_version(0, model)
    assert numerics_of(kept) == engines
    assert (kept / ROLLOUT_FILE).exists() == (engines != PLAIN_NUMERICS)


def test_records_of_older_services_are_read(tmp_path: Path) -> None:
    assert numerics_of(tmp_path) == PLAIN_NUMERICS
    (tmp_path / ROLLOUT_FILE).write_text('{"quantisation": "int8"}\n')
    assert numerics_of(tmp_path) == EngineNumerics("int8")


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantisation", "fp4"), ("kv_dtype", 8), ("dtype", "float8"), ("batch_invariant", "yes"), ("dtype", None)],
)
def test_records_of_newer_services_are_refused_by_field(field: str, value: object, tmp_path: Path) -> None:
    (tmp_path / ROLLOUT_FILE).write_text(json.dumps({**asdict(HALF), field: value}))
    with refused(InvalidValue, field=f"{ROLLOUT_FILE}: {field}", value=value):
        numerics_of(tmp_path)
    (tmp_path / ROLLOUT_FILE).write_text(json.dumps({**asdict(HALF), "later": 1}))
    with refused(InvalidValue, field=ROLLOUT_FILE):
        numerics_of(tmp_path)


def test_requests_are_exact_if_every_version_was_sampled_so() -> None:
    exact = EngineNumerics(dtype="bfloat16", batch_invariant=True)
    assert exactness_of([exact, exact]) == INVARIANT
    assert {exactness_of(each) for each in ([], [HALF], [exact, HALF])} == {BY_DEVICE}


@pytest.mark.parametrize(
    ("engines", "options", "rule", "exactness"),
    [
        (PLAIN_NUMERICS, (), "0.001: float32 weights and engines", BY_DEVICE),
        (HALF, (), "0.2: bfloat16 engines", BY_DEVICE),
        (EngineNumerics("", "bfloat16", True), (), "0.2: bfloat16 engines", INVARIANT),
        (HALF, ("--atol", "100"), "100: as given", BY_DEVICE),
    ],
)
def test_verify_says_which_rule_it_applied(
    engines: EngineNumerics, options: tuple[str, ...], rule: str, exactness: str, tmp_path: Path, tiny_dense: Path
) -> None:
    with Recorder(tmp_path, engines) as recorder:
        recorder.keep_version(0, tiny_dense)
        recorder.append([make_trajectory(0, 0, 0, group_size=1)])
        recorder.commit(CommittedStep(0, 1, {"s0-g0": 1}, 1.0), tiny_dense)
    report = json.loads(CliRunner().invoke(app, ["verify", str(tmp_path), "--json", *options]).stdout)
    assert report["rules"] == [rule] and report["exactness"] == exactness
    shown = CliRunner().invoke(app, ["verify", str(tmp_path), *options]).stdout
    assert rule in shown and exactness.split(";")[0] in shown


def test_the_documents_table_has_every_tolerance() -> None:
    text = (ROOT / "docs" / "gpus.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    named = {row[0].split(",")[0]: " ".join(row[1:]) for row in rows}
    low = {f"{kind} projections": bound for kind, bound in QUANTISED_BOUNDS.items()}
    canary = {**CANARY_BOUNDS, **low, "KV in low precision": KV_BOUND}
    recorded = {"float32": FLOAT32, "bfloat16": BFLOAT16_ENGINES, "int8 projections": INT8_ENGINES}
    recorded |= {"fp8 projections": FP8_ENGINES, "KV in low precision": KV_ENGINES}
    for row, tolerance in recorded.items():
        words = named[row].replace(";", " ").split()
        assert f"{tolerance.atol:g}" in words and f"{canary[row].most:g}" in words, row
    assert BFLOAT16_ENGINES.atol == BFLOAT16_WEIGHTS.atol
