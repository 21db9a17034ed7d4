"""Forks of sessions: what each branch has, that no sampled token counts twice, and that the log restores all of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.config import RolloutConfig
from dora.data.token_spans import TokenSpan
from dora.data.trajectory import Trajectory
from dora.data.types import Prompt, Reward, RoutingShape
from dora.journal.content import LiveGroup
from dora.journal.durable import OPEN
from dora.journal.records import Tokens
from dora.ops.verify.invariants import violations
from dora.orchestrator.rollout.responses.branches import leaves, trajectories
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc.convert import trajectory_from_wire, trajectory_to_wire
from tests.sweeps import examples
from tests.turn_orders import order
from tests.unit.journal.contents import requests_of
from tests.unit.test_accepted import reported

S = "g0.0"
SHAPE = RoutingShape(layers=1, top_k=2, experts=2048)


@dataclass
class Told:
    """The path of a turn as a caller would write it down: its prompt, then pairs of token and who sampled it."""

    prompt: list[int]
    response: list[tuple[int, int]] = field(default_factory=list)  # token, turn that sampled it; -1: given


def row(token: int, turn: int) -> bytes:
    """The experts of a token that was fed to sample from a turn."""
    return np.array([token, 1024 + turn], "<u2").tobytes()


class Session:
    """One session in a buffer, and what its caller has noted. Its tokens have rows of experts."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = Prompt("p0", "", prompt, group_size=1, environment="tool")
        self.buffer = ResponseBuffer(RolloutConfig(), SHAPE)
        self.buffer.admit("g0", self.prompt, 0, {S: 0}, 10.0)
        self.records: list[Tokens] = []
        self.row_of: dict[int, bytes] = {}  # of each token that was fed, as it was reported first
        self.told: list[Told] = []
        self.next_token = 100
        if prompt:
            self.told.append(Told(list(prompt)))
            self.sample(2, "w0")
        else:
            self.told.append(Told([]))

    @property
    def entry(self) -> ResponseState:
        return self.buffer[S]

    def sample(self, count: int, worker: str) -> None:
        turn = len(self.told) - 1
        tokens = tuple(range(self.next_token, self.next_token + count))
        self.next_token += count
        if len(self.entry.segment_starts) == 0 or self.entry.segment_starts[-1].worker_id != worker:
            self.buffer.arrives(S, worker, "migrated" if self.entry.segment_starts else "new")
        fed = [*self.unfed(), *tokens[:-1]]
        for token in fed:
            self.row_of.setdefault(token, row(token, turn))
        first, logprobs = len(self.entry), (-1.0,) * count
        rows = [row(token, turn) for token in fed]
        one = TokenSpan(0, first, tokens[:1], logprobs[:1], None, "", b"".join(rows[: len(fed) - count + 1]))
        for span in (one, TokenSpan(0, first, tokens, logprobs, "stop", "", b"".join(rows))):  # which repeats the token
            again = self.restored_buffer()  # takes the report like the one that wrote the log
            accepted = [each.accept(worker, 0, reported(span), 11.0) for each in (self.buffer, again)]
            record = accepted[0].record()
            assert record is not None and again[S].routed == self.entry.routed
            self.records.append(record)
        self.told[-1].response += [(token, turn) for token in tokens]

    def unfed(self) -> list[int]:
        """The tokens that an engine newly feeds to sample the present turn's first one."""
        path = self.told[-1]
        if not path.response:
            return path.prompt
        given = next((n for n, (_, turn) in enumerate(reversed(path.response)) if turn >= 0), len(path.response))
        return [*path.prompt, *(token for token, _ in path.response)][-given - 1 :]

    def ask(self, count: int, fork: tuple[int, int] | None) -> None:
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        if fork is None:
            before = self.told[-1]
            path = Told(before.prompt, [*before.response, *((token, -1) for token in tokens)])
        elif fork[1] < 0:
            path = Told(tokens)
            fork = (fork[0], -count)
        else:
            before, last = self.told[fork[0]], self.told[-1]
            is_on_path = (before.prompt, before.response[: fork[1]]) == (last.prompt, last.response[: fork[1]])
            assert self.entry.is_on_path(*fork) is is_on_path
            path = Told(before.prompt, [*before.response[: fork[1]], *((token, -1) for token in tokens)])
        self.records.append(self.buffer.give(order(self.entry, tokens, 50, "tool", fork), 12.0))
        self.told.append(path)

    def check(self, entry: ResponseState) -> None:
        told = self.told[-1]
        assert (list(entry.prompt_ids()), entry.tokens.tolist()) == (told.prompt, [token for token, _ in told.response])
        assert len(entry) == len(told.response)
        is_given = np.zeros(len(entry), bool)
        for first, end in entry.input_bounds():
            assert first < end
            is_given[first:end] = True
        assert is_given.tolist() == [turn < 0 for _, turn in told.response]
        spec = entry.spec()
        assert (list(spec.prompt_token_ids), list(spec.output_token_ids)) == (told.prompt, entry.tokens.tolist())

    def restored(self) -> ResponseState:
        entry = self.restored_buffer()[S]
        assert entry.routed == self.entry.routed
        return entry

    def restored_buffer(self) -> ResponseBuffer:
        group = LiveGroup(0, "g0", self.prompt, 0, 0, 1, 10.0, (0,), 0, 0, OPEN, 0)
        buffer = ResponseBuffer(RolloutConfig(), SHAPE)
        buffer.restore(group, 0, requests_of(group, self.records))
        return buffer

    def delivered(self) -> list[Trajectory]:
        self.buffer.close(self.entry, 13.0)
        rewards = {
            turn: float(turn) for turn in range(len(self.told)) if any(t == turn for _, t in self.told[turn].response)
        }
        self.entry.reward = Reward(0.5, turns=rewards)
        self.entry.window_versions = 1
        return list(trajectories(self.entry, 0, 0, 1))


