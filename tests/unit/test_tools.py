"""The environment of the chaos and stress runs: its audit finds each turn that was lost, changed or is another's."""

from dataclasses import replace

import numpy as np
import pytest

from dora.data.trajectory import Trajectory
from dora.data.types import GIVEN, EnvironmentEvent
from tests.contract.trainer_service import make_trajectory
from tests.tools import digest, given_of, is_session, requests_of, spans, turns_of, wrong

PROMPT = next(name for name in (f"p{number}" for number in range(99)) if turns_of(name) == 3)
SAMPLED = 5  # tokens of a turn


def session(prompt_id: str = PROMPT) -> Trajectory:
    token_ids, mask, events = [20] * SAMPLED, [1] * SAMPLED, []
    for turn in range(1, turns_of(prompt_id)):
        given = given_of(prompt_id, turn)
        token_ids += given + [20 + turn] * SAMPLED
        mask += [0] * len(given) + [1] * SAMPLED
        events.append(EnvironmentEvent(len(mask) - SAMPLED, GIVEN, "tool", "", 1.0))
    return make_trajectory(
        0,
        0,
        0,
        prompt_id=prompt_id,
        response_token_ids=token_ids,
        logprobs=[-1.0 * each for each in mask],
        loss_mask=mask,
        length_tokens=len(mask),
        events=tuple(events),
        reward=float(turns_of(prompt_id)),
        verifier_log=digest(token_ids),
    )


def test_a_session_as_its_environment_drove_it_is_right() -> None:
    assert is_session(session()) and wrong(session()) == ""
    assert [end - begin for begin, end in spans(session())] == [SAMPLED] * turns_of(PROMPT)


def test_turns_are_requests_with_all_before_them() -> None:
    whole = session()
    for turn, (request, begin, end) in enumerate(requests_of(whole)):
        assert request.output_token_ids == tuple(whole.response_token_ids[:begin].tolist())
        assert len(request.given) == turn and request.turn_begin == begin == end - SAMPLED
        assert request.pending == (len(given_of(PROMPT, turn)) if turn else 0)


@pytest.mark.parametrize("place", [0, SAMPLED, -1])
def test_another_token_is_found(place: int) -> None:
    changed = session().response_token_ids.copy()
    changed[place] += 1
    assert wrong(replace(session(), response_token_ids=changed))


def test_a_lost_turn_an_invalid_reward_and_anothers_turns_are_found() -> None:
    whole = session()
    first, _ = spans(whole)[-1]
    fewer = slice(0, first - len(given_of(PROMPT, turns_of(PROMPT) - 1)))
    parts = {name: getattr(whole, name)[fewer] for name in ("response_token_ids", "logprobs", "loss_mask")}
    shorter = replace(whole, **parts, length_tokens=fewer.stop, events=whole.events[:-1])
    assert "turns" in wrong(shorter)
    assert wrong(replace(whole, reward_valid=False)) and wrong(replace(whole, reward=np.nextafter(3.0, 4.0)))
    other = next(name for name in (f"q{number}" for number in range(99)) if turns_of(name) == turns_of(PROMPT))
    assert wrong(replace(whole, prompt_id=other))
