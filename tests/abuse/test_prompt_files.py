"""Prompt files and model folders as people have them: read, or refused with the place and the reason."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from dora.config import validated
from dora.errors import InvalidValue
from dora.models import resolve_model
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from tests.refusals import data_words, refused


def test_a_file_may_have_a_mark_any_line_ends_and_blank_lines(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["EARLY", "\u2028", "\x85\x0b"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    wanted = [tokenizer.encode(text) for text in texts]
    for mark in (b"", codecs.BOM_UTF8):
        for end in (b"\n", b"\r\n"):
            for last in (b"", end, end + b"  " + end + end):
                file.write_bytes(mark + end.join(lines) + last)
                assert [prompt.token_ids for prompt in resolve_prompts(str(file), tokenizer)] == wanted


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
        '{"prompt": "a", "group_size": 4097}',
        '{"prompt": "a", "priority": 1001}',
        '{"prompt": "a", "sampling": {"stop": []}, "stop": "a"}',
        '{"prompt": "a", "sampling": {"stop_token_ids": [64]}}',
        '{"prompt": "a", "sampling": {"max_tokens": 4, "min_tokens": 5}}',
    ],
)
def test_a_line_that_would_fail_later_is_refused_with_its_place(
    line: str, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "DIGITS"}\n' + line)
    with refused(InvalidValue, names=("2",)):
        resolve_prompts(str(file), tokenizer, check=PromptCheck(validated({}), vocab_size=64).well_formed)


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
    with refused(InvalidValue, field="--model", names=data_words(reason)):
        resolve_model(str(tmp_path))