def check_branches(session: Session, found: list[Trajectory]) -> None:
    sampled = {token for path in session.told for token, turn in path.response if turn >= 0}
    counted = [token for each in found for token in each.response_token_ids[each.loss_mask == 1].tolist()]
    assert sorted(counted) == sorted(sampled), "each sampled token counts once"
    paths = [[token for token, _ in path.response] for path in session.told]
    for each in found:
        assert each.response_token_ids.tolist() in paths
        shared = each.shared_prefix_tokens
        assert not each.loss_mask[:shared].any()
    by_turn = sorted(value for each in found for value in each.turn_rewards.values())
    assert by_turn == sorted({float(turn) for path in session.told for _, turn in path.response if turn >= 0})
    for each in found:
        sampled_by = next(
            dict(enumerate(path.response))
            for path in session.told
            if [token for token, _ in path.response] == each.response_token_ids.tolist()
        )
        assert all(sampled_by[int(place)][1] == value for place, value in each.turn_rewards.items())
    assert [each.trajectory_id for each in found] == [S, *(f"{S}/{n}" for n in range(1, len(found)))]
    assert len({each.sampling.seed for each in found}) == len(found), "each branch has a seed of its own"
    assert not list(violations(found))
    for each in found:
        tokens = [*each.prompt_token_ids.tolist(), *each.response_token_ids.tolist()]
        assert each.routed_experts is not None, "as each was fed first, whatever other branches fed it again"
        assert each.routed_experts.tobytes() == b"".join(session.row_of[token] for token in tokens[:-1])


def test_a_session_without_forks_is_one_trajectory() -> None:
    session = Session((1, 2))
    session.ask(2, None)
    session.sample(3, "w1")
    (found,) = session.delivered()
    assert found.loss_mask.tolist() == [1, 1, 0, 0, 1, 1, 1] and found.trajectory_id == S
    assert [(each.worker_id, each.first_token, each.last_token) for each in found.worker_history] == [
        ("w0", 0, 3),
        ("w1", 4, 6),
    ]
    assert [each.position_token for each in found.events] == [4]


