"""A file gone through several times: every epoch whole, in an order that follows from seed and epoch alone."""

import json
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dora.config import PromptsConfig
from dora.data.types import Prompt
from dora.errors import Conflict, InvalidValue
from dora.prompts.epochs import permuted
from dora.prompts.resolving import resolve_prompts
from dora.prompts.source import Position, PromptSource
from dora.prompts.store import PromptStore
from dora.prompts.tokenizer import ChatTokenizer
from tests.refusals import refused


@pytest.fixture(scope="module")
def tokenizer(tiny_dense: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_dense)


def source(folder: Path, tokenizer: ChatTokenizer, rows: int, **settings: Any) -> PromptSource:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "ab", "answer": number}) + "\n" for number in range(rows)))
    return resolve_prompts(PromptsConfig(source=str(file), **settings), tokenizer)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_a_permutation_holds_every_row_once(count: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), ((1 << 63) - 1, (1 << 20) - 1)):
        assert sorted(permuted(index, count, seed, epoch) for index in range(count)) == list(range(count))


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {(seed, epoch): [permuted(i, 100, seed, epoch) for i in range(100)] for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    moved = sum(row != index for order in orders.values() for index, row in enumerate(order))
    assert moved > 380


def test_every_row_may_come_anywhere() -> None:
    """Over many seeds each row comes to each place about as often."""
    times = Counter((index, permuted(index, 5, seed, 0)) for seed in range(4000) for index in range(5))
    assert len(times) == 25 and all(680 < each < 920 for each in times.values())  # 800 and four standard deviations


def test_an_order_is_the_same_on_every_machine() -> None:
    assert [permuted(index, 10, 3, 2) for index in range(10)] == [0, 1, 9, 7, 8, 6, 4, 5, 2, 3]


def test_epochs_repeat_the_rows_under_ids_of_their_own(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    prompts = list(source(tmp_path, tokenizer, 3, epochs=3))
    assert [prompt.prompt_id for prompt in prompts] == [
        *("prompts:1", "prompts:2", "prompts:3"),
        *("prompts:1#1", "prompts:2#1", "prompts:3#1"),
        *("prompts:1#2", "prompts:2#2", "prompts:3#2"),
    ]
    assert [json.loads(prompt.verifier_json)["answer"] for prompt in prompts] == [0, 1, 2] * 3


def test_a_shuffled_source_goes_on_where_it_was(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = {"epochs": 4, "shuffle": True, "shuffle_seed": 5}
    made = source(tmp_path, tokenizer, 50, **settings)
    prompts = list(made)
    assert len(prompts) == len({prompt.prompt_id for prompt in prompts}) == 200
    for epoch in range(4):
        part = prompts[50 * epoch : 50 * epoch + 50]
        assert sorted(json.loads(prompt.verifier_json)["answer"] for prompt in part) == list(range(50))
    again = source(tmp_path, tokenizer, 50, **settings)
    assert list(again.starting_at(73)) == prompts[73:]
    assert again.position(73) == Position(epoch=1, index=23)
    assert list(source(tmp_path, tokenizer, 50, **{**settings, "shuffle_seed": 6})) != prompts


def test_without_end_means_without_end(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = source(tmp_path, tokenizer, 2, epochs=0)
    assert [prompt.prompt_id for prompt in islice(made.starting_at(2001), 2)] == ["prompts:2#1000", "prompts:1#1001"]


@pytest.mark.parametrize("prompt_id", ["x#1", "#0", "x" * 250])
def test_an_id_that_later_epochs_could_meet_is_refused(
    prompt_id: str, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "prompt_id": prompt_id}))
    assert len(list(resolve_prompts(str(file), tokenizer))) == 1
    with refused(InvalidValue, names=("1", "prompt_id")):
        resolve_prompts(PromptsConfig(source=str(file), epochs=2), tokenizer)


@pytest.mark.parametrize(
    ("spec", "settings", "field"),
    [
        ("tiny", {"epochs": 2}, "epochs"),
        ("reasoning-gym:chain_sum", {"shuffle": True}, "shuffle"),
        ("none", {"columns": {"prompt": "question"}}, "columns"),
        ("tiny", {"split": "train"}, "split"),
        ("none", {"other_columns": "ignore"}, "other_columns"),
    ],
)
def test_a_setting_without_effect_is_refused(
    spec: str, settings: dict[str, Any], field: str, tokenizer: ChatTokenizer
) -> None:
    with refused(InvalidValue, names=(field,)):
        resolve_prompts(PromptsConfig(source=spec, **settings), tokenizer)
    assert resolve_prompts(PromptsConfig(source=spec, then="wait"), tokenizer).epoch_prompts == 0


def test_a_file_that_changes_meanwhile_changes_nothing(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = source(tmp_path, tokenizer, 5)
    before = list(made)
    (tmp_path / "prompts.jsonl").unlink()
    assert list(made) == before


# -------------------------------------------------------------------------------------------------------------- store


def stored(number: int, prompt_id: str = "") -> Prompt:
    sampling = {"temperature": 0.5, "stop": ("\n", "é"), "stop_token_ids": (3,), "ignore_eos": True}
    return Prompt(prompt_id or f"p{number}", "t", (1, number), "text é" * 40, 4, sampling, '{"a": 1}', -7)


def test_what_is_stored_comes_back_as_it_was() -> None:
    store = PromptStore()
    for number in range(100):
        store.append(stored(number), Path("a"), number + 1)
    store.check_ids()
    assert [store[number] for number in (99, 0, 50)] == [stored(number) for number in (99, 0, 50)]


def test_an_id_that_comes_twice_is_named_with_both_places() -> None:
    store = PromptStore()
    for number, file in enumerate("aab"):
        store.append(stored(number, "same" if number else ""), Path(file), 10 * number)
    with refused(Conflict, field="b:20: prompt_id", value="same", names=("10",)):
        store.check_ids()


def test_a_stored_prompt_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bytes, once what is kept in memory is full; 28 while the file is read."""
    monkeypatch.setattr("dora.prompts.store.MEMORY_BYTES", 1 << 16)
    store = PromptStore()
    store.append(stored(0), Path("a"), 0)
    tracemalloc.start()
    try:
        for number in range(1, 20_000):
            store.append(stored(number), Path("a"), number)
        while_read = tracemalloc.get_traced_memory()[0]
        store.check_ids()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert while_read < (28 + 8) * 20_000 + (1 << 18)
    assert after < (8 + 4) * 20_000 + (1 << 17)
    assert store[12_345] == stored(12_345)
