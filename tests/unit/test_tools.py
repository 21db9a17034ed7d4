"""The environment of the chaos and stress runs: its audit finds each turn that was lost, changed or is another's."""

from dataclasses import replace

import numpy as np
import pytest

from dora.data.trajectory import Trajectory
from dora.data.types import INPUT, EnvironmentEvent
from tests.contract.trainer_service import make_branch
from tests.session_audit import all_wrong, audited, digest, requests_of, sessions_of, spans, wrong
from tests.session_script import asked_of, first_turn, is_empty, stretches, turns_of

SAMPLED = 5  # tokens of a turn
NAMES = [f"p{number}" for number in range(1500)]


def named(turns: int = 3, forks: int = 0, *, empty: bool = False) -> str:
    """A prompt whose sessions have so many turns and forks."""
    return next(
        name
        for name in NAMES
        if turns_of(name) == turns and len([*stretches(name)]) == 1 + forks and is_empty(name) == empty
    )


def session(prompt_id: str) -> list[Trajectory]:
    """The branches of a session that nothing befell, in their order."""
    asked, paths, found = asked_of(prompt_id), dict[int, tuple[list[int], list[int]]](), []
    for index, turns in enumerate(stretches(prompt_id)):
        prompt, tokens, shared, mask, events = [9, 10], list[int](), 0, list[int](), list[EnvironmentEvent]()
        for turn in turns:
            each = asked.get(turn)
            if each is not None and each.is_prompt:
                prompt = [*each.given]
            elif each is not None:
                if each.after_turn is not None:
                    prompt, earlier = paths[each.after_turn]
                    tokens = earlier[: each.first_token]
                    shared, mask = len(tokens), [0] * len(tokens)
                tokens, mask = [*tokens, *each.given], [*mask, *[0] * len(each.given)]
            if each is not None:
                events.append(EnvironmentEvent(len(tokens), INPUT, "tool", "", 1.0))
            tokens, mask = [*tokens, *[20 + turn] * SAMPLED], [*mask, *[1] * SAMPLED]
            paths[turn] = prompt, tokens
        about = {"prompt_id": prompt_id, "events": tuple(events), "shared_prefix_tokens": shared}
        reward = float(turns_of(prompt_id))
        found.append(make_branch(index, prompt, tokens, mask, reward=reward, **about))
    return [replace(each, verifier_log=digest(found[-1].response_token_ids)) for each in found]


def changed(branch: Trajectory, place: int) -> Trajectory:
    tokens = branch.response_token_ids.copy()
    tokens[place] += 1
    return replace(branch, response_token_ids=tokens)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("forks", [0, 1, 2])
def test_a_session_as_its_environment_drove_it_is_right(forks: int, empty: bool) -> None:
    whole = session(named(forks=forks, empty=empty))
    assert len(whole) == 1 + forks and wrong(whole) == ""
    assert [end - begin for each in whole for begin, end in spans(each)] == [SAMPLED] * 3
    assert sessions_of(reversed(whole)) == [whole]
    found = audited([whole], {}, all_wrong([whole]))
    assert (found["sessions"], found["branches"], found["turns"], found["sessions_wrong"]) == (1, 1 + forks, 3, 0)


def test_scripts_have_every_kind_of_turn_and_fit_what_was_sampled_before() -> None:
    kinds = set[str]()
    for name in NAMES:
        assert wrong(session(name)) == ""
        for turn, each in asked_of(name).items():
            assert each.after_turn is None or first_turn(name) <= each.after_turn < turn
            kinds.add("prompt" if each.is_prompt else "whole" if each.first_token is None else "cut")
    assert kinds == {"prompt", "whole", "cut"}
    assert {len([*stretches(name)]) for name in NAMES} == {1, 2, 3, 4}


@pytest.mark.parametrize("name", [named(), named(forks=2), named(turns=4, forks=3)])
def test_turns_are_requests_with_all_before_them(name: str) -> None:
    for branch, turns in zip(session(name), stretches(name), strict=True):
        found = requests_of(branch)
        assert len(found) == len(turns)
        for request, begin, end in found:
            assert request.output_token_ids == tuple(branch.response_token_ids[:begin].tolist())
            assert request.turn_begin == begin == end - SAMPLED


@pytest.mark.parametrize("place", [0, SAMPLED, -1])
def test_another_token_is_found(place: int) -> None:
    (whole,) = session(named())
    assert wrong([changed(whole, place)])


@pytest.mark.parametrize("forks", [1, 2])
def test_a_branch_that_is_lost_or_shares_other_tokens_is_found(forks: int) -> None:
    whole = session(named(turns=4, forks=forks))
    assert wrong(whole[:-1]) and wrong(whole[1:])
    for index, branch in enumerate(whole):
        for place in range(branch.shared_prefix_tokens):
            assert wrong([*whole[:index], changed(branch, place), *whole[index + 1 :]])
        other = replace(branch, shared_prefix_tokens=branch.shared_prefix_tokens + 1)
        assert wrong([*whole[:index], other, *whole[index + 1 :]])


def test_a_lost_turn_an_invalid_reward_and_anothers_turns_are_found() -> None:
    (whole,) = session(named())
    first, _ = spans(whole)[-1]
    fewer = slice(0, first - len(asked_of(whole.prompt_id)[2].given))
    parts = {name: getattr(whole, name)[fewer] for name in ("response_token_ids", "logprobs", "loss_mask")}
    shorter = replace(whole, **parts, length_tokens=fewer.stop, events=whole.events[:-1])
    assert "turns" in wrong([shorter])
    assert wrong([replace(whole, reward_valid=False)]) and wrong([replace(whole, reward=np.nextafter(3.0, 4.0))])
    others = [name for name in NAMES if turns_of(name) == 3 and len([*stretches(name)]) == 1 and not is_empty(name)]
    assert wrong([replace(whole, prompt_id=others[-1])])
