"""Every refusal reads as a reason: what was given, why not, what is allowed; one form, made in dora/errors.py."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dora
from dora.errors import MISSING, Conflict, InvalidValue, NotFound

ROOT = Path(dora.__file__).parent
PINS_WORDING = re.compile(r"\braises\((?:[^()]|\([^()]*\))*\bmatch=")
KINDS = {"InvalidValue", "Conflict", "NotFound", "LimitExceeded", "Unauthenticated"}


@cache
def refusals() -> list[tuple[str, str, ast.Call]]:
    """Every call in DORA that makes a refusal: where, which kind, and the call."""
    return list(_refusals())


def _refusals() -> Iterator[tuple[str, str, ast.Call]]:
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.func.id, node


def text_of(node: ast.expr | None) -> str | None:
    """A text as it is written in the code, with X for what is filled in; None for what is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def test_what_is_allowed_ends_the_sentence_it_must_be() -> None:
    found = 0
    for place, _, call in refusals():
        allowed = text_of(call.args[2]) if len(call.args) > 2 else None
        if allowed is None:
            continue
        found += 1
        first = allowed.split()[0].rstrip(",:;")
        assert not allowed.endswith("."), f"{place}: {allowed!r} ends with a full stop"
        assert first not in {"must", "should", "may", "is", "are", "it", "no", "use"}, f"{place}: {allowed!r}"
    assert found > 300


def test_a_conflict_says_what_is_in_the_way() -> None:
    """``why``, the reason: "does not fit the present state" alone would send its reader to the code."""
    for place, kind, call in refusals():
        missing = isinstance(call.args[1], ast.Name) and call.args[1].id == "MISSING" if len(call.args) > 1 else False
        reason = len(call.args) > 3 or any(keyword.arg == "why" for keyword in call.keywords) or missing
        assert kind != "Conflict" or reason, f'{place}: Conflict(..., why="...") goes on after the value'


def test_what_is_not_there_is_missing() -> None:
    for place, _, call in refusals():
        none = len(call.args) > 1 and isinstance(call.args[1], ast.Constant) and call.args[1].value is None
        assert not none, f"{place}: the value of what is not there is dora.errors.MISSING"


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (InvalidValue("slots", 0, "at least 1"), "slots = 0 is not valid: it must be at least 1"),
        (
            InvalidValue("header", MISSING, "in the first message"),
            "header is missing: it must be in the first message",
        ),
        (InvalidValue("policy", "lax", "did you mean laxity?"), "policy = 'lax' is not valid: did you mean laxity?"),
        (NotFound("--to", "w9", "one of w0, w1"), "--to = 'w9' is not known: it must be one of w0, w1"),
        (
            Conflict("step", 3, "2, the first that is not committed", why="is not the open step"),
            "step = 3 is not the open step: it must be 2, the first that is not committed",
        ),
        (
            Conflict("id", "a", "a new one", why="is taken").within("p.jsonl:3"),
            "p.jsonl:3: id = 'a' is taken: it must be a new one",
        ),
    ],
)
def test_the_form(refusal: InvalidValue, sentence: str) -> None:
    assert str(refusal) == sentence


def test_no_test_pins_the_wording_of_an_error() -> None:
    """Tests assert data, by tests/refusals.py; the wording is in the catalogue of errors."""
    root = ROOT.parent
    files = [*(root / "tests").rglob("*.py"), *(root / "experiments").rglob("*.py")]
    assert len(files) > 300
    assert not [str(file) for file in files if PINS_WORDING.search(file.read_text(encoding="utf-8"))]
