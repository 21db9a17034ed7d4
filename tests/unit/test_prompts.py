import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dora.config import PromptsConfig
from dora.errors import MISSING, Conflict, InvalidValue
from dora.models.tiny_vocabulary import CLASSES
from dora.prompts.reasoning_gym import parse_mix
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from tests.refusals import refused

CHAT = [{"role": "user", "content": "What is 2+2?\n é"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_dense: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_dense)


def write(folder: Path, *lines: Any) -> Path:
    """A prompts file of objects, or of texts as they stand."""
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def check_same_ids_as_transformers(folder: Path) -> None:
    ours, theirs = ChatTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text, token_ids = ours.encode_chat(CHAT)
    assert text == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert list(token_ids) == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert list(ours.encode("plain text")) == theirs("plain text").input_ids
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_tokens_are_those_of_transformers(tiny_dense: Path) -> None:
    check_same_ids_as_transformers(tiny_dense)


@pytest.mark.e2e
def test_tokens_of_the_real_model_are_those_of_transformers(smollm2: Path) -> None:
    check_same_ids_as_transformers(smollm2)


def test_a_chat_template_may_be_missing_wrong_or_refuse(tiny_dense: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_dense / "tokenizer.json").read_bytes())
    with refused(InvalidValue, field="model", value=tmp_path):
        ChatTokenizer(tmp_path).render(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with refused(InvalidValue, field="chat_template", value=tmp_path):
        ChatTokenizer(tmp_path).render(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with refused(InvalidValue, field="messages", value=list(CHAT), names=("(no system message)",)):
        ChatTokenizer(tmp_path).render(CHAT)


@pytest.mark.parametrize("spec", ["counting", "tiny", "tiny-tail", "reasoning-gym:chain_sum:2,leg_counting:1"])
def test_endless_sources_are_functions_of_seed_and_index(spec: str, tokenizer: ChatTokenizer) -> None:
    prompts = list(islice(resolve_prompts(spec, tokenizer, seed=3), 1100))
    again = resolve_prompts(spec, tokenizer, seed=3)
    assert list(islice(again.starting_at(1000), 100)) == prompts[1000:]
    assert prompts[:5] == list(islice(again, 5))
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    other = list(islice(resolve_prompts(spec, tokenizer, seed=4), 1100))
    assert [prompt.text for prompt in other] != [prompt.text for prompt in prompts]
    assert not {prompt.prompt_id for prompt in other} & {prompt.prompt_id for prompt in prompts}


def test_tiny_tail_asks_for_a_long_tail_of_lengths(tokenizer: ChatTokenizer) -> None:
    tail, plain = (list(islice(resolve_prompts(spec, tokenizer), 1000)) for spec in ("tiny-tail", "tiny"))
    assert [prompt.text for prompt in tail] == [prompt.text for prompt in plain]
    assert all(prompt.sampling == {} for prompt in plain)
    assert all(prompt.sampling["ignore_eos"] for prompt in tail)
    lengths = sorted(int(str(prompt.sampling["max_tokens"])) for prompt in tail)
    assert (lengths[0], lengths[-1]) == (12, 400)
    assert lengths[-10] > 6 * lengths[500]
    capped = islice(resolve_prompts("tiny-tail", tokenizer, longest_tokens=50), 1000)
    assert [prompt.sampling["max_tokens"] for prompt in capped] == [
        min(int(str(prompt.sampling["max_tokens"])), 50) for prompt in tail
    ]


def test_tiny_prompts_name_a_class_and_carry_its_characters(tokenizer: ChatTokenizer) -> None:
    source = resolve_prompts("tiny", tokenizer)
    assert source.reward == "dora.rewards.tiny:score"
    seen = set()
    for prompt in islice(source, 100):
        word = prompt.text.removeprefix("<bos>")
        seen.add(word)
        assert json.loads(prompt.verifier_json) == {"characters": CLASSES[word]}
        assert len(prompt.token_ids) == 2 and prompt.task_id == f"tiny.{word.lower()}"
    assert seen == set(CLASSES)


def test_counting_prompts_ask_for_few_numbers_and_now_and_then_for_many(tokenizer: ChatTokenizer) -> None:
    source = resolve_prompts("counting", tokenizer)
    assert source.reward == "dora.rewards.counting:score"
    counts = []
    for prompt in islice(source, 500):
        asked = json.loads(prompt.verifier_json)
        assert f"from {asked['first']} to {asked['last']}, separated by commas" in prompt.text
        counts.append(asked["last"] - asked["first"] + 1)
    counts.sort()
    assert counts[0] >= 3 and counts[250] <= 6 and 13 <= counts[480] <= counts[-1] <= 16


def test_a_mix_follows_its_weights_and_its_entries_can_be_scored(tokenizer: ChatTokenizer) -> None:
    import reasoning_gym  # with matplotlib, which no other test process needs

    source = resolve_prompts("reasoning-gym:chain_sum:3,leg_counting", tokenizer)
    prompts = list(islice(source, 1000))
    tasks = Counter(prompt.task_id for prompt in prompts)
    assert 700 < tasks["chain_sum"] < 800 and tasks.total() == 1000
    assert len({prompt.text for prompt in prompts}) > 950
    for prompt in prompts[:20]:
        verifier = json.loads(prompt.verifier_json)
        score = reasoning_gym.get_score_answer_fn(verifier["task"])
        assert verifier["entry"]["question"] in prompt.text
        assert score(answer=verifier["entry"]["answer"], entry=verifier["entry"]) == 1.0


def test_mix_weights() -> None:
    assert parse_mix("a") == {"a": 1.0}
    assert parse_mix("a:2, b:0.5") == {"a": 2.0, "b": 0.5}


@pytest.mark.parametrize(
    ("spec", "kind", "value"),
    [
        ("reasoning-gym:", InvalidValue, ""),
        ("reasoning-gym:chain_sum:0", InvalidValue, "chain_sum:0"),
        ("reasoning-gym:chain_sum:-1", InvalidValue, "chain_sum:-1"),
        ("reasoning-gym:chain_sum:nan", InvalidValue, "chain_sum:nan"),
        ("reasoning-gym:chain_sum:much", InvalidValue, "chain_sum:much"),
        ("reasoning-gym:chain_sum,chain_sum", InvalidValue, "chain_sum,chain_sum"),
        ("reasoning-gym:no_such_task", InvalidValue, "reasoning-gym:no_such_task"),
        ("reasoning-gym:arc_agi", InvalidValue, "reasoning-gym:arc_agi"),  # its verifier takes tuples, no JSON
        ("absent.jsonl", InvalidValue, "absent.jsonl"),
        ("prompts.txt", InvalidValue, "prompts.txt"),
    ],
)
def test_a_bad_source_is_refused(spec: str, kind: type[InvalidValue], value: str, tokenizer: ChatTokenizer) -> None:
    with refused(kind, field="--prompts", value=value):
        resolve_prompts(spec, tokenizer)


def test_none_has_no_prompts(tokenizer: ChatTokenizer) -> None:
    assert list(resolve_prompts("none", tokenizer)) == []


def test_a_file_gives_its_prompts_in_order(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"prompt": "ab1", "answer": 7},
        "",
        {"prompt_token_ids": [5, 6], "prompt_id": "mine", "task_id": "sums", "group_size": 4},
        {"messages": [{"role": "user", "content": "EARLY"}], "sampling": {"temperature": 1, "max_tokens": 9}},
        {"prompt": "x", "verifier": {"unit": "m"}, "answer": "3"},
    )
    source = resolve_prompts(str(file), tokenizer)
    first, second, third, fourth = source
    assert (first.prompt_id, first.task_id, first.text) == ("prompts:1", "prompts", "ab1")
    assert first.token_ids == tokenizer.encode("ab1") and json.loads(first.verifier_json) == {"answer": 7}
    assert (second.prompt_id, second.task_id, second.token_ids, second.group_size) == ("mine", "sums", (5, 6), 4)
    assert second.text == "SIGNSEARLY"
    assert third.text == "<bos>EARLY" and third.sampling == {"temperature": 1, "max_tokens": 9}
    assert json.loads(fourth.verifier_json) == {"unit": "m", "answer": "3"}
    assert list(source.starting_at(3)) == [fourth]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("{", "line", "{\n"),
        ("[1]", "line", "[1]\n"),
        ({}, "prompt", MISSING),
        ({"prompt": "a", "messages": []}, "prompt", ["prompt", "messages"]),
        ({"prompt": ""}, "prompt", ""),
        ({"prompt": 3}, "prompt", 3),
        ({"prompt": "a", "anwser": 1}, "anwser", 1),
        ({"prompt_token_ids": "a"}, "prompt_token_ids", "a"),
        ({"prompt_token_ids": [1, 64]}, "prompt_token_ids", 64),
        ({"prompt_token_ids": [True]}, "prompt_token_ids", True),
        ({"messages": []}, "messages", []),
        ({"messages": [{"role": "user"}]}, "messages", {"role": "user"}),
        ({"prompt": "a", "group_size": -1}, "group_size", -1),
        ({"prompt": "a", "group_size": "4"}, "group_size", "4"),
        ({"prompt": "a", "sampling": {"heat": 1}}, "sampling.heat", 1),
        ({"prompt": "a", "sampling": {"max_tokens": 1.5}}, "sampling.max_tokens", 1.5),
        ({"prompt": "a", "prompt_id": 3}, "prompt_id", 3),
        ({"prompt": "a", "verifier": "x"}, "verifier", "x"),
    ],
)
def test_a_malformed_line_is_named(
    line: Any, field: str, value: object, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = write(tmp_path, {"prompt": "a"}, line)
    with refused(InvalidValue, field=f"{file}:2: {field}", value=value):
        resolve_prompts(str(file), tokenizer)


OVER = "x" * (1 << 20)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"prompt": "a", "verifier": {"proof": OVER}}, ("verifier_json: characters", 1 << 20, "prompts.verifier_kb")),
        ({"prompt": "a", "answer": OVER}, ("verifier_json: characters", 1 << 20, "prompts.verifier_kb")),
        ({"prompt": "a", "answer": [7] * (1 << 19)}, ("verifier_json: characters", "prompts.verifier_kb")),
        ({"prompt": "a", "unit": OVER}, ("verifier_json: characters", 1 << 20, "prompts.verifier_kb")),
        ({"prompt": OVER * 5}, ("prompt: characters", 4 << 20)),
        ({"prompt": OVER * 8}, ("line: bytes", 8 << 20)),
        ({"prompt": "a", "prompt_id": "x" * 257}, ("prompt_id", 256)),
        ({"prompt": "a", "task_id": "x" * 257}, ("task_id", 256)),
        ({"prompt": "a", "priority": 1001}, ("priority", 1000)),
        ({"prompt": "a", "group_size": 4097}, ("group_size", 4096)),
        ({"prompt": "a", "sampling": {"stop": ["x"] * 17}}, ("sampling.stop", 16)),
        ({"prompt": "a" * 9}, ("length in tokens", 8)),
    ],
)
def test_a_row_over_a_limit_is_named_with_its_line(
    row: Any, names: tuple[object, ...], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = write(tmp_path, {"prompt": "a"}, row, {"prompt": "b"})
    config = PromptsConfig(source=str(file), other_columns="verifier")
    with refused(InvalidValue, names=(f"{file}:2: ", *names)):
        resolve_prompts(config, tokenizer, limit_tokens=8)


@pytest.mark.parametrize("kib", [1, 1024, 2048])
def test_the_limit_of_a_verifier_is_a_setting(kib: int, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    fitting = (kib << 10) - len(json.dumps({"answer": ""}))
    for characters, fits in ((fitting, True), (fitting + 1, False)):
        file = write(tmp_path, {"prompt": "a", "answer": "x" * characters})
        config = PromptsConfig(source=str(file), verifier_kb=kib)
        if fits:
            assert len(next(iter(resolve_prompts(config, tokenizer))).verifier_json) == kib << 10
            continue
        with refused(InvalidValue, field=f"{file}:1: verifier_json: characters", names=(kib << 10,)):
            resolve_prompts(config, tokenizer)


def test_a_duplicate_prompt_id_is_a_conflict(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "a", "prompt_id": "one"}, {"prompt": "b", "prompt_id": "one"})
    with refused(Conflict, field="prompts.jsonl:2: prompt_id", value="one", names=("1",)):
        resolve_prompts(str(file), tokenizer)


def test_an_empty_file_is_refused(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = write(tmp_path, "")
    with refused(InvalidValue, field="--prompts", value=file, allowed="a file with at least one prompt"):
        resolve_prompts(str(file), tokenizer)


def test_a_prompt_over_the_limit_is_named_with_length_and_limit(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "abc"}, {"prompt": "abcd", "prompt_id": "long"})
    assert len(list(resolve_prompts(str(file), tokenizer, limit_tokens=4))) == 2
    with refused(InvalidValue, field="prompt long: length in tokens", value=4, names=("3",)):
        resolve_prompts(str(file), tokenizer, limit_tokens=3)
    with refused(InvalidValue, names=("1",)):
        next(iter(resolve_prompts("tiny", tokenizer, limit_tokens=1)))
