"""Drafts of a small model with its own KV-cache, when they pay, and which folders are refused."""

import json
import random
import shutil
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import InvalidValue, LimitExceeded
from dora.models.drafts import check_draft
from dora.models.tiny import make_tiny
from dora.worker.drafting.draft_model import DraftModel
from dora.worker.drafting.model_drafter import RETRY_STEPS, ModelDrafter
from dora.worker.drafting.pace import Pace
from tests.refusals import refused

MIB = 1 << 20
TOKEN_BYTES = 2 * 2 * 64 * 4  # of the tiny model: keys and values of two layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "dense", seed=3)


def greedy(logits: torch.Tensor, number: int) -> list[int]:
    return logits.argmax(-1).tolist()


def test_a_draft_is_what_the_model_generates_whatever_happens_to_its_cache(folder: Path) -> None:
    """Requests gain tokens of their draft and others, go beyond the window, are cut, and lose their rows to others."""
    window = 80
    model, chosen = DraftModel(folder, "float32", 2, window, MIB), random.Random(1)
    assert model.rows == 2
    requests = {
        name: array("i", [chosen.randrange(3, 60) for _ in range(length)])
        for name, length in zip("abc", (1, 40, 200), strict=True)
    }
    for _ in range(40):
        drafted = [(name, requests[name]) for name in sorted(chosen.sample(sorted(requests), 2))]
        model.follow(drafted)
        drafts = model.draft(drafted, 5, greedy)
        for (name, token_ids), draft in zip(drafted, drafts, strict=True):
            seen = [*token_ids[model._of[name].first :], *draft[:-1]]
            assert len(seen) <= window
            with torch.inference_mode():
                logits = model._model(torch.tensor([seen]), use_cache=False).logits[0]
            assert greedy(logits[-5:], 0) == draft
            kept = chosen.randrange(6)
            token_ids.extend([*draft[:kept], chosen.choice([7, *draft])])
        if chosen.random() < 0.2:
            name = chosen.choice("abc")
            model.forget(name)
            del requests[name][1 + len(requests[name]) // 2 :]


def test_the_cache_of_a_draft_model_is_bounded(folder: Path) -> None:
    small, large = (DraftModel(folder, "float32", 16, 128, each * 128 * TOKEN_BYTES) for each in (3, 99))
    assert (small.rows, large.rows) == (3, 16)
    assert large.size_bytes - small.size_bytes == 13 * 128 * TOKEN_BYTES
    short = DraftModel(folder, "float32", 1, 16, MIB)  # a draft may be longer than a context
    short.follow([("a", array("i", range(15)))])
    assert len(short.draft([("a", array("i", range(15)))], 16, greedy)[0]) == 16
    with refused(InvalidValue, field="workers.history_mb"):
        DraftModel(folder, "float32", 16, 128, 20 * TOKEN_BYTES)


def test_a_draft_is_as_long_as_pays() -> None:
    pace = Pace()
    assert pace.draft_tokens(1, 1, 0.9, 0.0) == 0, "nothing is known yet"
    for _ in range(40):
        pace.observe(0.01, 1, drafted=False)
    lengths = [pace.draft_tokens(1, 1, acceptance, 0.001) for acceptance in (0.05, 0.5, 0.9)]
    assert lengths == sorted(set(lengths)) and lengths[0] == 0
    assert pace.draft_tokens(1, 1, 0.9, 0.02) == 0, "the model takes longer than the engine"
    assert pace.draft_tokens(64, 64, 0.9, 0.001) < lengths[-1]


class StandIn:
    """A draft model of which every draft is the same."""

    rows = 2

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self.lengths: list[int] = []

    def follow(self, requests: Sequence[Any]) -> None: ...
    def forget(self, name: str) -> None: ...

    def draft(self, requests: Sequence[Any], count: int, choose: Any) -> list[list[int]]:
        self._tick()
        self.lengths.append(count)
        return [[9] * count for _ in requests]


@pytest.mark.parametrize("is_good", [True, False])
def test_drafts_go_on_while_they_are_accepted(is_good: bool) -> None:
    now_ms = 0.0

    def tick() -> None:
        nonlocal now_ms
        now_ms += 1.0

    model: Any = StandIn(tick)
    drafter = ModelDrafter(model, lambda logits, places: [], clock=lambda: now_ms / 1e3)
    drafter.begin("1-r", RequestSpec("r", 1, (1, 2, 3), SamplingParams()))
    for _ in range(4 * RETRY_STEPS):
        drafter.begin_step(1)
        draft = drafter.drafts({"1-r": 99}).get("1-r", [])
        drafter.scheduled(1 + len(draft))
        now_ms += 10.0
        drafter.stepped()
        drafter.sampled("1-r", [*draft, 9] if is_good else [3], len(draft))
    if is_good:
        assert len(model.lengths) == 4 * RETRY_STEPS - 1 and model.lengths[-1] > 4
    else:
        assert 3 < len(model.lengths) < 40, "tried again now and then"


def test_folders_that_cannot_draft_are_refused(folder: Path, tmp_path: Path) -> None:
    check_draft(folder, folder, 2)

    def changed(**values: object) -> Path:
        made = Path(shutil.copytree(folder, tmp_path / str(len(list(tmp_path.iterdir())))))
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, **values}))
        return made

    head = changed(architectures=["LlamaForCausalLMEagle3"])
    vocabulary = changed()
    tokenizer = json.loads((vocabulary / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {name: -1 - each for name, each in tokenizer["model"]["vocab"].items()}
    (vocabulary / "tokenizer.json").write_text(json.dumps(tokenizer))
    states = changed(layer_types=["linear_attention", "full_attention"])
    short = changed(max_position_embeddings=32)
    for given in (tmp_path / "nowhere", tmp_path, head, vocabulary, changed(vocab_size=65), states, short):
        with refused(InvalidValue, field="workers.speculation", value=f"model:{given}"):
            check_draft(given, folder)
    with refused(LimitExceeded, field="workers.speculation"):
        check_draft(folder, folder, workers=10**9)
    check_draft(folder, folder, workers=0)  # on GPUs
