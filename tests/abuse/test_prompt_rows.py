"""Rows and files of prompts that no honest sender makes: each is a prompt within bounds, or refused with its place."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dora.config import ColumnsConfig, PromptsConfig, RolloutConfig
from dora.data.token_spans import TokenColumns, TokenSpan
from dora.data.types import FinishReason, Prompt
from dora.errors import InvalidValue
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ReportError
from dora.prompts.dataset import dataset_files
from dora.prompts.resolving import resolve_prompts
from dora.prompts.row import OWN_NAMES, Columns, RowLocation, prompt_of_row
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc.columns import columns_from_wire, columns_to_wire
from tests.refusals import refused

NAMES = [*(name for names in OWN_NAMES.values() for name in names), "other", "", "\ud800", "promtp"]


def odd(draw: random.Random, depth: int = 0) -> Any:
    """A value as JSON or Arrow may hold it."""
    plain = [None, True, 0, 1, -1, 64, 10**400, 0.5, float("nan"), "", "a", "é\x00", "\ud800", b"\xff", "x" * 5000]
    kind = draw.randrange(8)
    if kind == 0 and depth < 3:
        return [odd(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 1 and depth < 3:
        names = ["role", "content", "temperature", "stop", "a", "top_k"]
        return {draw.choice(names): odd(draw, depth + 1) for _ in range(draw.randrange(4))}
    if kind == 2:
        return [{"role": draw.choice(["user", "x", 3]), "content": draw.choice(["EARLY", None, 3, ["a"]])}]
    return draw.choice(plain)


def test_ten_thousand_rows_are_prompts_or_refused_with_their_place(tokenizer: ChatTokenizer) -> None:
    draw, passed = random.Random(5), 0
    for number in range(1, 10_001):
        row = {draw.choice(NAMES): odd(draw) for _ in range(draw.randrange(5))}
        if draw.random() < 0.6:
            row = {draw.choice(["prompt", "text"]): "EARLY", **row}
        given = {draw.choice(list(ColumnsConfig.model_fields)): draw.choice(["other", "text", "a"])}
        columns = Columns(given if draw.random() < 0.2 else {}, draw.choice(["refuse", "ignore", "verifier"]))
        place = RowLocation(Path("rows.jsonl"), number)
        try:
            used = columns.used(row, place)
            prompt = prompt_of_row(
                row, RowLocation(place.path, number, used), columns.others, tokenizer, "rows", number
            )
        except InvalidValue as error:
            assert error.field.startswith(f"rows.jsonl:{number}: ") and len(str(error)) < 2000
            continue
        passed += 1
        assert prompt.token_ids and max(prompt.token_ids) < 64 and json.loads(prompt.verifier_json) is not None
        assert isinstance(prompt.group_size, int) and -1000 <= prompt.priority <= 1000
    assert 100 < passed < 9_000


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe{}",
        b'{"prompt": "a"}\n\xff',
        b'{"prompt": "a"}\r{"prompt": "b"}',
        b'{"prompt": "a"}\n' + b" " * (9 << 20),
        b'{"prompt": "' + b"x" * (9 << 20),
        b"\0" * 100,
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_jsonl_is_refused(content: bytes, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with refused(InvalidValue, names=("a.jsonl:",)) as caught:
        resolve_prompts(str(file), tokenizer)
    assert len(str(caught.value)) < 2000


def test_damaged_tables_are_refused_by_file(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"prompt": f"a{number}", "answer": "b" * 50} for number in range(500)])
    parquet.write_table(table, tmp_path / "whole.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "whole.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    draw, refused = random.Random(2), 0
    for name in ("whole.parquet", "whole.arrow"):
        whole = (tmp_path / name).read_bytes()
        for number in range(60):
            content = bytearray(whole[: draw.randrange(len(whole))] if number % 2 else whole)
            for _ in range(draw.randrange(1, 20)):
                if content:
                    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()
            (folder / f"a{Path(name).suffix}").write_bytes(content)
            if name == "whole.arrow":
                (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
            try:
                assert all(isinstance(prompt, Prompt) for prompt in resolve_prompts(str(folder), tokenizer))
            except InvalidValue as error:
                refused += 1
                assert str(folder) in str(error)
    assert refused > 60


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"{"),
        ("state.json", b"[]"),
        ("state.json", b'{"_data_files": 3}'),
        ("state.json", b'{"_data_files": [3]}'),
        ("state.json", b'{"_data_files": [{"filename": "../../etc/passwd"}]}'),
        ("state.json", b'{"_data_files": [{"filename": "absent.arrow"}]}'),
        ("dataset_dict.json", b'{"splits": []}'),
        ("dataset_dict.json", b'{"splits": [1]}'),
        ("dataset_dict.json", b'{"splits": ["../.."]}'),
        ("dataset_dict.json", b"\xff"),
    ],
)
def test_a_folder_that_only_looks_like_a_dataset_is_refused(
    name: str, content: bytes, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValue):
        resolve_prompts(PromptsConfig(source=str(tmp_path)), tokenizer)


def test_a_dataset_of_too_many_files_is_no_walk_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.prompts.dataset.ENTRIES_MAX", 10)
    for number in range(11):
        (tmp_path / f"{number}.jsonl").write_text("")
    with refused(InvalidValue, field="--prompts", names=("10",)):
        dataset_files(tmp_path, "")


def test_a_worker_cannot_name_a_stop_that_was_not_asked_for() -> None:
    buffer = ResponseBuffer(RolloutConfig())
    prompt = Prompt("p", "", (1,), group_size=1, sampling={"stop": ("END",)})
    buffer.admit("g", prompt, 0, {"r": 0}, 0.0)
    assert buffer["r"].sampling.stop == ("END",)

    def told(reason: FinishReason | None, stop: str) -> TokenColumns:
        return columns_from_wire(columns_to_wire([TokenSpan(0, 0, (5,), (-1.0,), reason, stop)]))

    wrong: tuple[tuple[FinishReason | None, str], ...] = (
        ("stop", "OTHER"),
        ("length", "END"),
        (None, "END"),
        ("stop", "x" * 10_000),
    )
    for reason, stop in wrong:
        with refused(ReportError, field="r: stop"):
            buffer.accept("w0", 0, told(reason, stop), 1.0)
    assert buffer.accept("w0", 0, told("stop", "END"), 1.0).ended == ("r",)
