"""Experts that a router prefers to others by less than rounding: either choice is right, and nothing else is."""

import json
from collections.abc import Iterable
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.data.run_record import CommittedStep, Recorder
from dora.data.trajectory import Trajectory
from dora.data.types import Segment
from dora.models.routers import has_routers, watched
from dora.models.tiny import make_tiny
from dora.ops.verify import verify
from dora.ops.verify.recompute import load_model
from dora.ops.verify.ties import with_choices_turned
from dora.weights.canary import CANARY_TOKENS, canary_token_ids, compute_canary
from tests.contract.trainer_service import make_trajectory

PROMPT = (1, 5)
RESPONSE = tuple((11 * place + 3) % 60 + 4 for place in range(24))
EXPERTS_PER_TOKEN = 2  # of make_tiny's mixture
Place = tuple[int, int]  # layer, place in the sequence


def logprobs_of(module: Any, tokens: Iterable[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logprobs = torch.log_softmax(module(ids).logits[0, :-1], -1)
    found: torch.Tensor = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return found


def set_margin(folder: Path, tokens: Iterable[int], at: Place, margin: float) -> None:
    """The last expert taken leads the first one left out by ``margin`` there; below 0: they have changed places."""
    layer, place = at
    module = load_model(folder)
    seen: list[torch.Tensor] = []
    router = module.model.layers[layer].mlp.gate
    router.register_forward_pre_hook(lambda _, given: seen.append(given[0].reshape(-1, given[0].shape[-1])))
    logprobs_of(module, tokens)
    hidden, weight = seen[0][place].double(), router.weight.detach().double()
    order = (weight @ hidden).argsort(descending=True)
    last, next_ = order[EXPERTS_PER_TOKEN - 1], order[EXPERTS_PER_TOKEN]
    lead = (weight[last] - weight[next_]) @ hidden
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.{layer}.mlp.gate.weight"
    tensors[name][next_] = (weight[next_] + (lead - margin) * hidden / (hidden @ hidden)).float()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("moe", tmp_path_factory.mktemp("models") / "moe")


def sampled_by(folder: Path) -> Trajectory:
    """By an engine to which ``folder``'s choices are the right ones."""
    return make_trajectory(
        1,
        0,
        0,
        group_size=1,
        behaviour_version=0,
        staleness=1,
        prompt_token_ids=list(PROMPT),
        response_token_ids=list(RESPONSE),
        logprobs=logprobs_of(load_model(folder), PROMPT + RESPONSE)[len(PROMPT) - 1 :].numpy(),
        loss_mask=[1] * len(RESPONSE),
        length_tokens=len(RESPONSE),
        worker_history=(Segment("w0", 0, len(RESPONSE) - 1, "new", 0),),
    )


def recorded(folder: Path, trajectory: Trajectory, weights: Path) -> Path:
    with Recorder(folder) as recorder:
        recorder.keep_version(0, weights)
        recorder.commit(CommittedStep(0, 1, {}, 0.0), weights)
        recorder.append([trajectory])
    return folder


def sides(mixture: Path, folder: Path, ties: list[Place], margin: float) -> tuple[Path, Path]:
    """Two folders of the same weights but for that ``margin``: the one prefers an expert by it, the other its rival."""
    ours = copytree(mixture, folder / "ours")
    for at in ties:
        set_margin(ours, PROMPT + RESPONSE, at, margin)
    theirs = copytree(ours, folder / "theirs")
    for at in ties:
        set_margin(theirs, PROMPT + RESPONSE, at, -margin)
    return ours, theirs


@pytest.mark.parametrize("ties", [[(1, 8)], [(0, 8)], [(0, 8), (1, 3)]], ids=["last layer", "first layer", "two"])
def test_the_other_of_two_tied_experts_is_no_violation(mixture: Path, tmp_path: Path, ties: list[Place]) -> None:
    ours, theirs = sides(mixture, tmp_path, ties, 2e-6)
    trajectory = sampled_by(theirs)
    apart = np.abs(trajectory.logprobs - sampled_by(ours).logprobs)
    assert apart.max() > 1e-3  # far more than rounding
    report = verify(recorded(tmp_path / "record", trajectory, ours))
    assert (report.ok, report.router_ties) == (True, len(ties)), report.violations
    assert report.max_abs_diff < 1e-4


def test_a_choice_that_rounding_does_not_decide_is_one(mixture: Path, tmp_path: Path) -> None:
    ours, theirs = sides(mixture, tmp_path, [(1, 8)], 0.01)
    report = verify(recorded(tmp_path / "record", sampled_by(theirs), ours))
    assert (report.violations_total, report.router_ties) == (1, 0)


def test_a_tie_excuses_no_other_number(mixture: Path, tmp_path: Path) -> None:
    ours, theirs = sides(mixture, tmp_path, [(1, 8)], 2e-6)
    record = recorded(tmp_path / "record", sampled_by(theirs), ours)
    file = record / "trajectories.jsonl"
    line = json.loads(file.read_text())
    for token in (7, 12):  # that of the tie, and one that has none
        changed = {**line, "logprobs": [*line["logprobs"]]}
        changed["logprobs"][token] -= 0.005
        file.write_text(json.dumps(changed) + "\n")
        report = verify(record)
        assert (report.violations_total, report.router_ties) == (1, 0)


def test_a_dense_model_has_no_ties(tmp_path: Path) -> None:
    dense = make_tiny("dense", tmp_path / "dense")
    with watched(load_model(dense), margin=1e9) as ties:
        pass
    assert ties == []
    assert with_choices_turned(load_model(dense), sampled_by(dense), 1e-3) is None


@pytest.mark.parametrize("fields", [{"num_experts": 8, "experts_a_token": 2}, {}])
def test_a_config_of_another_family_is_none_of_a_mixture(mixture: Path, fields: dict[str, int]) -> None:
    module = load_model(mixture)
    usual = canary_token_ids(module.config.vocab_size)
    module.config = SimpleNamespace(vocab_size=module.config.vocab_size, **fields)
    assert not has_routers(module)
    assert compute_canary(Plain(module)).token_ids == usual


class Plain(torch.nn.Module):
    """A causal language model of one's own: all that a canary needs is its ``config.vocab_size``."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.config, self.table = module.config, torch.nn.Embedding(module.config.vocab_size, module.config.vocab_size)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


def test_every_choice_within_the_margin_is_listed(mixture: Path) -> None:
    module = load_model(mixture)
    with watched(module, margin=1e9) as ties:
        logprobs_of(module, PROMPT + RESPONSE)
    length = len(PROMPT + RESPONSE)
    assert [(tie.router, tie.token) for tie in ties] == [
        (f"model.layers.{layer}.mlp.gate", token) for layer in (0, 1) for token in range(length)
    ]
    with watched(module, margin=0.1) as close:
        logprobs_of(module, PROMPT + RESPONSE)
    assert [tie.margin for tie in close] == [tie.margin for tie in ties if tie.margin <= 0.1]
    with watched(module, margin=1.0) as none:
        pass
    assert none == [] and not module.model.layers[0].mlp.gate._forward_pre_hooks


def test_a_canary_has_no_ties(mixture: Path, tmp_path: Path) -> None:
    dense = load_model(make_tiny("dense", tmp_path / "dense"))
    usual = canary_token_ids(dense.config.vocab_size)
    assert compute_canary(dense).token_ids == usual
    ours = copytree(mixture, tmp_path / "ours")
    set_margin(ours, usual, (1, 8), 2e-6)
    theirs = copytree(ours, tmp_path / "theirs")
    set_margin(theirs, usual, (1, 8), -2e-6)
    canary = compute_canary(load_model(ours))
    assert len(canary.token_ids) == CANARY_TOKENS and canary.token_ids != usual
    apart = (torch.tensor(canary.logprobs) - logprobs_of(load_model(theirs), canary.token_ids)).abs()
    assert apart.max() < 1e-4
    assert (logprobs_of(load_model(ours), usual) - logprobs_of(load_model(theirs), usual)).abs().max() > 1e-3
