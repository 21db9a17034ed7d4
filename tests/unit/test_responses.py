"""A worker keeps its responses, and repeats them from any token on, in pieces, with the rows that belong to them."""

from dataclasses import replace

import pytest

from dora.data.types import RequestSpec, SamplingParams, TokenDelta
from dora.worker import responses
from dora.worker.responses import TOKEN_BYTES, Responses

PROMPT = (7, 8, 9)
ROW = 6  # bytes


def spec(request_id: str, outputs: int = 0) -> RequestSpec:
    held = tuple(range(outputs))
    return RequestSpec(request_id, 3, PROMPT, SamplingParams(max_tokens=99), held, tuple(-float(i) for i in held))


def row(position: int) -> bytes:
    """Returns the experts of the token at this position, the prompt's first."""
    return bytes([position]) * ROW


def sampled(kept: Responses, request_id: str, first: int, count: int, *, routed: bool, end: bool = False) -> None:
    for index in range(first, first + count):
        fed = range(len(PROMPT)) if index == 0 else [len(PROMPT) + index - 1]
        rows = b"".join(map(row, fed)) if routed else b""
        reason = "length" if end and index == first + count - 1 else None
        kept.add([TokenDelta(request_id, 3, index, (index,), (-float(index),), reason, "", rows)])  # type: ignore[arg-type]


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("piece_tokens", [1, 4, 100])
@pytest.mark.parametrize("known", [0, 1, 5, 9])
def test_what_the_service_lacks_is_told_with_its_rows(
    monkeypatch: pytest.MonkeyPatch, routed: bool, piece_tokens: int, known: int
) -> None:
    monkeypatch.setattr(responses, "PIECE_BYTES", piece_tokens * (TOKEN_BYTES + ROW * routed))
    kept = Responses()
    kept.begin(spec("a"))
    sampled(kept, "a", 0, 9, routed=routed, end=True)
    over, rounds = kept.come_back({"a": known})
    pieces = [piece for each in rounds for piece in each]
    assert not over and all(len(each) <= 1 for each in rounds)
    assert [token for piece in pieces for token in piece.token_ids] == list(range(known, 9))
    assert [piece.first_token for piece in pieces] == list(range(known, 9, piece_tokens)) or known == 9
    rows = range(0 if known == 0 else len(PROMPT) + known - 1, len(PROMPT) + 9 - 1)
    assert b"".join(piece.routed_experts for piece in pieces) == b"".join(map(row, rows)) * routed
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_rows_of_tokens_that_were_sampled_elsewhere_are_not_here() -> None:
    kept, without = Responses(), Responses()
    for each, routed in ((kept, True), (without, False)):
        each.begin(spec("a", outputs=4))
        each.begin(spec("b", outputs=4))
        sampled(each, "a", 4, 3, routed=routed)
    found = [{each.request_id: (each.first_token, each.tokens) for each in of.held()} for of in (kept, without)]
    assert found == [{"a": (4, 7), "b": (4, 4)}, {"a": (0, 7), "b": (0, 4)}]
    (a, _), (_, b) = (of.come_back({"a": 5, "b": 1})[1][0] for of in (kept, without))
    assert a.token_ids == (5, 6) and a.routed_experts == row(7) + row(8)
    assert b.token_ids == (1, 2, 3) and b.logprobs == (-1.0, -2.0, -3.0)


@pytest.mark.parametrize("comes", ["new", "kept", "given"])
@pytest.mark.parametrize("piece_tokens", [1, 4, 100])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_turn_is_told_again_with_the_rows_of_its_given_tokens(
    monkeypatch: pytest.MonkeyPatch, comes: str, piece_tokens: int, known: int
) -> None:
    """To a service that has some tokens of the turn; it has those of the turns before it durably."""
    monkeypatch.setattr(responses, "PIECE_BYTES", piece_tokens * (TOKEN_BYTES + ROW))
    kept = Responses()
    if comes == "new":
        kept.begin(replace(spec("s"), keeps=True))
        sampled(kept, "s", 0, 4, routed=True, end=True)
        assert [each.first_token for each in kept.held()] == [0]
    elif comes == "kept":
        kept.begin(replace(spec("s", outputs=4), keeps=True, kept=True))
    if comes == "given":
        kept.begin(replace(spec("s", outputs=6), keeps=True, inputs=((4, 6),)))
    else:
        kept.extend("s", (4, 5), SamplingParams(), 4)
    kept.add([TokenDelta("s", 3, 6, (6,), (-6.0,), None, "", b"".join(map(row, (6, 7, 8))))])
    sampled(kept, "s", 7, 2, routed=True, end=True)
    assert [(each.first_token, each.tokens) for each in kept.held()] == [(6, 9)]
    _, rounds = kept.come_back({"s": 6 + known})
    pieces = [piece for each in rounds for piece in each]
    assert [token for piece in pieces for token in piece.token_ids] == list(range(6 + known, 9))
    begin = len(PROMPT) + 3 + (2 + known if known else 0)
    assert b"".join(piece.routed_experts for piece in pieces) == b"".join(map(row, range(begin, len(PROMPT) + 8)))


