"""The response buffer: tokens, logprobs, rewards and history of every admitted group. The core keeps only counts.

The delivered tokens and logprobs here are the truth; KV is a cache of them. ``ResponseBuffer.accept`` is the one way in
for a worker's report: it appends each span's bytes behind those that its response has.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count
from typing import Any, Final, cast

import numpy as np

from dora.config import RolloutConfig
from dora.core.rules.admission import attempt_id
from dora.data.sampling import effective
from dora.data.token_spans import Column, TokenColumns
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import FINISH_REASONS, Arrival, Prompt, Reward, RoutingShape, SamplingParams
from dora.journal import records
from dora.journal.content import LiveGroup, Requests
from dora.orchestrator.rollout.responses.accepted import Accepted, BegunSegment
from dora.orchestrator.rollout.responses.columns import ResponseColumns
from dora.orchestrator.rollout.responses.delivery import delivered
from dora.orchestrator.rollout.responses.session_paths import InputRun, runs_of
from dora.orchestrator.rollout.responses.span_checks import check_prompt_logprobs, check_spans
from dora.orchestrator.rollout.responses.state import TOKEN, ResponseState, SegmentStart, reseeded, started
from dora.orchestrator.rollout.responses.turn_order import TurnOrder

_NAMES: Final = tuple(each.name for each in fields(SamplingParams))
_AROUND_SEED: Final = (_NAMES[: _NAMES.index("seed")], _NAMES[_NAMES.index("seed") + 1 :])


class ResponseBuffer:
    """Holds response states by request and by group until their group is committed or cancelled."""

    def __init__(self, rollout: RolloutConfig, routing: RoutingShape | None = None, window_versions: int = 0) -> None:
        """Workers report routed experts of the shape ``routing``, or none if it is None. Admitted responses keep
        ``window_versions``, the size of the window in force; 0 means unknown.
        """
        self._rollout = rollout
        self.routing = routing
        self.window_versions = window_versions
        self._responses: dict[str, ResponseState] = {}
        self._by_row: dict[int, ResponseState] = {}
        self._delivered_by_row: dict[int, bytearray] = {}
        self._columns = ResponseColumns()
        self._owing: set[int] = set()  # rows whose present turn's prompt logprobs are still to come
        self._groups: dict[str, tuple[ResponseState, ...]] = {}
        self.next_number = 0
        self._delivered: dict[str, TrajectoryGroup] = {}  # leased groups, as sent

    def __getitem__(self, request_id: str) -> ResponseState:
        return self._responses[request_id]

    def get(self, request_id: str) -> ResponseState | None:
        return self._responses.get(request_id)

    @property
    def widest_window(self) -> int:
        """Returns the largest window in which a group was admitted, or 0 without groups."""
        return max((responses[0].window_versions for responses in self._groups.values()), default=0)

    def members(self, group_id: str) -> tuple[ResponseState, ...]:
        """Returns a group's responses in order of its samples, or none if there is no such group."""
        return self._groups.get(group_id, ())

    def groups(self) -> Iterator[tuple[str, tuple[ResponseState, ...]]]:
        return iter(self._groups.items())

    @property
    def default_sampling(self) -> SamplingParams:
        return sampling_of(self._rollout, Prompt("", "", ()))

    def sampling(self, prompt: Prompt) -> SamplingParams:
        return sampling_of(self._rollout, prompt)

    def admit(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """Adds an admitted group, whose request ids in ``rows`` are in order of the samples. Returns its responses."""
        responses = self._groups[group_id] = self.begin(group_id, prompt, version, rows, at)
        for response in responses:
            response.window_versions = self.window_versions
        self._number(responses, self.next_number)
        return responses

    def give(self, order: TurnOrder, at: float) -> records.Tokens:
        """Begins a turn that the core has accepted. Returns the journal's record."""
        response, buffer_begin, count = order.response, order.response.buffered_tokens, len(order.token_ids)
        tokens = np.zeros(count, TOKEN)
        tokens["token_id"] = order.token_ids
        response.delivered += tokens.tobytes()
        assert response.finish_reason is not None, "a turn follows one that has ended"
        before, stop, sampling = response.finish_reason, response.stop, dict(order.sampling)
        place = (order.after_turn, order.first_token)
        run = InputRun(
            buffer_begin, count, at, order.max_tokens, order.name, before, stop, *place, order.is_fork, sampling,
            order.prompt_logprobs,
        )  # fmt: skip
        response.inputs.append(run)
        response.finish_reason, response.stop, response.prompt_logprobs = None, "", b""
        self._note_owing(response)
        self._columns.give(response.row, run, response.first_fed(), at)
        of_turn = [0, run.max_tokens, run.name, before, stop, *(place if run.is_fork else ())]
        of_turn += [*([sampling] if sampling else ()), *([True] if run.prompt_logprobs else ())]
        return _record(response, at, buffer_begin, tokens, turns=[of_turn])

    def close(self, response: ResponseState, at: float) -> records.Tokens:
        """Ends a session with what it has. Returns the journal's record."""
        response.is_closed = True
        self._owing.discard(response.row)
        if response.finish_reason is None:
            response.finish_reason, response.finished_at = "length", at
        end = records.CLOSED | FINISH_REASONS.index(response.finish_reason)
        return _record(response, at, response.buffered_tokens, np.zeros(0, TOKEN), end)

    def substitute(self, request_id: str, replacement_id: str, at: float) -> records.Tokens:
        """Forgets a session, and adds the one in its place, in its row. Returns the journal's record."""
        before, row = self._responses[request_id], self._responses[request_id].row
        self.end((before,))
        attempt, sampling = before.attempt + 1, reseeded(before.sampling, f"~{before.attempt + 1}")
        response = ResponseState(
            row, replacement_id, before.group_id, before.prompt, before.sample_index, before.version, sampling,
            before.started_at, before.routing, window_versions=before.window_versions, number=before.number,
            attempt=attempt,
        )  # fmt: skip
        self._enter((response,), response.started_at)
        self._columns.number(row, response.number, attempt)
        if before.group_id in self._groups:  # otherwise it is of an evaluation
            group = self._groups[before.group_id]
            self._groups[before.group_id] = tuple(response if each is before else each for each in group)
        return _record(response, at, 0, np.zeros(0, TOKEN))

    def number(self, group_id: str) -> int:
        return self._groups[group_id][0].number

    def _number(self, responses: tuple[ResponseState, ...], first: int) -> None:
        for number, response in enumerate(responses, start=first):
            response.number = number
        self._columns.number([response.row for response in responses], range(first, first + len(responses)))
        self.next_number = max(self.next_number, first + len(responses))

    def restore(self, group: LiveGroup, first: int, found: Requests) -> None:
        """Adds a group from the journal. ``first`` is the index of its first request in ``found``."""
        span = slice(first, first + len(group.rows))
        attempts = found.attempts[span].tolist()
        names = [f"{group.group_id}.{index}" for index in range(len(group.rows))]
        rows = dict(zip(map(attempt_id, names, attempts), group.rows, strict=True))
        responses = self._groups[group.group_id] = self.begin(
            group.group_id, group.prompt, group.version, rows, group.at
        )
        self._number(responses, group.number)
        begins, counts, ends = (column[span].tolist() for column in (found.begins, found.counts, found.ends))
        for index, response in enumerate(responses):
            response.window_versions = group.window_versions
            response.delivered += found.tokens[begins[index] : begins[index] + counts[index]].tobytes()
            starts = found.segment_starts.get(first + index, ())
            response.segment_starts = [SegmentStart(*start) for start in starts]  # type: ignore[arg-type]
            if ends[index]:
                self._restore_end(response, first + index, found)
            if attempts[index]:
                response.attempt = attempts[index]
                response.sampling = reseeded(response.sampling, f"~{response.attempt}")
                self._columns.number(response.row, response.number, response.attempt)
        if found.routed:
            for position, response in enumerate(responses, start=first):
                response.routed += found.routed.get(position, b"")
        self._columns.extend(np.array(group.rows), found.counts[span], np.maximum(found.heard_at[span], group.at))
        if group.prompt.environment:
            for position, response in enumerate(responses, start=first):
                self._restore_turns(response, position, found)

    def _restore_end(self, response: ResponseState, position: int, found: Requests) -> None:
        end = int(found.ends[position])
        response.finish_reason, response.is_closed = FINISH_REASONS[end & ~records.CLOSED], end >= records.CLOSED
        response.finished_at = float(found.heard_at[position])
        response.stop = found.stops.get(position, "")
        if (verdict := found.verdicts.get(position)) is not None:
            response.reward = Reward(verdict.value, verdict.components, verdict.log, verdict.valid, verdict.turns)

    def _restore_turns(self, response: ResponseState, position: int, found: Requests) -> None:
        response.inputs += runs_of(found.turns.get(position, ()))
        if response.inputs and not found.ends[position]:
            response.finish_reason = None  # turn 0 has ended, and a later turn goes on
        if response.inputs:
            came = found.prompt_logprobs.get(position, {})
            response.prompt_logprobs = came.get(response.inputs[-1].buffer_end, b"")
            self._note_owing(response)
            last_s = float(self._columns.heard_at[response.row])
            self._columns.give(response.row, response.inputs[-1], response.first_fed(), last_s, len(response))

    def begin(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """Makes the response states of a group. Evaluations own theirs; they belong to no step."""
        responses = tuple(
            ResponseState(row, request_id, group_id, prompt, index, version, sampling, at, self.routing)
            for index, ((request_id, row), sampling) in enumerate(zip(rows.items(), self._seeded(prompt), strict=False))
        )
        self._enter(responses, at)
        return responses

    def _enter(self, responses: tuple[ResponseState, ...], at: float) -> None:
        first, rows = responses[0], [response.row for response in responses]
        self._responses.update([(response.request_id, response) for response in responses])
        self._by_row.update(zip(rows, responses, strict=True))
        self._delivered_by_row.update([(response.row, response.delivered) for response in responses])
        if not first.prompt.token_ids:
            for response in responses:
                response.finish_reason = "stop"  # turn 0 of a session, because turn 1 brings the prompt
        self._columns.begin(np.array(rows), first.version, first.sampling.max_tokens, len(first.prompt.token_ids), at)

    def end(self, responses: tuple[ResponseState, ...]) -> None:
        """Removes response states; no further token is accepted for them."""
        for response in responses:
            del self._responses[response.request_id]
            del self._by_row[response.row], self._delivered_by_row[response.row]
            self._owing.discard(response.row)

    def group_of(self, responses: tuple[ResponseState, ...], step: int) -> TrajectoryGroup:
        return delivered(responses, step, self._rollout.reference_version)

    def at(self, row: int) -> ResponseState:
        return self._by_row[row]

    def buffered(self, rows: Column) -> Column:
        found: Column = self._columns.buffered[rows]
        return found

    def arrives(self, request_id: str, worker_id: str, arrival: Arrival) -> ResponseState:
        """Notes that the request is on its way to this worker."""
        response = self._responses[request_id]
        response.arrivals[worker_id] = arrival
        self._columns.expect(response.row, True)
        return response

    def goes_on(self, row: int, worker_id: str) -> None:
        """Notes that a worker of an earlier incarnation continues this request. Pending arrivals are forgotten.

        Its next report begins a segment only if the response's last segment was elsewhere.
        """
        response = self._by_row[row]
        response.arrivals.clear()
        if response.segment_starts and response.segment_starts[-1].worker_id != worker_id:
            response.arrivals[worker_id] = "migrated"
        self._columns.expect(row, bool(response.arrivals) or not response.segment_starts)

    def accept(self, worker_id: str, version: int, columns: TokenColumns, at: float) -> Accepted:
        """Checks the token spans of a report and appends what is new. Tokens that a re-prefill repeats are skipped.

        ``version`` has sampled the tokens. If a span's request has another version (C1), nothing is appended and the
        result says so (``Accepted.is_mixed``). Raises ReportError, and appends nothing, if a span does not continue its
        response.
        """
        of_another_version = self._columns.version[columns.rows] != version
        if np.count_nonzero(of_another_version):
            columns = columns.only(of_another_version)
            rows = columns.rows
            buffered, numbers, skips = (
                self._columns.buffered[rows],
                self._columns.numbers[rows],
                np.zeros(len(rows), np.int64),
            )
            return Accepted(worker_id, version, at, columns, numbers, buffered, buffered, skips, is_mixed=True)
        buffered = self._columns.buffered[columns.rows]
        check_spans(columns, buffered, self._columns, self._by_row, self.routing)
        if self._owing or columns.prompt_logprobs:
            check_prompt_logprobs(columns, {row: self._by_row[row] for row in self._owing})
        return self._append(worker_id, version, columns, buffered, at)

    def _append(self, worker_id: str, version: int, columns: TokenColumns, buffered: Column, at: float) -> Accepted:
        """Appends new tokens without a loop over them. ``buffered`` has the earlier tokens of each span's response."""
        rows = columns.rows
        repeated = np.minimum(buffered - columns.first_tokens, columns.counts)
        after = buffered + columns.counts - repeated
        is_new = after > buffered
        segments: tuple[BegunSegment, ...] = ()
        if np.count_nonzero(arrives := is_new & self._columns.arrives[rows]):
            segments = self._segments_begun(worker_id, rows, arrives, at)
        if np.count_nonzero(begins_turn := is_new & self._columns.begins[rows]):
            self._begin_turns(rows[begins_turn], at)
        tokens = np.empty(len(columns.token_ids), TOKEN)
        tokens["token_id"], tokens["logprob"] = columns.token_ids, columns.logprobs
        content = tokens.tobytes()
        begins = (columns.begins + repeated) * TOKEN.itemsize
        ends = (columns.begins + columns.counts) * TOKEN.itemsize
        delivered = map(self._delivered_by_row.__getitem__, rows.tolist())
        for held_bytes, begin, end in zip(delivered, begins.tolist(), ends.tolist(), strict=True):
            held_bytes += content[begin:end]
        skips = self._routed_skips(columns, buffered)
        if self.routing is not None:
            for index, skip in enumerate(skips.tolist()):
                self._by_row[int(rows[index])].routed += columns.routed(index, skip)
        for index, raw in columns.prompt_logprobs.items():
            self._by_row[int(rows[index])].prompt_logprobs = raw
        if self._owing:
            self._owing.difference_update(rows[is_new].tolist())
        if np.count_nonzero(is_new) == len(is_new):
            self._columns.extend(rows, after, at)
        else:
            self._columns.extend(rows[is_new], after[is_new], at)
        ended = tuple([self._end_response(columns, index, at) for index in columns.ends.nonzero()[0].tolist()])
        numbers, attempts = self._columns.numbers[rows], self._columns.attempts[rows]
        shifts = self._columns.shifts[rows]
        return Accepted(
            worker_id, version, at, columns, numbers, buffered, after, skips, segments, ended, attempts, shifts
        )

    def _note_owing(self, response: ResponseState) -> None:
        if response.owes_prompt:
            self._owing.add(response.row)

    def _end_response(self, columns: TokenColumns, index: int, at: float) -> str:
        response = self._by_row[int(columns.rows[index])]
        response.finish_reason, response.finished_at = FINISH_REASONS[int(columns.ends[index])], at
        response.stop = columns.stops.get(index, "")
        if response.is_session:
            response.turn_ends = response.turn_ends or {}
            response.turn_ends[len(response.inputs)] = at
        return response.request_id

    def _segments_begun(self, worker_id: str, rows: Column, chosen: Column, at: float) -> tuple[BegunSegment, ...]:
        """Begins segments of responses with first tokens on this worker. ``chosen`` marks rows that may begin one."""
        begun: list[BegunSegment] = []
        for index in np.flatnonzero(chosen).tolist():
            row = int(rows[index])
            response = self._by_row[row]
            arrival = response.arrivals.pop(worker_id, None)
            if arrival is not None or not response.segment_starts:
                has_waited = arrival is not None and response.delivered
                left_at = float(self._columns.heard_at[row]) if has_waited else 0.0
                without_s = at - left_at if has_waited else None
                first_token = response.buffered_tokens
                admitted_s = None if response.segment_starts else at - response.started_at
                begun.append(BegunSegment(index, first_token, arrival or "new", without_s, admitted_s))
                response.segment_starts.append(SegmentStart(worker_id, first_token, arrival or "new", at, left_at))
            self._columns.expect(row, bool(response.arrivals))
        return tuple(begun)

    def _begin_turns(self, rows: Column, at: float) -> None:
        """Notes the first tokens of turns. Only sessions keep the time."""
        for row in rows.tolist():
            response = self._by_row[row]
            if response.is_session:
                response.turn_begins = response.turn_begins or {}
                response.turn_begins[len(response.inputs)] = at

    def _routed_skips(self, columns: TokenColumns, buffered: Column) -> Column:
        """Returns the bytes of each span's routed experts that belong to tokens which its response already has."""
        if self.routing is None:
            return np.zeros(len(columns), np.int64)
        begins, of_begin = self._columns.turn_begins[columns.rows], self._columns.first_fed[columns.rows] - 1
        has = (
            buffered
            - columns.first_tokens
            + np.where((columns.first_tokens == begins) & (buffered > begins), of_begin, 0)
        )
        skips: Column = np.minimum(has * self.routing.token_bytes, columns.routed_bytes)
        return skips

    def deliver(self, group_id: str, step: int) -> tuple[TrajectoryGroup, bool]:
        """Returns the finished group as the trainer gets it, and whether this is its first delivery."""
        first = group_id not in self._delivered
        if first:
            self._delivered[group_id] = self.group_of(started(self._groups[group_id]), step)
        return self._delivered[group_id], first

    def leased(self) -> list[TrajectoryGroup]:
        """Returns groups that were delivered and are not committed."""
        return list(self._delivered.values())

    def rewards(self, group_id: str) -> list[Reward] | None:
        """Returns the verdicts on a group's started members in order of its samples, or None while one is missing."""
        responses = started(self._groups[group_id])
        rewards = [response.reward for response in responses if response.reward is not None]
        return rewards if len(rewards) == len(responses) else None

    def forget(self, group_id: str) -> tuple[ResponseState, ...]:
        """Removes a committed or cancelled group. Returns its response states."""
        self._delivered.pop(group_id, None)
        responses = self._groups.pop(group_id)
        self.end(responses)
        return responses

    def _seeded(self, prompt: Prompt) -> Iterator[SamplingParams]:
        """Yields each sibling's sampling parameters: the service's defaults, the prompt's overrides, and a different
        seed.

        The seed follows from run, prompt and index; a seed in the prompt is the first sibling's.
        """
        sampling, own_seed = self.sampling(prompt), cast(int | None, prompt.sampling.get("seed"))
        before, behind = (tuple(getattr(sampling, name) for name in names) for names in _AROUND_SEED)
        origin = f"{self._rollout.seed}/{prompt.prompt_id}" if own_seed is None else f"{own_seed}"
        for index in count():
            seed = own_seed
            if seed is None or index:
                digest = hashlib.blake2b(f"{origin}/{index}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "big") >> 2
            yield SamplingParams(*before, seed, *behind)  # type: ignore[call-arg]  # replace() takes five times as long


def _record(
    response: ResponseState, at: float, first_token: int, tokens: Column, end: int = 0, turns: Sequence[list[Any]] = ()
) -> records.Tokens:
    """Returns the journal's record of one span that no worker has reported."""
    return records.Tokens(
        at,
        np.array([response.number]),
        np.array([first_token]),
        np.array([len(tokens)]),
        np.array([end] if end else [], np.uint8),
        tokens["token_id"],
        tokens["logprob"],
        turns=list(turns),
        attempts=np.array([response.attempt] if response.attempt else [], np.uint8),
    )


def sampling_of(rollout: RolloutConfig, prompt: Prompt) -> SamplingParams:
    chosen = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "max_tokens": rollout.max_tokens,
        "presence_penalty": rollout.presence_penalty,
        "frequency_penalty": rollout.frequency_penalty,
        "repetition_penalty": rollout.repetition_penalty,
        "ignore_eos": rollout.ignore_eos,
        "stop": rollout.stop,
        "stop_token_ids": rollout.stop_token_ids,
        **prompt.sampling,
    }
    return effective(SamplingParams(**chosen))  # type: ignore[arg-type]
