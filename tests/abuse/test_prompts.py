"""What a prompt brings, in whatever form: the ids that transformers would give, or a refusal with a reason."""

import codecs
import copy
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from dora.cli.token import find_token, left_token, token_folder
from dora.client import Operator
from dora.client.prompts import Prompts
from dora.config import RolloutConfig, load_config, validated
from dora.errors import InvalidValue
from dora.models import resolve_model
from dora.models.tiny import make_tiny
from dora.orchestrator.book import sampling_of
from dora.orchestrator.feed import QUEUED_BYTES_MOST, PromptFeed
from dora.orchestrator.prompt_check import PromptCheck
from dora.prompts import ChatTokenizer, jsonl_source
from dora.prompts.export import KEPT_MOST, _without_transformers
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import is_loopback, open_channel
from dora.rpc.errors import LimitExceeded
from dora.sampling import DOMAINS, check_sampling, effective
from dora.strict_json import read_json
from dora.types import Prompt, RequestSpec, SamplingParams
from tests.abuse.templates import CHATS, TEMPLATES
from tests.service import configured, running

CORPUS = [chat["content"] for chats in CHATS for chat in chats] * 3 + ["<|im_start|>user assistant model [INST] first"]
BYTE_LEVEL, METASPACE = "byte-level", "metaspace"


