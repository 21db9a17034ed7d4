"""Turns that follow an earlier output of their request, whatever engines are made of.

The engine cuts the request's KV. A fork equals the fork of the session left alone to the last bit of a logprob, and the
fork that is prefilled whole but for rounding. Tokens that are computed again are counted.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import InvalidValue
from dora.models.tiny import WINDOW_TOKENS
from tests.contract import test_engine_turns
from tests.contract.driver import FILLING, GREEDY, ROUNDING, SLOTS, VersionFolder, make_request
from tests.contract.test_engine_turns import (
    BLOCK,
    DEPENDENT,
    TURN_TOKENS,
    Session,
    TurnDriver,
    frozen,
    in_rounds,
    kept,
    moved,
    moved_late,
    sessions,
)
from tests.refusals import refused
from tests.sweeps import some_of

kind, turns = test_engine_turns.kind, test_engine_turns.turns  # fixtures

Place = Callable[[RequestSpec], int]  # the outputs of a kept request that a fork follows
Fork = Callable[[TurnDriver, str, tuple[int, ...], SamplingParams, int], None]


def retried(request: RequestSpec) -> int:
    """The last turn, with other given tokens."""
    return request.inputs[-1][0]


def within_a_turn(request: RequestSpec) -> int:
    return (request.turn_begin + len(request.output_token_ids)) // 2


def without_its_last(request: RequestSpec) -> int:
    return len(request.output_token_ids) - 1


def at_its_end(request: RequestSpec) -> int:
    """Nothing is left, and the seed is another."""
    return len(request.output_token_ids)


def within_given(request: RequestSpec) -> int:
    return request.inputs[-1][0] + 1


def first_turn_again(request: RequestSpec) -> int:
    return 0


PLACES = [
    retried,
    within_a_turn,
    *(
        pytest.param(place, marks=pytest.mark.full)
        for place in (without_its_last, at_its_end, within_given, first_turn_again)
    ),
]


def cut(driver: TurnDriver, name: str, given: tuple[int, ...], sampling: SamplingParams, after: int) -> None:
    driver.engine.extend(name, given, sampling, after=after)


def moved_and_cut(driver: TurnDriver, name: str, given: tuple[int, ...], sampling: SamplingParams, after: int) -> None:
    """What was kept has moved before the fork."""
    driver.engine.take_in(driver.take_out(name))
    cut(driver, name, given, sampling, after)


def prefilled(driver: TurnDriver, name: str, given: tuple[int, ...], sampling: SamplingParams, after: int) -> None:
    request = driver.engine.request(name)
    driver.engine.remove(name)
    driver.engine.add(request.extended(given, sampling, after=after))


def fork(driver: TurnDriver, session: Session, place: Place, how: Fork = cut) -> None:
    """Asks a turn after an earlier output, with a seed of its own."""
    name = session.request.request_id
    after, sampling, given = place(driver.engine.request(name)), session.sampling(), session.next()
    how(driver, name, given, replace(sampling, seed=sampling.seed + 1), after)
    response = driver.responses[name]
    response.token_ids[after:], response.logprobs[after:] = given, [0.0] * len(given)
    response.finish_reason = None


def play(
    driver: TurnDriver, played: list[Session], place: Place, how: Fork = cut, between: Callable[..., None] = kept
) -> dict[str, tuple[list[int], list[float]]]:
    """Plays sessions of four turns beside each other, of which the third forks. Returns their tokens and logprobs."""
    for session in played:
        driver.add(session.request)
    driver.finish()
    for ask in (between, None, between):
        for session in played:
            fork(driver, session, place, how) if ask is None else ask(driver, session)
        driver.finish()
    found = {}
    for session in played:
        name = session.request.request_id
        response, request = driver.responses[name], driver.engine.request(name)
        assert request.kept and tuple(response.token_ids) == request.output_token_ids
        found[name] = response.token_ids, response.logprobs
        driver.drop(name)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("how", "between"),
    [
        (cut, kept),
        (moved_and_cut, kept),
        *(pytest.param(cut, each, marks=pytest.mark.full) for each in (moved, moved_late, in_rounds, frozen)),
    ],
)
def test_a_fork_equals_the_fork_of_the_session_left_alone(
    turns: TurnDriver,
    kind: str,
    place: Place,
    how: Fork,
    between: Callable[..., None],
) -> None:
    given = (BLOCK + 1, 3, 2)
    alone = {}
    for session in sessions(given):
        alone.update(play(turns, [session], place))
    before = turns.engine.load().reprefilled_tokens
    found = {} if kind in DEPENDENT else play(turns, sessions(given), place, how, between)
    for session in sessions(given) if kind in DEPENDENT else ():
        found.update(play(turns, [session], place, how, between))
    assert found == alone
    assert turns.engine.load().reprefilled_tokens == before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "given", some_of(((BLOCK + 1, 3, 2), (5, BLOCK, BLOCK + 7), (2 * BLOCK, 1, 1)), (BLOCK + 1, 3, 2)), ids=str
)
def test_a_fork_equals_the_fork_that_is_prefilled_whole(
    turns: TurnDriver,
    version_folder: VersionFolder,
    kind: str,
    place: Place,
    given: tuple[int, ...],
) -> None:
    rounding, again = 0.0 if kind == "fake" else ROUNDING, 0
    for number in range(len(sessions(given))):
        before = turns.engine.load().reprefilled_tokens
        session, whole = sessions(given)[number], sessions(given)[number]
        ((token_ids, logprobs),) = play(turns, [session], place).values()
        again += turns.engine.load().reprefilled_tokens - before
        turns.engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
        turns.responses.clear()
        ((expected, values),) = play(turns, [whole], place, prefilled).values()
        assert token_ids == expected
        assert max(abs(ours - theirs) for ours, theirs in zip(logprobs, values, strict=True)) <= rounding
        turns.engine.load_weights(1, version_folder(1), None)
        turns.responses.clear()
    has_left = kind == "window" and given[0] == WINDOW_TOKENS and place in (retried, within_given, first_turn_again)
    assert bool(again) is has_left


def ended(driver: TurnDriver, tokens: int) -> tuple[Session, RequestSpec]:
    """A session of two turns whose KV has this many tokens, and the request that its engine keeps."""
    given = tokens - 5 - 2 * TURN_TOKENS + 1
    session = Session(
        replace(make_request(0, GREEDY, 5, max_tokens=TURN_TOKENS), request_id="s", keeps=True), (given, 3)
    )
    driver.add(session.request)
    driver.finish()
    kept(driver, session)
    driver.finish()
    return session, driver.engine.request("s")


def as_prompt(request: RequestSpec, name: str) -> RequestSpec:
    """A single answer to all but the last token of a session."""
    token_ids = (*request.prompt_token_ids, *request.output_token_ids)[:-1]
    return replace(make_request(0, GREEDY), request_id=name, prompt_token_ids=token_ids)


def answer(driver: TurnDriver, request: RequestSpec) -> tuple[list[int], list[float]]:
    driver.add(request)
    driver.finish()
    response = driver.responses[request.request_id]
    return response.token_ids, response.logprobs


def test_a_fork_leaves_no_foreign_kv_in_the_prefix_cache(turns: TurnDriver, version_folder: VersionFolder) -> None:
    """Its tokens are written into a block that was full, and known by the tokens of the branch that it leaves."""
    session, request = ended(turns, 3 * BLOCK + 1)
    left = as_prompt(request, "left")
    fork(turns, session, lambda request: request.turn_begin - 3)
    turns.finish()
    found = answer(turns, left)
    turns.drop("s", "left")
    turns.engine.load_weights(1, version_folder(1), None)
    expected = answer(turns, replace(left, request_id="again"))
    assert found[0] == expected[0]
    assert max(abs(ours - theirs) for ours, theirs in zip(found[1], expected[1], strict=True)) <= ROUNDING


def test_a_block_that_others_have_stays_theirs(turns: TurnDriver, kind: str) -> None:
    """The fork computes its own beginning of the block again, which is counted."""
    engine, block = turns.engine, turns.engine.capability.block_tokens
    blocks = max(1, 3 * BLOCK // block)
    session, request = ended(turns, blocks * block + 1)
    other = replace(as_prompt(request, "other"), sampling=replace(GREEDY, max_tokens=TURN_TOKENS))
    alone = answer(turns, other)
    turns.drop("other")
    turns.add(other)
    turns.step(2)
    before, shared = engine.load().reprefilled_tokens, engine.siblings("s", blocks)
    fork(turns, session, lambda request: request.turn_begin - 3)
    turns.finish()
    response = turns.responses["other"]
    assert response.token_ids == alone[0]
    apart = max(abs(ours - theirs) for ours, theirs in zip(response.logprobs, alone[1], strict=True))
    assert apart <= (ROUNDING if kind in DEPENDENT else 0.0)
    assert bool(shared) is (kind not in ("fake", "mla", "window"))
    after = 5 + request.turn_begin - 3
    assert engine.load().reprefilled_tokens - before == (after % block if shared else 0)


def test_a_fork_of_kv_that_waits_for_blocks_is_prefilled_whole(turns: TurnDriver) -> None:
    session, _ = ended(turns, 2 * BLOCK + 3)
    alone = replace(session)
    fork(turns, alone, retried)
    turns.finish()
    expected = list(turns.responses["s"].token_ids)
    turns.drop("s")
    session, _ = ended(turns, 2 * BLOCK + 3)
    snapshot = turns.take_out("s")
    for index in range(SLOTS):
        turns.add(replace(make_request(index, FILLING, 212), request_id=f"filler{index}"))
        turns.step()
    used = turns.engine.load().kv_used_tokens
    turns.engine.take_in(snapshot)
    assert turns.engine.load().kv_used_tokens == used
    before = turns.engine.load().reprefilled_tokens
    fork(turns, session, retried)
    turns.drop(*turns.fillers)
    turns.finish()
    assert turns.responses["s"].token_ids == expected
    assert turns.engine.load().reprefilled_tokens > before


def test_a_fork_does_not_move_before_its_first_token(turns: TurnDriver) -> None:
    session, _ = ended(turns, BLOCK + 3)
    fork(turns, session, within_a_turn)
    turns.engine.freeze("s")
    assert turns.engine.export("s") is None
    turns.engine.thaw("s")
    turns.step()
    turns.engine.take_in(turns.take_out("s"))
    turns.finish()
    assert turns.responses["s"].finish_reason == "length"


@pytest.mark.parametrize("after", [-1, 100])
def test_a_place_outside_the_outputs_is_refused(turns: TurnDriver, after: int) -> None:
    _, request = ended(turns, BLOCK)
    with refused(InvalidValue, field="after", value=after):
        turns.engine.extend("s", (5,), replace(GREEDY, max_tokens=4), after=after)
    assert turns.engine.request("s") == request
