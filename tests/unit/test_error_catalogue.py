"""The wording of errors, in one place: ``pytest -s tests/unit/test_error_catalogue.py`` prints what a person sees."""

import inspect

import pytest

from dora import errors
from dora.errors import (
    MISSING,
    CanaryMismatch,
    Conflict,
    DeadlineExceeded,
    DoraError,
    IllegalTransition,
    InvalidValue,
    LayoutMisfit,
    LimitExceeded,
    NotFound,
    SnapshotRefused,
    TransferFailed,
    VersionRejected,
)

CATALOGUE: dict[str, DoraError] = {
    "bad value": InvalidValue("slots", 0, "at least 1"),
    "missing": InvalidValue("header", MISSING, "in the first message of an upload"),
    "guess": InvalidValue("--policy", "doar", errors.one_of("doar", ["dora", "laxity"])),
    "long value": InvalidValue("prompt", "x" * 10_000, "at most 4,096 characters"),
    "own reason": Conflict("request", "g0.0", "a request in no handoff", why="is in a handoff already"),
    "own sentence": Conflict("checkpoint", MISSING, "with a state folder", said="There is nothing to checkpoint."),
    "state": Conflict("version", 7, "3, the next version"),
    "unknown": NotFound("worker_id", "w9", "the id of a worker: w0, w1"),
    "limit": LimitExceeded("prompts", 9, "at most 8 now (queue of 8)"),
    "deadline": DeadlineExceeded("load_s", 61.0, "at most 60 for 1,000 bytes, of which 10 were loaded"),
    "rejected": VersionRejected(3, "logprobs differ by 0.5", ["w0", "w1"], 0.5),
    "unavailable": VersionRejected(3, "no host has its weights", [], 0.0),
    "snapshot": SnapshotRefused("checksum of chunk 1 differs"),
    "layout": LayoutMisfit("layout.block_tokens = 4, this engine has 6"),
    "transfer": TransferFailed("w1 stopped reading for 10 s"),
    "canary": CanaryMismatch("version 3: a logprob differs by 0.5", 0.5),
    "transition": IllegalTransition("handoff of g0.0: COPIED is not allowed in RELEASED"),
}
LINE_CHARACTERS_MAX = 400


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_error_is_one_line_that_names_the_field_and_the_value(name: str) -> None:
    error = CATALOGUE[name]
    text = str(error)
    print(f"{type(error).__name__:18} {text}")
    assert text and "\n" not in text and len(text) <= LINE_CHARACTERS_MAX
    if isinstance(error, InvalidValue) and name != "own sentence":
        assert text.startswith(error.field) and error.allowed in text and error.why in text
        assert error.value is MISSING or error.value == "x" * 10_000 or repr(error.value) in text


def test_every_kind_of_error_is_in_the_catalogue() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DoraError)}
    assert kinds - {DoraError} == {type(error) for error in CATALOGUE.values()}
