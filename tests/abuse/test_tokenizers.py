"""A tokenizer and its template give the ids that transformers would give, or a refusal with a reason."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from dora.errors import InvalidValue
from dora.prompts.export import KEPT_MAX, _without_transformers
from dora.prompts.tokenizer import ChatTokenizer
from tests.abuse.templates import CHATS, TEMPLATES
from tests.refusals import refused
from tests.sweeps import full

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


@pytest.mark.parametrize(
    ("kind", "around", "stored", "config"),
    [
        (BYTE_LEVEL, False, truncated, {"chat_template": [{"name": "default", "template": TEMPLATES["chatml"]}]}),
        (METASPACE, True, both, {"extra_special_tokens": ["<start_of_turn>", "[INST]"]}),
        *full(
            (BYTE_LEVEL, True, padded, {"add_bos_token": True}),
            (METASPACE, False, truncated, {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}),
            (BYTE_LEVEL, False, both, {"tokenizer_class": "Qwen2TokenizerFast", "sep_token": "<sep>"}),
            (BYTE_LEVEL, True, as_it_is, {"split_special_tokens": True, "model_max_length": 8}),
        ),
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
        "import sys; from pathlib import Path; from dora.prompts.tokenizer import ChatTokenizer\n"
        "sys.stdout.buffer.write(ChatTokenizer(Path(sys.argv[1]), Path(sys.argv[2])).render([]).encode())"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-c", script, str(folders["é file"]), str(cache)]
    assert subprocess.run(argv, env=environment, capture_output=True, check=True).stdout.decode() == "é file"
    assert len(list((cache / "tokenizers").iterdir())) <= KEPT_MAX


def test_a_tokenizer_that_transformers_refuses_is_refused_with_its_reason(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(InvalidValue, field="tokenizer"):
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
    with refused(InvalidValue, field="messages"):
        tokenizer.render(CHATS[0])
