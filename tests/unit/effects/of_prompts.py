"""The settings of the source of prompts: what they make of one file."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from dora.config import Config
from dora.data.types import Prompt
from dora.errors import DoraError, InvalidValue
from dora.prompts.resolving import resolve_prompts
from dora.prompts.source import PromptSource
from dora.prompts.tokenizer import ChatTokenizer
from tests.unit.effects.rows import Place, Row, Seen, Shown

OTHERS: Final[dict[str, Any]] = {  # a value of each field of a prompt, and what the prompt then has
    "prompt": ("ab", "text", "ab"),
    "messages": ([{"role": "user", "content": "ab"}], "text", None),
    "prompt_token_ids": ([5, 6], "token_ids", (5, 6)),
    "prompt_id": ("mine", "prompt_id", "mine"),
    "task_id": ("sums", "task_id", "sums"),
    "answer": ("4", "verifier_json", '{"answer": "4"}'),
    "verifier": ({"a": 1}, "verifier_json", '{"a": 1}'),
    "group_size": (3, "group_size", 3),
    "group_size_min": (2, "group_size_min", 2),
    "sampling": ({"top_k": 3}, "sampling", {"top_k": 3}),
    "priority": (7, "priority", 7),
    "environment": ("tool", "environment", "tool"),
}
CONTENT: Final = ("prompt", "messages", "prompt_token_ids")  # of which a prompt has one


def source_of(config: Config, place: Place, *rows: dict[str, Any]) -> PromptSource:
    file = place.folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = config.prompts.model_copy(update={"source": str(file)})
    return resolve_prompts(prompts, ChatTokenizer(place.model("dense")))


def column(field: str) -> Seen:
    """The field's value stands in the column ``x``, which no prompt has."""
    value, attribute, expected = OTHERS[field]
    row = {"x": value, **({} if field in CONTENT else {"prompt": "ab"})}

    def see(config: Config, place: Place) -> object:
        try:
            found = getattr(next(iter(source_of(config, place, row))), attribute)
        except InvalidValue as error:
            return error.field
        return "a chat" if expected is None and "ab" in found and found != "ab" else found

    return Seen("x", see, "a chat" if expected is None else expected)


def drawn(config: Config, place: Place) -> object:
    """The prompts of a file of three rows with a column that is no field."""
    rows = [{"prompt": "ab", "prompt_id": f"p{number}", "level": number} for number in range(3)]
    try:
        return [(each.prompt_id, each.verifier_json) for each in source_of(config, place, *rows)]
    except InvalidValue as error:
        return error.field.rpartition(" ")[2]


def order(config: Config, place: Place) -> list[str]:
    rows = [{"prompt": "ab", "prompt_id": f"p{number}"} for number in range(12)]
    return [each.prompt_id for each in source_of(config, place, *rows)]


def large(config: Config, place: Place) -> bool:
    """Whether a prompt with 2,000 bytes for its reward function is taken."""
    try:
        return bool(list(source_of(config, place, {"prompt": "ab", "answer": "x" * 2000})))
    except InvalidValue:
        return False


def read_split(place: Place, read: Callable[[Path, ChatTokenizer], Iterable[Prompt]]) -> list[str]:
    """The prompts that ``read`` finds in a dataset's folder with two splits, or the setting that it needs."""
    folder = place.folder / "set"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": "ab", "prompt_id": name}) + "\n")
    try:
        return [each.prompt_id for each in read(folder, ChatTokenizer(place.model("dense")))]
    except DoraError as error:
        return [error.field]


def split(config: Config, place: Place) -> list[str]:
    def read(folder: Path, tokenizer: ChatTokenizer) -> Iterable[Prompt]:
        return resolve_prompts(config.prompts.model_copy(update={"source": str(folder)}), tokenizer)

    return read_split(place, read)


def first_text(config: Config, place: Place) -> str:
    source = resolve_prompts(config.prompts, ChatTokenizer(place.model("dense")))
    return f"{source.reward} {next(iter(source)).text}"


ROWS: Final[dict[str, Row]] = {
    "prompts.source": Seen("tiny", first_text, base={"prompts.source": "counting"}),
    "prompts.split": Seen("test", split, ["test"]),
    **{f"prompts.columns.{field}": column(field) for field in OTHERS},
    "prompts.other_columns": Seen("verifier", drawn, [(f"p{n}", json.dumps({"level": n})) for n in range(3)]),
    "prompts.verifier_kb": Seen(1, large, False),
    "prompts.epochs": Seen(2, order, [*(f"p{n}" for n in range(12)), *(f"p{n}#1" for n in range(12))]),
    "prompts.shuffle": Seen(True, order),
    "prompts.shuffle_seed": Seen(1, order, base={"prompts.shuffle": True}),
    "prompts.then": Shown(
        "tests/unit/test_feed.py::test_after_its_source_a_feed_may_wait_until_it_is_said_that_no_more_will_come"
    ),
}
