"""Prompts from Parquet files and dataset folders, as pyarrow and Hugging Face's datasets write them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dora.config import PromptsConfig
from dora.data.types import Prompt
from dora.errors import MISSING, InvalidValue
from dora.prompts.dataset import dataset_files
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from tests.refusals import data_words, refused

ROWS = [{"question": f"q{number}", "answer": str(number), "level": number % 3} for number in range(300)]
QUESTIONS = {"columns": {"prompt": "question"}, "other_columns": "ignore"}


@pytest.fixture(scope="module")
def tokenizer(tiny_dense: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_dense)


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow", reason="the extra `data` is not installed")


def write_parquet(arrow: Any, file: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = arrow.Table.from_pylist([{**dict.fromkeys(names), **row} for row in rows])
    pyarrow.parquet.write_table(table, file, row_group_size=70)
    return file


def save(arrow: Any, folder: Path, rows: list[dict[str, Any]], shards: int = 1) -> Path:
    """Writes these rows as ``datasets.save_to_disk`` does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        table = arrow.Table.from_pylist(rows[number::shards])
        with arrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=50)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def read(path: Path, tokenizer: ChatTokenizer, **settings: Any) -> list[Prompt]:
    return list(resolve_prompts(PromptsConfig(source=str(path), **settings), tokenizer))


def answers(prompts: list[Prompt]) -> list[str]:
    return [json.loads(prompt.verifier_json)["answer"] for prompt in prompts]