def test_a_fork_keeps_what_it_leaves() -> None:
    session = Session((1,))
    session.ask(1, None)
    session.sample(3, "w0")
    session.ask(2, (1, 4))  # in the midst of what turn 1 sampled
    session.sample(2, "w1")
    session.ask(1, (0, 2))  # a second continuation of turn 0
    session.sample(1, "w0")
    found = session.delivered()
    check_branches(session, found)
    assert [each.loss_mask.tolist() for each in found] == [
        [1, 1, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1],
    ]
    assert [each.shared_prefix_tokens for each in found] == [0, 4, 2]
    assert leaves(session.entry) == [1, 2, 3]


def test_a_session_without_a_prompt_gets_it_with_its_first_turn() -> None:
    session = Session(())
    assert session.entry.finish_reason == "stop" and not len(session.entry)
    session.ask(3, (0, -1))
    session.sample(2, "w0")
    session.check(session.restored())
    (found,) = session.delivered()
    assert found.prompt_token_ids.tolist() == [100, 101, 102] and found.loss_mask.tolist() == [1, 1]
    assert found.events[0].position_token == 0, "its prompt came from its environment"


@st.composite
def histories(draw: st.DrawFn) -> tuple[bool, list[tuple[int, tuple[str, int, float], int, str]]]:
    turns = draw(
        st.lists(
            st.tuples(
                st.integers(1, 3),
                st.tuples(st.sampled_from(["on", "on", "back", "prompt"]), st.integers(0, 9), st.floats(0, 1)),
                st.integers(1, 3),
                st.sampled_from(["w0", "w1"]),
            ),
            max_size=7,
        )
    )
    return draw(st.booleans()), turns


@settings(deadline=None, max_examples=examples(60))
@given(histories())
def test_any_tree_of_turns_is_what_its_caller_noted(history: Any) -> None:
    has_prompt, turns = history
    session = Session((1, 2) if has_prompt else ())
    for given_tokens, (kind, turn, share), sampled, worker in turns:
        last = len(session.told) - 1
        needs_prompt = not has_prompt and last == 0
        place: tuple[int, int] | None = None
        if kind == "prompt" or needs_prompt:
            place = (last, -1)
        elif kind == "back":
            after = turn % (last + 1)
            if not has_prompt:
                after = max(1, after)
            length = len(session.told[after].response)
            place = (after, round(share * length))
            place = None if place == (last, length) else place
        session.ask(given_tokens, place)
        session.check(session.entry)
        session.sample(sampled, worker)
        session.check(session.entry)
        session.check(session.restored())
    if len(session.told) > 1 or has_prompt:
        check_branches(session, session.delivered())


def test_given_tokens_that_were_never_fed_have_no_rows() -> None:
    """The session is broken off before its last turn has sampled anything."""
    session = Session((1, 2))
    session.ask(2, None)
    session.sample(1, "w0")
    session.ask(3, None)
    (found,) = session.delivered()
    assert found.length_tokens == 8 and found.routed_tokens == 2 + 8 - 1
    fed = [1, 2, *found.response_token_ids[:4].tolist()]
    for each in (
        found,
        Trajectory.from_json_dict(found.to_json_dict()),
        trajectory_from_wire(trajectory_to_wire(found)),
    ):
        assert each.routed_experts is not None
        assert each.routed_experts.tobytes() == b"".join(map(session.row_of.__getitem__, fed))
    assert not list(violations([found]))


def test_records_in_any_order_restore_the_branches() -> None:
    session = Session((1,))
    session.ask(1, None)
    session.sample(3, "w0")
    session.ask(2, (0, 1))
    session.sample(2, "w1")
    session.records = [*reversed(session.records), *session.records]
    session.check(session.restored())
