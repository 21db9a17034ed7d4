"""Prompts of any form are within bounds and of the declared types, or are refused with a reason."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.client import Operator
from dora.client.prompts import Prompts
from dora.config import validated
from dora.data.sampling import DOMAINS, PARAMETERS, check_sampling
from dora.data.strict_json import read_json
from dora.data.types import Prompt
from dora.errors import Conflict, InvalidValue
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.prompt_ledger import QUEUED_BYTES_MAX
from dora.orchestrator.rollout.responses.buffer import sampling_of
from dora.prompts.source import PromptSource
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded
from tests.refusals import data_words, refused
from tests.service import configured, running

CHECK = PromptCheck(validated({"prompts": "none"}), vocab_size=64)
IDS = (1).to_bytes(4, "little") * 3


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [], {}, -1, 1 << 40, 10**400, float("nan"), 1e999])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed"])
def test_a_sampling_parameter_is_a_whole_number_or_refused(name: str, value: Any) -> None:
    if name == "seed" and value == 1 << 40:
        return
    message = pb.Prompt(prompt_id="p", token_ids=IDS, sampling_json=json.dumps({name: value}))
    with pytest.raises(InvalidValue) as caught:
        CHECK.from_wire(message)
    assert caught.value.field in (f"prompt p: sampling.{name}", "prompt p: sampling_json")
    with refused(InvalidValue, names=(name,)):
        CHECK.checked(Prompt("p", "", (1,), sampling={name: value}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling_json": '{"temperature": ' * 50_000 + "1" + "}" * 50_000}, "sampling_json"),
        ({"sampling_json": "[" * 2000 + "]" * 2000}, "sampling_json"),
        ({"sampling_json": '{"max_tokens": ' + "9" * 3000 + "}"}, "digits"),
        ({"sampling_json": '{"max_tokens": ' + "9" * 5000 + "}"}, "sampling_json"),
        ({"sampling_json": '{"temperature": NaN}'}, "NaN is no number"),
        ({"sampling_json": '{"ignore_eos": 1}'}, "true or false"),
        ({"sampling_json": '{"stop_token_ids": [64]}'}, "stop_token_ids = 64 .*from 0 to 63"),
        ({"sampling_json": '{"stop_token_ids": [true]}'}, "at most 64 token ids"),
        ({"sampling_json": '{"stop_token_ids": 1}'}, "at most 64 token ids"),
        ({"sampling_json": json.dumps({"stop_token_ids": [1] * 65})}, "at most 64 token ids"),
        ({"sampling_json": '{"stop": [""]}'}, "at most 16 texts"),
        ({"sampling_json": '{"stop": {"a": 1}}'}, "at most 16 texts"),
        ({"sampling_json": '{"stop": ["a", null]}'}, "at most 16 texts"),
        ({"sampling_json": json.dumps({"stop": ["x" * 129]})}, "of 1 to 128 characters"),
        ({"sampling_json": json.dumps({"stop": ["x"] * 17})}, "at most 16 texts"),
        ({"sampling_json": '{"stop": ["\\udfff"]}'}, "surrogate"),
        ({"priority": 1001}, "-1000 to 1000"),
        ({"priority": -(1 << 31)}, "-1000 to 1000"),
        ({"sampling_json": "[1]"}, "an object"),
        ({"sampling_json": "{"}, "JSON"),
        ({"verifier_json": "{"}, "verifier_json"),
        ({"verifier_json": "[1]"}, "a JSON object"),
        ({"verifier_json": "Infinity"}, "verifier_json"),
        ({"verifier_json": '{"a":' * 100 + "1" + "}" * 100}, "within each other"),
        ({"verifier_json": '{"a":' * 100_000 + "1" + "}" * 100_000}, "verifier_json"),
        ({"verifier_json": '{"a": ' + "9" * 5000 + "}"}, "digits"),
        ({"verifier_json": '{"a": "' + "x" * (1 << 20) + '"}'}, "characters"),
        ({"token_ids": (64).to_bytes(4, "little")}, "whole numbers from 0 to 63"),
        ({"token_ids": b"\xff" * 4}, "whole numbers from 0 to 63"),
        ({"token_ids": b"123"}, "multiple of 4"),
        ({"token_ids": b""}, "at least one token"),
        ({"token_ids": b"", "text": "a"}, "has no tokenizer"),
        ({"messages_json": "[]"}, "one of token_ids, messages_json or text"),
        ({"prompt_id": ""}, "non-empty id"),
        ({"prompt_id": "x" * 257}, "non-empty id"),
        ({"task_id": "x" * 257}, "task_id"),
        ({"group_size": 5000}, "group_size"),
        ({"text": "x" * (5 << 20)}, "characters"),
    ],
)
def test_what_a_message_brings_is_checked_when_it_comes(fields: dict[str, Any], reason: str) -> None:
    with refused(InvalidValue, names=data_words(reason)):
        CHECK.from_wire(pb.Prompt(**{"prompt_id": "p", "token_ids": IDS, **fields}))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("{", "JSON"),
        ("[]", "at least one"),
        ("[[]]", "objects with role"),
        ('[{"role": "user"}]', "role and content"),
        ('[{"role": 1, "content": "a"}]', "role is a text"),
        ('[{"role": "user", "content": null}]', "null for tool calls"),
        ("[" * 100_000, "JSON"),
        ('[{"role": "user", "content": "\\ud800"}]', "surrogate"),
    ],
)
def test_a_chat_that_no_template_could_take_is_refused(messages: str, reason: str, tokenizer: ChatTokenizer) -> None:
    check = PromptCheck(validated({"prompts": "none"}), tokenizer=tokenizer, vocab_size=64)
    with refused(InvalidValue, field="prompt p: messages_json", names=data_words(reason)):
        check.from_wire(pb.Prompt(prompt_id="p", messages_json=messages))


def test_a_text_and_a_chat_are_tokenised_as_a_file_is(tokenizer: ChatTokenizer) -> None:
    check = PromptCheck(validated({"prompts": "none"}), tokenizer=tokenizer, vocab_size=64)
    messages = [{"role": "user", "content": "EARLY"}]
    chat = check.from_wire(pb.Prompt(prompt_id="p", messages_json=json.dumps(messages)))
    assert (chat.text, chat.token_ids) == tokenizer.encode_chat(messages)
    assert check.from_wire(pb.Prompt(prompt_id="p", text="EARLY")).token_ids == tokenizer.encode("EARLY")


def test_a_prompt_is_measured_before_it_is_decoded() -> None:
    message = pb.Prompt(prompt_id="p", token_ids=bytes(60_000_000))
    tracemalloc.start()
    try:
        with refused(InvalidValue, field="prompt p: tokens", value=15000000):
            CHECK.from_wire(message)
        assert tracemalloc.get_traced_memory()[1] < 70_000_000  # the message's own bytes, and no copy of them
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "prompt",
    [
        3,
        "text",
        Prompt(3, "", (1,)),  # type: ignore[arg-type]
        Prompt("p", 3, (1,)),  # type: ignore[arg-type]
        Prompt("p", "", (True,)),
        Prompt("p", "", (1.0,)),  # type: ignore[arg-type]
        Prompt("p", "", ("1",)),  # type: ignore[arg-type]
        Prompt("p", "", (64,)),
        Prompt("p", "", (1,), text=None),  # type: ignore[arg-type]
        Prompt("p", "", (1,), text="\ud800"),
        Prompt("p", "", (1,), group_size=True),
        Prompt("p", "", (1,), group_size=2.0),  # type: ignore[arg-type]
        Prompt("p", "", (1,), sampling=None),  # type: ignore[arg-type]
        Prompt("p", "", (1,), sampling={3: 4}),  # type: ignore[dict-item]
        Prompt("p", "", (1,), verifier_json=b"{}"),  # type: ignore[arg-type]
        Prompt("p", "", (1,), verifier_json="null"),
        Prompt("p", "", (1,), priority=True),
        Prompt("p", "", (1,), priority=1.0),  # type: ignore[arg-type]
        Prompt("p", "", (1,), priority=1001),
        Prompt("p", "", (1,), sampling={"stop": 3}),
        Prompt("p", "", (1,), sampling={"stop_token_ids": (64,)}),
    ],
)
async def test_a_source_is_held_to_the_same(prompt: Any) -> None:
    with pytest.raises(InvalidValue):
        CHECK.checked(prompt)
    held = [prompt, Prompt("good", "", (1,))]
    source = PromptSource("some", "", lambda index: held[index] if index < len(held) else None)
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), source, CHECK)
    taken, _ = await feed.take(8)
    assert [each.prompt_id for each in taken] == ["good"] and feed.refused == 1


async def test_the_queue_is_bounded_in_bytes_too() -> None:
    feed = PromptFeed(validated({"prompts": "none", "service": {"prompts_queued_max": 1 << 20}}), None, CHECK)
    text = "x" * (4 << 20)
    fit = QUEUED_BYTES_MAX // (4 * len(text) + 1000)
    feed.submit([Prompt(f"p{number}", "", (1,), text=text) for number in range(fit)])
    with refused(LimitExceeded, field="prompts: bytes in memory", value=33554516):
        feed.submit([Prompt(f"q{number}", "", (1,), text=text) for number in range(2)])
    assert len((await feed.take(1))[0]) == 1
    assert feed.submit([Prompt("q0", "", (1,), text=text)]) == (1 << 20) - fit


def messages_of(seed: int, count: int) -> Iterator[pb.Prompt]:
    """Prompts with every field drawn from what is right, wrong and odd."""
    draw = random.Random(seed)
    values = ["true", "null", "1", "-1", "0.5", "1e400", "NaN", "9" * 400, '"a"', "[]", "{}", "1e-9", "2147483648", "{"]
    values += ['["a"]', "[1, 2]"]
    names = [*PARAMETERS, "stop", "stop", "", "\\u0000", "\\ud800"]
    for number in range(count):
        parameters = (f'"{draw.choice(names)}": {draw.choice(values)}' for _ in range(draw.randrange(3)))
        yield pb.Prompt(
            prompt_id=draw.choice(["", f"p{number}", "é" * draw.randrange(300)]),
            task_id="t" * draw.choice([0, 1, 300]),
            token_ids=draw.randbytes(draw.choice([0, 4, 5, 400])) if draw.random() < 0.5 else IDS,
            text=draw.choice(["", "text", "\u2028"]),
            priority=draw.choice([0, 0, 1, -1000, 1000, 1001, (1 << 31) - 1]),
            group_size=draw.choice([0, 1, 4096, 4097, (1 << 32) - 1]),
            sampling_json="{" + ", ".join(parameters) + draw.choice(["}", "}", "}", ""]),
            verifier_json=draw.choice(["", "{}", '{"a": ' + draw.choice(values) + "}", "[" * draw.randrange(2000)]),
            messages_json=draw.choice(["", "", "", "[]", '[{"role": "user", "content": "EARLY"}]', "[" * 3000]),
        )


def test_ten_thousand_prompts_pass_or_are_refused(tokenizer: ChatTokenizer) -> None:
    config = validated({"prompts": "none"})
    check = PromptCheck(config, tokenizer=tokenizer, vocab_size=64)
    passed = 0
    for message in messages_of(0, 10_000):
        try:
            prompt = check.from_wire(message)
        except InvalidValue as error:
            assert len(str(error)) < 2000
            continue
        passed += 1
        check_sampling(sampling_of(config.rollout, prompt))
        assert {type(each) for each in prompt.token_ids} == {int} and max(prompt.token_ids) < 64
        assert isinstance(json.loads(prompt.verifier_json), dict)
        kinds = {name: domain.kind for name, domain in DOMAINS.items()}
        assert all(type(value) is kinds.get(name, tuple) for name, value in prompt.sampling.items())
        assert -1000 <= prompt.priority <= 1000
    assert 100 < passed < 9_000


def test_json_is_read_within_bounds() -> None:
    assert read_json('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', "x", 100) == {"a": [1, 2.5, None, "😀"]}
    assert read_json("[" * 64 + "]" * 64, "x", 1000)
    for text in ("[" * 66 + "]" * 66, "[" * 10**6, "", "1e", '"\\ud800"', '{"\\udfff": 1}', "-" + "9" * 309, "x" * 101):
        with refused(InvalidValue, field="x: characters" if text.startswith("x") else "x"):
            read_json(text, "x", 100 if text.startswith("x") else 1 << 20)


# ------------------------------------------------------------------------------------------------------------ a service


async def test_a_service_refuses_what_is_wrong_and_takes_texts_chats_and_mappings(tiny: Path, tmp_path: Path) -> None:
    reward = "tests.unit.reward_functions:echo"
    config = configured(
        tiny, workers__engine="fake", workers__count=1, prompts="none", reward__function=reward, cache=str(tmp_path)
    )
    wrong = [
        {"prompt_token_ids": [1], "sampling": {"max_tokens": True}},
        {"prompt_token_ids": [1], "sampling": {"top_k": True}},
        {"prompt_token_ids": [64]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [1], "answer": float("nan")},
        {"prompt_token_ids": [1], "answer": 10**400},
        {"messages": [{"role": "user"}]},
        {"prompt": ""},
        {
            "prompt_id": "😀" * 250,
            "messages": [{"role": "user", "content": [{"text": "😀" * 1000}] * 9, "x": "\ud800"}],
        },
        {"prompt_token_ids": [1], "verifier": {"😀" * 9000: [[]]}, "sampling": {"😀" * 900: 1}},
        {"prompt": "EARLY", "messages": []},
        {"prompt": "EARLY", "temperature": 1.0},
        {"prompt": "EARLY", "verifier": {1, 2}},
        3,
    ]
    async with running(config) as handle, Prompts(handle.address, handle.token) as prompts:
        for each in wrong:
            with pytest.raises(InvalidValue):
                await prompts.submit([{"prompt": "DIGITS"}, each])  # type: ignore[list-item]
        with refused(InvalidValue, field="prompts", value="EARLY"):
            await prompts.submit("EARLY")
        good = [
            "EARLY",
            {"prompt": "LATE", "answer": [1]},
            {"messages": [{"role": "user", "content": "DIGITS"}], "sampling": {"temperature": 0}},
            {"prompt_token_ids": [1, 2], "prompt_id": "mine", "group_size": 2},
            Prompt("p", "task", (1, 2)),
            Prompt("text", "task", (), text="SIGNS"),
        ]
        assert (await prompts.submit(good)).accepted == len(good)  # type: ignore[arg-type]
        async with Operator(handle.address, handle.token) as operator:
            assert (await operator.status()).prompts_queued == len(good)


async def test_a_checkpoint_without_a_state_folder_says_what_to_do(tiny: Path, tmp_path: Path) -> None:
    config = configured(tiny, workers__engine="fake", workers__count=1, cache=str(tmp_path))
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        with pytest.raises(Conflict) as caught:
            await operator.checkpoint()
    said = "This service has no state folder, so there is nothing to checkpoint. Start it with `--state DIR`."
    assert (caught.value.field, str(caught.value)) == ("checkpoint", said)


@pytest.mark.parametrize("kib", [1, 1024])
def test_a_submitted_verifier_has_the_limit_of_a_rows(kib: int) -> None:
    check = PromptCheck(validated({"prompts": {"source": "none", "verifier_kb": kib}}), vocab_size=64)
    for more in (0, 1):
        text = json.dumps({"a": "x" * ((kib << 10) - len('{"a": ""}') + more)})
        message = pb.Prompt(prompt_id="p", token_ids=IDS, verifier_json=text)
        if not more:
            assert check.from_wire(message).verifier_json == text
            continue
        with refused(InvalidValue, field="prompt p: verifier_json: characters", names=(kib << 10, "verifier_kb")):
            check.from_wire(message)