def test_parquet_saved_and_jsonl_give_the_same_prompts(arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected = read(lines, tokenizer, **QUESTIONS)
    assert [prompt.prompt_id for prompt in expected[:2]] == ["prompts:1", "prompts:2"]
    assert read(write_parquet(arrow, tmp_path / "prompts.parquet", ROWS), tokenizer, **QUESTIONS) == expected
    assert read(save(arrow, tmp_path / "prompts", ROWS), tokenizer, **QUESTIONS) == expected
    sharded = read(save(arrow, tmp_path / "sharded", ROWS, shards=3), tokenizer, **QUESTIONS)
    assert answers(sharded) == [row["answer"] for first in range(3) for row in ROWS[first::3]]
    assert sharded[299].prompt_id == "sharded:300" and sharded[0].task_id == "sharded"


def test_the_reward_function_may_get_the_other_columns(arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = write_parquet(arrow, tmp_path / "a.parquet", ROWS)
    prompt = read(file, tokenizer, columns={"prompt": "question"}, other_columns="verifier")[4]
    assert json.loads(prompt.verifier_json) == {"level": 1, "answer": "4"}


def test_nulls_are_left_out_and_objects_may_be_json_texts(arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "EARLY"}]
    rows = [
        {"messages": chat, "sampling": {"temperature": 0.5, "stop": ["a"]}, "answer": None, "verifier": '{"x": [1]}'},
        {"messages": [{**chat[0], "name": "me"}], "sampling": {"max_tokens": 7}, "answer": "b", "priority": 3},
        {"text": "LATE", "group_size": 2},
        {"token_ids": [5, 6], "prompt_id": "mine", "task_id": "sums"},
    ]
    first, second, third, fourth = read(write_parquet(arrow, tmp_path / "a.parquet", rows), tokenizer)
    assert first.token_ids == second.token_ids == tokenizer.encode_chat(chat)[1]
    assert (first.sampling, second.sampling) == ({"temperature": 0.5, "stop": ("a",)}, {"max_tokens": 7})
    assert [json.loads(each.verifier_json) for each in (first, second)] == [
        {"x": [1], "answer": None},
        {"answer": "b"},
    ]
    assert (second.priority, third.text, third.group_size) == (3, "LATE", 2)
    assert (fourth.token_ids, fourth.prompt_id, fourth.task_id) == ((5, 6), "mine", "sums")


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({"question": ""}, "question", "a text that is not empty"),
        ({"question": 3}, "question", "a text"),
        ({"question": "a", "prompt_id": "x" * 300}, "prompt_id", "at most 256"),
        ({"question": "a", "answer": b"\xff"}, "answer", "a value that JSON has"),
        ({"question": "a", "answer": float("nan")}, "answer", "a value that JSON has"),
        ({"question": "a", "group_size": 2.5}, "group_size", "an integer"),
        ({"question": "a", "sampling": {"heat": 1}}, "sampling.heat", "ne of temperature"),
        ({"question": "a", "sampling": "{"}, "sampling", "JSON"),
        ({"question": "a", "priority": 5000}, "priority", "from -1000 to 1000"),
        ({"question": "a", "token_ids": [1]}, "question", "exactly one of"),
        ({"question": None, "token_ids": [64]}, "token_ids", "integers from 0 to 63"),
        ({"question": None}, "question", "this row has"),
    ],
)
def test_a_wrong_cell_is_named_by_file_row_and_column(
    row: dict[str, Any], column: str, reason: str, arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    rows = [dict.fromkeys(row) | {"question": None, "token_ids": [1]}] * 200 + [row]
    if row["question"] == 3:
        rows = [{"question": 3}]
    file = write_parquet(arrow, tmp_path / "a.parquet", rows)
    with refused(InvalidValue, names=data_words(reason)) as caught:
        read(file, tokenizer, columns={"prompt": "question"})
    assert caught.value.field.startswith(f"{file}:{len(rows)}: {column}")


def test_a_column_that_is_not_there_is_told_at_once_with_those_that_are(
    arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    file = write_parquet(arrow, tmp_path / "a.parquet", ROWS)
    with refused(
        InvalidValue,
        field="a.parquet: problem",
        value=MISSING,
        names=("prompts.columns.prompt", "question, answer, level"),
    ):
        read(file, tokenizer, columns={"prompt": "problem"})
    with refused(InvalidValue, value=0, names=("1", "prompts.other_columns")):
        read(file, tokenizer, columns={"prompt": "question"})
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"problem": "a"}\n{"text": "b"}\n')
    with refused(InvalidValue, names=("2",)):
        read(lines, tokenizer, columns={"prompt": "problem"})


def test_a_folder_of_a_hub_repository_is_read_by_split(arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    for number in range(2):
        write_parquet(arrow, tmp_path / f"data/train-0000{number}-of-00002.parquet", ROWS[number::2])
    write_parquet(arrow, tmp_path / "data/test-00000-of-00001.parquet", ROWS[:5])
    (tmp_path / "README.md").write_text("")
    (tmp_path / ".cache").mkdir()
    write_parquet(arrow, tmp_path / ".cache/train-00000-of-00001.parquet", ROWS)
    assert answers(read(tmp_path, tokenizer, split="train", **QUESTIONS)) == [row["answer"] for row in ROWS[::2]] + [
        row["answer"] for row in ROWS[1::2]
    ]
    assert len(read(tmp_path, tokenizer, split="test", **QUESTIONS)) == 5
    for split in ("", "validation"):
        with refused(InvalidValue, field="prompts.split"):
            read(tmp_path, tokenizer, split=split, **QUESTIONS)


def test_a_saved_dictionary_of_splits(arrow: Any, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    save(arrow, tmp_path / "d" / "train", ROWS, shards=2)
    save(arrow, tmp_path / "d" / "held_out", ROWS[:4])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "held_out"]}')
    assert len(read(tmp_path / "d", tokenizer, split="train", **QUESTIONS)) == 300
    assert answers(read(tmp_path / "d", tokenizer, split="held_out", **QUESTIONS)) == ["0", "1", "2", "3"]
    with refused(InvalidValue, field="prompts.split", value="", names=("held_out",)):
        read(tmp_path / "d", tokenizer, **QUESTIONS)
    with refused(InvalidValue, field="prompts.split", value="train"):
        read(tmp_path / "d" / "train", tokenizer, split="train", **QUESTIONS)


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["a.jsonl", "b.jsonl"], "", ["a.jsonl", "b.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "dev/a.jsonl"], "validation", ["dev/a.jsonl"]),
        (["data/my-Training.data.jsonl"], "train", ["data/my-Training.data.jsonl"]),
        (["constrained.jsonl", "latest.jsonl"], "", ["constrained.jsonl", "latest.jsonl"]),
        (["mine-00000-of-00001.jsonl", "train.jsonl"], "mine", ["mine-00000-of-00001.jsonl"]),
    ],
)
def test_which_files_a_split_has(names: list[str], split: str, found: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert dataset_files(tmp_path, split) == [tmp_path / name for name in found]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "a dataset"),
        (["main/train.jsonl", "socratic/train.jsonl"], "of one folder"),
        (["a.jsonl", "b.parquet"], "of one kind"),
    ],
)
def test_a_folder_that_is_no_dataset_is_refused(names: list[str], reason: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with refused(InvalidValue, field="--prompts", names=data_words(reason)):
        dataset_files(tmp_path, "")


def test_without_pyarrow_it_is_said_what_to_install(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with refused(InvalidValue, field="--prompts"):
        read(tmp_path / "a.parquet", tokenizer)