def make_tokenizer(kind: str, *, around: bool) -> Tokenizer:
    """A small BPE. ``around``: a post-processor puts <s> and </s> around a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == METASPACE, unk_token="<unk>"))
    if kind == BYTE_LEVEL:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    special = ["<unk>", "<s>", "</s>", *([f"<0x{byte:02X}>" for byte in range(256)] if kind == METASPACE else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>")])
    if around:
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    text = json.dumps({**told, **config}, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(8)


def padded(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=512, pad_id=2, pad_token="</s>")


def both(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(8, direction="left")
    tokenizer.enable_padding(pad_to_multiple_of=64)


def as_it_is(tokenizer: Tokenizer) -> None:
    pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


# ----------------------------------------------------------------------------------------------- as transformers has it


@pytest.mark.parametrize(
    ("kind", "around", "stored", "config"),
    [
        (BYTE_LEVEL, False, truncated, {"chat_template": [{"name": "default", "template": TEMPLATES["chatml"]}]}),
        (BYTE_LEVEL, True, padded, {"add_bos_token": True}),
        (METASPACE, True, both, {"extra_special_tokens": ["<start_of_turn>", "[INST]"]}),
        (METASPACE, False, truncated, {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}),
        (BYTE_LEVEL, False, both, {"tokenizer_class": "Qwen2TokenizerFast", "sep_token": "<sep>"}),
        (BYTE_LEVEL, True, as_it_is, {"split_special_tokens": True, "model_max_length": 8}),
    ],
)
def test_the_ids_are_those_of_transformers_for_every_template(
    kind: str,
    around: bool,
    stored: Callable[[Tokenizer], None],
    config: dict[str, Any],
    tmp_path: Path,
    cache: Path,
) -> None:
    tokenizer = make_tokenizer(kind, around=around)
    stored(tokenizer)
    folder = write_folder(tmp_path / "model", tokenizer, **{"chat_template": TEMPLATES["chatml"], **config})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    ours, theirs = ChatTokenizer(folder, cache), AutoTokenizer.from_pretrained(folder)
    for text in CORPUS:
        assert list(ours.encode(text)) == theirs(text).input_ids
    asked: dict[str, Any] = {"add_generation_prompt": True}
    assert copy.copy(ours).render(CHATS[0]) == theirs.apply_chat_template(CHATS[0], tokenize=False, **asked)
    compared = 0
    for name, template in TEMPLATES.items():
        with_template = copy.copy(ours)
        with_template._exported = replace(ours._exported, chat_template=template)
        for chat in CHATS:
            asked["chat_template"] = template
            text, token_ids = with_template.encode_chat(chat)
            assert text == theirs.apply_chat_template(chat, tokenize=False, **asked), name
            assert list(token_ids) == theirs.apply_chat_template(chat, **asked)["input_ids"], name
            compared += 1
    assert compared == len(TEMPLATES) * len(CHATS)


def test_a_template_may_stand_in_any_of_the_places_that_transformers_reads(tmp_path: Path, cache: Path) -> None:
    tokenizer = make_tokenizer(BYTE_LEVEL, around=False)
    named = [{"name": "default", "template": "é default {{ eos_token }}"}, {"name": "tool_use", "template": "tool"}]
    folders = {
        "é file": write_folder(tmp_path / "file", tokenizer, chat_template="config"),
        "é more": write_folder(tmp_path / "more", tokenizer, chat_template=named),
    }
    (folders["é file"] / "chat_template.jinja").write_text("é file", encoding="utf-8")
    (folders["é more"] / "chat_template.jinja").write_text("é more", encoding="utf-8")
    (folders["é more"] / "additional_chat_templates").mkdir()
    (folders["é more"] / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    for text, folder in folders.items():
        assert ChatTokenizer(folder, cache).render(CHATS[0]) == text
        theirs = AutoTokenizer.from_pretrained(folder)
        assert theirs.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True) == text
    # In another locale too. The cache answers, and no file is read in the locale's encoding.
    script = (
        "import sys; from pathlib import Path; from dora.prompts import ChatTokenizer\n"
        "sys.stdout.buffer.write(ChatTokenizer(Path(sys.argv[1]), Path(sys.argv[2])).render([]).encode())"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-c", script, str(folders["é file"]), str(cache)]
    assert subprocess.run(argv, env=environment, capture_output=True, check=True).stdout.decode() == "é file"
    assert len(list((cache / "tokenizers").iterdir())) <= KEPT_MOST


def test_a_tokenizer_that_transformers_refuses_is_refused_with_its_reason(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValue, match="a tokenizer that transformers loads"):
        ChatTokenizer(tmp_path, cache)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tokenizer(METASPACE, around=False), chat_template="x")
    (tmp_path / "file").write_text("")
    assert ChatTokenizer(folder, tmp_path / "file" / "cache").render([]) == "x"


def test_without_transformers_no_stored_length_touches_a_prompt_either(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(BYTE_LEVEL, around=True)
    ids = tokenizer.encode(CORPUS[1]).ids
    both(tokenizer)
    read = _without_transformers(write_folder(tmp_path / "model", tokenizer, chat_template=TEMPLATES["generation"]))
    assert read.tokenizer.encode(CORPUS[1]).ids == ids
    assert read.special_tokens["eos_token"] == "</s>" and read.chat_template == TEMPLATES["generation"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_a_refusal(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tokenizer(BYTE_LEVEL, around=False))
    tokenizer = ChatTokenizer.__new__(ChatTokenizer)
    tokenizer.folder, tokenizer._exported = folder, replace(_without_transformers(folder), chat_template=template)
    with pytest.raises(InvalidValue, match="what the chat template takes"):
        tokenizer.render(CHATS[0])


# ------------------------------------------------------------------------------ files as people have them


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path, cache: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny, cache)


def test_a_file_may_have_a_mark_any_line_ends_and_blank_lines(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["EARLY", "\u2028", "\x85\x0b"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    wanted = [tokenizer.encode(text) for text in texts]
    for mark in (b"", codecs.BOM_UTF8):
        for end in (b"\n", b"\r\n"):
            for last in (b"", end, end + b"  " + end + end):
                file.write_bytes(mark + end.join(lines) + last)
                assert [prompt.token_ids for prompt in jsonl_source(file, tokenizer)] == wanted


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "a", "answer": ' + "[" * 200 + "]" * 200 + "}",
        '{"prompt": "a", "answer": ' + "9" * 5000 + "}",
        '{"prompt": "a", "answer": NaN}',
        '{"prompt": "a", "answer": "\\ud800"}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "sampling": {"top_k": true}}',
        '{"prompt": "a", "sampling": {"max_tokens": 0}}',
        '{"prompt": "a", "sampling": {"temperature": 0.001}}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"prompt": "a", "prompt_id": "' + "x" * 300 + '"}',
        '{"prompt": "a", "answer": "' + "x" * (2 << 20) + '"}',
    ],
)
def test_a_line_that_would_fail_later_is_refused_with_its_place(
    line: str, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "DIGITS"}\n' + line)
    with pytest.raises(InvalidValue, match=r"prompts\.jsonl:2: "):
        source = jsonl_source(file, tokenizer)
        check = PromptCheck(validated({}))
        assert [check.checked(prompt) for prompt in source] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
        ({"model_type": None}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        (b"\xef\xbb\xbf{}", "JSON in UTF-8"),
        (b"[]", "a JSON object"),
        (b"{" * 100_000, "JSON in UTF-8"),
        ('{"architectures": "é"}'.encode("latin-1"), "JSON in UTF-8"),
    ],
)
def test_a_model_that_no_engine_could_start_is_refused_at_once(
    change: dict[str, Any] | bytes, reason: str, tiny: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny / name)
    config = json.loads((tiny / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_bytes(json.dumps(config).encode())
    assert resolve_model(str(tmp_path)) == tmp_path
    file.write_bytes(change if isinstance(change, bytes) else json.dumps({**config, **change}).encode())
    with pytest.raises(InvalidValue, match=reason):
        resolve_model(str(tmp_path))


# --------------------------------------------------------------------------------------------------------- environment


def test_the_token_is_left_elsewhere_where_no_home_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with left_token("127.0.0.1:7070", "secret") as file:
        assert file is not None and file.parent.parent == tmp_path / "tmp"
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert find_token("127.0.0.1:7070") == "secret"
        file.parent.chmod(0o755)  # as somebody else might have prepared it
        assert find_token("127.0.0.1:7070") == ""
        file.parent.chmod(0o700)
    assert find_token("127.0.0.1:7070") == ""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert token_folder() is None
    with left_token("127.0.0.1:7070", "secret") as nowhere:
        assert nowhere is None


async def test_no_proxy_stands_between_this_host_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")

    class Echo(grpc.GenericRpcHandler):
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(echo)

    async def echo(request: bytes, _context: Any) -> bytes:
        return request

    server.add_generic_rpc_handlers((Echo(),))
    await server.start()
    try:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("no_grpc_proxy", raising=False)
        for host in ("127.0.0.1", "localhost"):
            async with open_channel(f"{host}:{port}") as channel:
                assert await channel.unary_unary("/echo/echo")(b"here", timeout=10) == b"here"
    finally:
        await server.stop(None)


def test_which_hosts_are_this_one() -> None:
    assert all(
        map(is_loopback, ("127.0.0.1", "127.8.9.1", "localhost", "[::1]", "::1", "0.0.0.0", "[::ffff:127.0.0.1]"))
    )
    assert not any(map(is_loopback, ("10.0.0.1", "example.org", "[2001:db8::1]", "")))


# --------------------------------------------------------------------------------------------------------- one boundary

CHECK = PromptCheck(validated({"prompts": "none"}), vocab_size=64)
IDS = (1).to_bytes(4, "little") * 3


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [], {}, -1, 1 << 40, 10**400, float("nan"), 1e999])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed"])
def test_a_sampling_parameter_is_a_whole_number_or_refused(name: str, value: Any) -> None:
    if name == "seed" and value == 1 << 40:
        return
    message = pb.Prompt(prompt_id="p", token_ids=IDS, sampling_json=json.dumps({name: value}))
    with pytest.raises(InvalidValue, match=r"prompt p: sampling"):
        CHECK.from_wire(message)
    with pytest.raises(InvalidValue, match=rf"prompt p: sampling\.{name} = "):
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
        ({"sampling_json": '{"stop_token_ids": [1]}'}, "stop_token_ids"),
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
    with pytest.raises(InvalidValue, match=reason):
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
    with pytest.raises(InvalidValue, match=reason):
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
        with pytest.raises(InvalidValue, match="tokens = 15000000"):
            CHECK.from_wire(message)
        assert tracemalloc.get_traced_memory()[1] < 70_000_000  # the message's own bytes, and no copy of them
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "prompt",
    [
        None,
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
    ],
)
async def test_a_source_is_held_to_the_same(prompt: Any) -> None:
    with pytest.raises(InvalidValue):
        CHECK.checked(prompt)
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), iter([prompt, Prompt("good", "", (1,))]), CHECK)
    taken, _ = await feed.take(8)
    assert [each.prompt_id for each in taken] == ["good"] and feed.refused == 1


async def test_the_queue_is_bounded_in_bytes_too() -> None:
    feed = PromptFeed(validated({"prompts": "none", "service": {"prompts_queued_max": 1 << 20}}), None, CHECK)
    text = "x" * (4 << 20)
    fit = QUEUED_BYTES_MOST // (4 * len(text) + 1000)
    feed.submit([Prompt(f"p{number}", "", (1,), text=text) for number in range(fit)])
    with pytest.raises(LimitExceeded, match="prompts: bytes in memory"):
        feed.submit([Prompt(f"q{number}", "", (1,), text=text) for number in range(2)])
    assert len((await feed.take(1))[0]) == 1
    assert feed.submit([Prompt("q0", "", (1,), text=text)]) == (1 << 20) - fit


def messages_of(seed: int, count: int) -> Iterator[pb.Prompt]:
    """Prompts with every field drawn from what is right, wrong and odd."""
    draw = random.Random(seed)
    values = ["true", "null", "1", "-1", "0.5", "1e400", "NaN", "9" * 400, '"a"', "[]", "{}", "1e-9", "2147483648", "{"]
    names = [*DOMAINS, "stop", "", "\\u0000", "\\ud800"]
    for number in range(count):
        parameters = (f'"{draw.choice(names)}": {draw.choice(values)}' for _ in range(draw.randrange(3)))
        yield pb.Prompt(
            prompt_id=draw.choice(["", f"p{number}", "é" * draw.randrange(300)]),
            task_id="t" * draw.choice([0, 1, 300]),
            token_ids=draw.randbytes(draw.choice([0, 4, 5, 400])) if draw.random() < 0.5 else IDS,
            text=draw.choice(["", "text", "\u2028"]),
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
        assert all(type(value) is DOMAINS[name].kind for name, value in prompt.sampling.items())
    assert 100 < passed < 9_000


def test_json_is_read_within_bounds() -> None:
    assert read_json('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', "x", 100) == {"a": [1, 2.5, None, "😀"]}
    assert read_json("[" * 64 + "]" * 64, "x", 1000)
    for text in ("[" * 66 + "]" * 66, "[" * 10**6, "", "1e", '"\\ud800"', '{"\\udfff": 1}', "-" + "9" * 309, "x" * 101):
        with pytest.raises(InvalidValue, match="x"):
            read_json(text, "x", 100 if text.startswith("x") else 1 << 20)


# ------------------------------------------------------------------------------ what is recorded is what is sampled


@pytest.mark.parametrize("temperature", [0.001, 0.005, 0.0099, 1e-9, 2.01, 9.0])
def test_a_temperature_that_the_engine_would_not_sample_at_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidValue, match="temperature"):
        CHECK.checked(Prompt("p", "", (1,), sampling={"temperature": temperature}))
    with pytest.raises(InvalidValue, match="temperature"):
        load_config(None, [f"rollout.temperature={temperature}"])
    with pytest.raises(InvalidValue, match="temperature"):
        check_sampling(SamplingParams(temperature=temperature))


def test_at_temperature_0_the_record_has_no_truncation_as_the_engine_has_none() -> None:
    rollout = RolloutConfig(temperature=0.0, top_p=0.5, top_k=3, min_p=0.25)
    sampling = sampling_of(rollout, Prompt("p", "", (1,)))
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    assert sampling_of(rollout, Prompt("p", "", (1,), sampling={"temperature": 1.0})).top_k == 3


def test_vllm_takes_every_parameter_as_it_is_given() -> None:
    """At the edges of every domain: what vLLM would alter or refuse, the boundary refuses."""
    from dora.worker.vllm_requests import to_vllm  # here: it takes seconds

    for name, domain in DOMAINS.items():
        for value in (domain.least, domain.most, 0.01, 0.011):
            chosen = {name: domain.kind(value), **({"max_tokens": 1 << 22} if name == "min_tokens" else {})}
            sampling = effective(SamplingParams(**chosen))
            try:
                check_sampling(sampling)
            except InvalidValue:
                continue
            taken = to_vllm(RequestSpec("r", 0, (1,), sampling), "e", ()).sampling_params
            assert all(getattr(taken, each) == getattr(sampling, each) for each in DOMAINS if each != "ignore_eos")


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
        with pytest.raises(InvalidValue, match="a list of prompts"):
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