def test_a_session_that_waits_keeps_no_rows_that_the_service_has() -> None:
    """Rows of many long pauses would fill the worker's memory, at whose bound it stops."""
    kept = Responses(most_bytes=TOKEN_BYTES * 9 + 1)
    kept.begin(replace(spec("s"), keeps=True))
    sampled(kept, "s", 0, 9, routed=True, end=True)
    assert kept.is_full
    kept.settle("s")
    assert not kept.is_full and [(each.first_token, each.tokens) for each in kept.held()] == [(9, 9)]
    kept.extend("s", (7, 8), SamplingParams(), 9)
    sampled(kept, "s", 11, 1, routed=True)
    kept.settle("s")  # of the turn before
    assert [(each.first_token, each.tokens) for each in kept.held()] == [(11, 12)]
    _, ((piece,),) = kept.come_back({"s": 11})
    assert piece.routed_experts
    kept.settle("unknown")
    kept.forget("s")
    assert kept._ended_bytes == 0


@pytest.mark.parametrize("after", [0, 2, 4, 5, 6, 8, 9])
def test_a_fork_is_told_again_with_the_rows_from_before_its_given_tokens(after: int) -> None:
    kept, run_first = Responses(), 4 if after in (5, 6) else after
    kept.begin(replace(spec("s", outputs=6), inputs=((4, 6),), keeps=True))
    kept.add([TokenDelta("s", 3, 6, (6,), (-6.0,), None, "", b"".join(map(row, (6, 7, 8))))])
    sampled(kept, "s", 7, 2, routed=True, end=True)
    kept.extend("s", (7, 8), SamplingParams(), after)
    fed = range(len(PROMPT) + run_first - 1, len(PROMPT) + after + 2)
    kept.add([TokenDelta("s", 3, after + 2, (1,), (-1.0,), None, "", b"".join(map(row, fed)))])
    sampled(kept, "s", after + 3, 2, routed=True)
    assert [(each.first_token, each.tokens) for each in kept.held()] == [(after + 2, after + 5)]
    _, ((piece,),) = kept.come_back({"s": after + 2})
    assert piece.routed_experts == b"".join(map(row, range(fed[0], fed[-1] + 3)))


def test_it_is_full_of_what_has_ended_and_of_what_came_alone() -> None:
    kept = Responses(most_bytes=TOKEN_BYTES * 10)
    for name in ("a", "b"):
        kept.begin(spec(name))
    sampled(kept, "a", 0, 30, routed=False)
    assert not kept.is_full, "what runs is bounded by its engine"
    kept.is_alone = True
    sampled(kept, "b", 0, 9, routed=False)
    assert not kept.is_full
    sampled(kept, "b", 9, 1, routed=False, end=True)
    assert kept.is_full
    kept.come_back({"a": 30, "b": 10})
    assert kept.is_full, "an ended response has ten tokens, and is not settled"
    kept.forget("b")
    assert not kept.is_full and [each.request_id for each in kept.held()] == ["a"]


@pytest.mark.parametrize("given", [(), ((4, 6),)], ids=["first turn", "later turn"])
def test_prompt_logprobs_are_told_again_with_the_first_token_of_their_turn(given: tuple[tuple[int, int], ...]) -> None:
    """To a service that has no token of the turn. One that came with tokens, from elsewhere, has them not."""
    kept, begin = Responses(), given[-1][1] if given else 0
    kept.begin(replace(spec("a", outputs=begin), inputs=given, keeps=True, prompt_logprobs=True))
    of_prompt = b"\0" * 4 * (len(PROMPT) + begin - 1)
    kept.add([TokenDelta("a", 3, begin, (1,), (-1.0,), prompt_logprobs=of_prompt)])
    sampled(kept, "a", begin + 1, 2, routed=False, end=True)
    kept.begin(replace(spec("b", outputs=begin + 1), inputs=given, keeps=True))
    sampled(kept, "b", begin + 1, 2, routed=False)
    assert {each.request_id: each.prompt_logprobs for each in kept.held()} == {"a": True, "b": False}
    for has, told in ((begin, of_prompt), (begin + 1, b"")):
        _, ((piece, _),) = kept.come_back({"a": has, "b": begin + 1})
        assert (piece.first_token, piece.prompt_logprobs) == (has, told)
    kept.extend("a", (7, 8), SamplingParams(), begin + 3)
    assert not any(each.prompt_logprobs for each in kept.held())
    kept.forget("a")
    assert not kept.is_full and kept._ended_bytes == 0


@pytest.mark.parametrize("after", [0, 2, 4, 5, 6, 8, 9])
def test_a_fork_has_the_tokens_and_the_digest_of_one_that_was_started(after: int) -> None:
    request = replace(spec("a", outputs=9), inputs=((4, 6),), keeps=True)
    forked, started = Responses(), Responses()
    forked.begin(replace(request, output_token_ids=request.output_token_ids[:7], logprobs=request.logprobs[:7]))
    sampled(forked, "a", 7, 2, routed=False, end=True)
    forked.extend("a", (7, 8), SamplingParams(seed=5), after)
    started.begin(request.extended((7, 8), SamplingParams(seed=5), after=after))
    assert forked.held() == started.held()
    assert forked.come_back({"a": 0}) == started.come_back({"a": 0})
