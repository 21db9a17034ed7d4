"""The audit of the chaos run's chats: a turn that was lost or sampled twice is found."""

from dataclasses import replace

import pytest

from dora.data.trajectory import Trajectory
from dora.data.types import INPUT, EnvironmentEvent
from tests.chaos.chats import counted, digest, is_chat, wrong
from tests.contract.trainer_service import make_branch
from tests.session_script import turns_of

NAME = next(name for name in (f"chat{number}" for number in range(99)) if turns_of(name) == 3)
GIVEN_TOKENS, SAMPLED = [9, 10], [20, 21, 22]


def branch(index: int, prompt: list[int], turns: int, log: str = "") -> Trajectory:
    """So many turns after a prompt."""
    tokens, mask = [*SAMPLED], [1] * len(SAMPLED)
    for _ in range(turns - 1):
        tokens += GIVEN_TOKENS + SAMPLED
        mask += [0] * len(GIVEN_TOKENS) + [1] * len(SAMPLED)
    events = (EnvironmentEvent(0, INPUT, "agent", "", 1.0),)
    return make_branch(index, prompt, tokens, mask, prompt_id=NAME, events=events, reward=3.0, verifier_log=log)


def seen(*turns: tuple[list[int], int]) -> str:
    """The digest of a client's turns: each by its prompt, and its number within the branch, from 1 on."""
    return digest([[*prompt, *SAMPLED, *(GIVEN_TOKENS + SAMPLED) * (number - 1)] for prompt, number in turns])


def test_a_chat_is_right_whichever_branches_it_has() -> None:
    assert is_chat(NAME) and not is_chat("p1")
    whole = branch(0, [5], 3, seen(([5], 1), ([5], 2), ([5], 3)))
    assert wrong([whole]) == "" and counted([[whole]]) == {"chats": 1, "chat_turns_lost": 0, "chat_turns_twice": 0}
    given_anew = [branch(0, [5], 2), branch(1, [5, 20, 9, 20], 1)]
    log = seen(([5], 1), ([5], 2), ([5, 20, 9, 20], 1))
    assert wrong([replace(each, verifier_log=log) for each in given_anew]) == ""


@pytest.mark.parametrize(("turns", "lost", "twice"), [(2, 1, 0), (4, 0, 1)])
def test_a_turn_that_is_lost_or_came_twice_is_counted(turns: int, lost: int, twice: int) -> None:
    chat = [branch(0, [5], turns, seen(([5], 1), ([5], 2), ([5], 3)))]
    assert "turns" in wrong(chat)
    assert counted([chat]) == {"chats": 1, "chat_turns_lost": lost, "chat_turns_twice": twice}


def test_tokens_that_the_client_has_not_seen_are_found() -> None:
    whole = branch(0, [5], 3, seen(([6], 1), ([6], 2), ([6], 3)))
    assert wrong([whole]) and wrong([replace(whole, reward=2.0)])
