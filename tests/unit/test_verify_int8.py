"""Verification knows a rollout in int8: its logprobs are the quantised model's own.

``tests/fixtures/int8_responses.json`` is what vLLM sampled, on CPU and in float32, of two tiny models that it had
quantised (``workers.quantisation``), with the logprobs that it reported.
"""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dora.data.run_record import CommittedStep, Recorder
from dora.data.trajectory import Trajectory
from dora.data.types import EngineNumerics, Segment
from dora.errors import InvalidValue
from dora.models.quantisation import fp8_of, int8_of, is_quantised, quantise
from dora.models.tiny import make_tiny
from dora.ops.cli.app import app
from dora.ops.verify import verify
from dora.ops.verify.recompute import load_model
from dora.ops.verify.tolerances import numerics_of
from dora.orchestrator.setup import recorder_of
from dora.weights.store import WeightStore
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused
from tests.service import configured

FOUND = Path(__file__).parents[1] / "fixtures" / "int8_responses.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny("dense", folder / str(seed), seed=seed, kv_heads=2) for seed in (0, 1)]


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return [
        make_trajectory(
            1,
            group,
            0,
            group_size=1,
            behaviour_version=each["version"],
            staleness=1 - each["version"],
            prompt_token_ids=each["prompt"],
            response_token_ids=each["response"],
            logprobs=np.array(each["logprobs"], np.float32),
            loss_mask=[1] * len(each["response"]),
            length_tokens=len(each["response"]),
            worker_history=(Segment("w0", 0, len(each["response"]) - 1, "new", each["version"]),),
        )
        for group, each in enumerate(json.loads(FOUND.read_text())["responses"])
    ]


def recorded(folder: Path, models: list[Path], trajectories: list[Trajectory], quantisation: str) -> Path:
    with Recorder(folder, EngineNumerics(quantisation)) as recorder:
        recorder.keep_version(0, models[0])
        recorder.commit(CommittedStep(0, 1, {}, 1.0), models[1])
        recorder.append(trajectories)
    return folder


def test_what_an_engine_in_int8_has_sampled_is_verified(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    report = verify(recorded(tmp_path, models, trajectories, "int8"), window_versions=2)
    assert report.ok and report.atol == 0.1 and report.versions == (0, 1)
    assert report.tokens > 100 and 0 < report.mean_abs_diff < 5e-3
    shown = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["atol"] == 0.1


async def test_a_service_records_how_its_engines_quantise(tmp_path: Path, models: list[Path]) -> None:
    store = WeightStore(tmp_path / "store", models[0])
    for quantisation in ("", "int8"):
        folder = tmp_path / f"record-{quantisation}"
        config = configured(models[0], workers__quantisation=quantisation, record=str(folder))
        async with contextlib.AsyncExitStack() as stack:
            await recorder_of(config, store, stack, False)
        assert numerics_of(folder / "versions" / "0") == EngineNumerics(quantisation)
    assert not (models[0] / "rollout.json").exists(), "the model's own folder is as it was"


def test_the_same_is_no_rollout_of_the_whole_model(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    report = verify(recorded(tmp_path, models, trajectories, ""), window_versions=2)
    assert report.logprob_mismatches == len(trajectories) and report.atol == 1e-3
    assert report.mean_abs_diff > 0.01


def test_each_version_is_compared_with_itself(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    folder = recorded(tmp_path, models[::-1], trajectories, "int8")
    assert verify(folder).logprob_mismatches == len(trajectories), "of the other version"


@pytest.mark.parametrize("text", ['{"quantisation": "fp4"}', '{"quantisation": 8}', "{}", "[]", "{", "\xff"])
def test_what_is_not_known_is_refused(
    text: str, tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    folder = recorded(tmp_path, models, trajectories, "int8")
    (folder / "versions" / "1" / "rollout.json").write_bytes(text.encode("latin-1"))
    with refused(InvalidValue, names=("versions/1/rollout.json", "int8")):
        verify(folder)


def test_a_model_of_which_nothing_is_quantised_is_no_model_in_int8() -> None:
    assert quantise(torch.nn.Sequential(torch.nn.Linear(4, 4)), "int8") == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.down_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.mlp.experts.3.up_proj.weight", False),
        ("model.layers.0.self_attn.kv_b_proj.weight", False),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_projections_alone_are_quantised(name: str, expected: bool) -> None:
    assert is_quantised(name) is expected


def test_a_row_of_nothing_stays_nothing() -> None:
    values, scales = int8_of(torch.tensor([[0.0, 0.0], [1.0, -127.0], [0.4, 2.0]]))
    assert values.tolist() == [[0, 0], [1, -127], [25, 127]]
    assert torch.isfinite(scales).all()
    values, scales = fp8_of(torch.tensor([[0.0, 0.0], [1.0, -448.0], [0.4, 2.0]]))
    assert values.float().tolist() == [[0, 0], [1, -448], [88, 448]] and torch.isfinite(scales).all()


def test_fp8_keeps_less_of_a_model_than_int8_and_is_verified_within_its_own_tolerance(models: list[Path]) -> None:
    token_ids = torch.arange(48)[None] % 60
    logprobs = {
        kind: torch.log_softmax(load_model(models[0], kind)(input_ids=token_ids).logits.detach(), -1)
        for kind in ("", "int8", "fp8")
    }
    apart = {kind: float((logprobs[kind] - logprobs[""]).abs().max()) for kind in ("int8", "fp8")}
    assert 0 < apart["int8"] < apart["fp8"] < 2.0
