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
from dora.journal.content import Requests
from dora.journal.ledger import LiveGroup
from dora.orchestrator.rollout.responses.accepted import Accepted, BegunSegment
from dora.orchestrator.rollout.responses.columns import ResponseColumns
from dora.orchestrator.rollout.responses.delivery import delivered
from dora.orchestrator.rollout.responses.session_paths import GivenRun, runs_of
from dora.orchestrator.rollout.responses.span_checks import check_prompt_logprobs, check_spans
from dora.orchestrator.rollout.responses.state import TOKEN, ResponseState, SegmentStart, reseeded, started
from dora.orchestrator.rollout.responses.turn_order import TurnOrder

_NAMES: Final = tuple(each.name for each in fields(SamplingParams))
_AROUND_SEED: Final = (_NAMES[: _NAMES.index("seed")], _NAMES[_NAMES.index("seed") + 1 :])


class ResponseBuffer:
    """Response states by request and by group; removed once their group is committed or cancelled."""

    def __init__(self, rollout: RolloutConfig, routing: RoutingShape | None = None, window_versions: int = 0) -> None:
        """``routing``: the shape of routed experts that workers report and responses keep; None: none.
        ``window_versions``: the size of the window in force, which each admitted response keeps; 0: unknown.
        """
        self._rollout = rollout
        self.routing = routing
        self.window_versions = window_versions
        self._entries: dict[str, ResponseState] = {}
        self._by_row: dict[int, ResponseState] = {}
        self._delivered_by_row: dict[int, bytearray] = {}
        self._columns = ResponseColumns()
        self._owing: set[int] = set()  # rows whose present turn's prompt logprobs are still to come
        self._groups: dict[str, tuple[ResponseState, ...]] = {}
        self.next_number = 0
        self._delivered: dict[str, TrajectoryGroup] = {}  # leased groups, as sent

    def __getitem__(self, request_id: str) -> ResponseState:
        return self._entries[request_id]

    def get(self, request_id: str) -> ResponseState | None:
        return self._entries.get(request_id)

    @property
    def widest_window(self) -> int:
        """The largest window in which a group was admitted; 0 without groups."""
        return max((entries[0].window_versions for entries in self._groups.values()), default=0)

    def members(self, group_id: str) -> tuple[ResponseState, ...]:
        """The responses of a group, in order of its samples; empty if there is no such group."""
        return self._groups.get(group_id, ())

    def groups(self) -> Iterator[tuple[str, tuple[ResponseState, ...]]]:
        return iter(self._groups.items())

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters of prompts without any of their own."""
        return sampling_of(self._rollout, Prompt("", "", ()))

    def sampling(self, prompt: Prompt) -> SamplingParams:
        """The sampling parameters of this prompt's responses, without their seeds."""
        return sampling_of(self._rollout, prompt)

    def admit(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """Adds an admitted group. ``rows``: by request id, in order of the samples. Returns its response states."""
        entries = self._groups[group_id] = self.begin(group_id, prompt, version, rows, at)
        for entry in entries:
            entry.window_versions = self.window_versions
        self._number(entries, self.next_number)
        return entries

    def give(self, order: TurnOrder, at: float) -> records.Tokens:
        """Begins a turn that the core has accepted. Returns the journal's record."""
        entry, held_at, count = order.entry, order.entry.held_tokens, len(order.token_ids)
        tokens = np.zeros(count, TOKEN)
        tokens["token_id"] = order.token_ids
        entry.delivered += tokens.tobytes()
        assert entry.finish_reason is not None, "a turn follows one that has ended"
        before, stop, sampling = entry.finish_reason, entry.stop, dict(order.sampling)
        place = (order.after_turn, order.first_token)
        run = GivenRun(
            held_at, count, at, order.max_tokens, order.name, before, stop, *place, order.is_fork, sampling,
            order.prompt_logprobs,
        )  # fmt: skip
        entry.given.append(run)
        entry.finish_reason, entry.stop, entry.prompt_logprobs = None, "", b""
        self._note_owing(entry)
        self._columns.give(entry.row, run, entry.first_fed(), at)
        of_turn = [0, run.max_tokens, run.name, before, stop, *(place if run.is_fork else ())]
        of_turn += [*([sampling] if sampling else ()), *([True] if run.prompt_logprobs else ())]
        return _record(entry, at, held_at, tokens, turns=[of_turn])

    def close(self, entry: ResponseState, at: float) -> records.Tokens:
        """Ends a session with what it has. Returns the journal's record."""
        entry.is_closed = True
        self._owing.discard(entry.row)
        if entry.finish_reason is None:
            entry.finish_reason, entry.finished_at = "length", at
        end = records.CLOSED | FINISH_REASONS.index(entry.finish_reason)
        return _record(entry, at, entry.held_tokens, np.zeros(0, TOKEN), end)

    def substitute(self, request_id: str, replacement_id: str, at: float) -> records.Tokens:
        """Forgets a session, and adds the one in its place, in its row. Returns the journal's record."""
        before, row = self._entries[request_id], self._entries[request_id].row
        self.end((before,))
        attempt, sampling = before.attempt + 1, reseeded(before.sampling, f"~{before.attempt + 1}")
        entry = ResponseState(
            row, replacement_id, before.group_id, before.prompt, before.sample_index, before.version, sampling,
            before.started_at, before.routing, window_versions=before.window_versions, number=before.number,
            attempt=attempt,
        )  # fmt: skip
        self._enter((entry,), entry.started_at)
        self._columns.number(row, entry.number, attempt)
        if before.group_id in self._groups:  # otherwise it is of an evaluation
            group = self._groups[before.group_id]
            self._groups[before.group_id] = tuple(entry if each is before else each for each in group)
        return _record(entry, at, 0, np.zeros(0, TOKEN))

    def number(self, group_id: str) -> int:
        """The first number of a group in the journal."""
        return self._groups[group_id][0].number

    def _number(self, entries: tuple[ResponseState, ...], first: int) -> None:
        for number, entry in enumerate(entries, start=first):
            entry.number = number
            self._columns.number(entry.row, number)
        self.next_number = max(self.next_number, first + len(entries))

    def restore(self, group: LiveGroup, first: int, found: Requests) -> None:
        """Adds a group from the journal; ``first``: the index of its first request in ``found``."""
        attempts = found.attempts[first : first + len(group.rows)].tolist()
        names = [f"{group.group_id}.{index}" for index in range(len(group.rows))]
        rows = dict(zip(map(attempt_id, names, attempts), group.rows, strict=True))
        entries = self._groups[group.group_id] = self.begin(group.group_id, group.prompt, group.version, rows, group.at)
        self._number(entries, group.number)
        for position, entry in enumerate(entries, start=first):
            if attempts[position - first]:
                entry.attempt = attempts[position - first]
                entry.sampling = reseeded(entry.sampling, f"~{entry.attempt}")
                self._columns.number(entry.row, entry.number, entry.attempt)
            entry.window_versions = group.window_versions
            begin, count = int(found.begins[position]), int(found.counts[position])
            entry.delivered += found.tokens[begin : begin + count].tobytes()
            entry.routed += found.routed.get(position, b"")
            starts = found.segment_starts.get(position, ())
            entry.segment_starts += [SegmentStart(*start) for start in starts]  # type: ignore[arg-type]
            end = int(found.ends[position])
            entry.finish_reason, entry.is_closed = FINISH_REASONS[end & ~records.CLOSED], end >= records.CLOSED
            entry.given += runs_of(found.turns.get(position, ()))
            entry.begin_idle()
            entry.finished_at = float(found.heard_at[position]) if entry.finish_reason is not None else 0.0
            entry.stop = found.stops.get(position, "")
            verdict = found.verdicts.get(position)
            if verdict is not None:
                entry.reward = Reward(verdict.value, verdict.components, verdict.log, verdict.valid, verdict.turns)
        span = slice(first, first + len(entries))
        heard_at = np.maximum(found.heard_at[span], group.at)
        self._columns.extend(np.array(group.rows), found.counts[span], heard_at)
        for position, entry in enumerate(entries, start=first):
            if entry.given:
                came = found.prompt_logprobs.get(position, {})
                entry.prompt_logprobs = came.get(entry.given[-1].held_end, b"")
                self._note_owing(entry)
                last_s = float(self._columns.heard_at[entry.row])
                self._columns.give(entry.row, entry.given[-1], entry.first_fed(), last_s, len(entry))

    def begin(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """Makes the response states of a group. Evaluations own theirs; they belong to no step."""
        entries = tuple(
            ResponseState(row, request_id, group_id, prompt, index, version, sampling, at, self.routing)
            for index, ((request_id, row), sampling) in enumerate(zip(rows.items(), self._seeded(prompt), strict=False))
        )
        self._enter(entries, at)
        return entries

    def _enter(self, entries: tuple[ResponseState, ...], at: float) -> None:
        """Adds responses to one prompt, without tokens."""
        self._entries.update((entry.request_id, entry) for entry in entries)
        for entry in entries:
            self._by_row[entry.row], self._delivered_by_row[entry.row] = entry, entry.delivered
            entry.begin_idle()
        first, rows = entries[0], np.array([entry.row for entry in entries])
        self._columns.begin(rows, first.version, first.sampling.max_tokens, len(first.prompt.token_ids), at)

    def end(self, entries: tuple[ResponseState, ...]) -> None:
        """Removes response states; no further token is accepted for them."""
        for entry in entries:
            del self._entries[entry.request_id]
            del self._by_row[entry.row], self._delivered_by_row[entry.row]
            self._owing.discard(entry.row)

    def group_of(self, entries: tuple[ResponseState, ...], step: int) -> TrajectoryGroup:
        """Joins the finished responses of a group."""
        return delivered(entries, step, self._rollout.reference_version)

    def at(self, row: int) -> ResponseState:
        """The response in a row of the core."""
        return self._by_row[row]

    def held(self, rows: Column) -> Column:
        """The number of tokens of each row's response."""
        found: Column = self._columns.held[rows]
        return found

    def arrives(self, request_id: str, worker_id: str, arrival: Arrival) -> ResponseState:
        """Notes that the request is on its way to this worker."""
        entry = self._entries[request_id]
        entry.arrivals[worker_id] = arrival
        self._columns.expect(entry.row, True)
        return entry

    def goes_on(self, row: int, worker_id: str) -> None:
        """Notes that a worker of an earlier incarnation continues this request. Pending arrivals are forgotten.

        Its next report begins a segment only if the response's last segment was elsewhere.
        """
        entry = self._by_row[row]
        entry.arrivals.clear()
        if entry.segment_starts and entry.segment_starts[-1].worker_id != worker_id:
            entry.arrivals[worker_id] = "migrated"
        self._columns.expect(row, bool(entry.arrivals) or not entry.segment_starts)

    def accept(self, worker_id: str, version: int, columns: TokenColumns, at: float) -> Accepted:
        """Checks the token spans of a report and appends what is new. Tokens that a re-prefill repeats are skipped.

        ``columns``: of live requests that the worker owns. ``version``: the weights that sampled the tokens; if a span
        is of a request of another version (C1), nothing is appended (``Accepted.is_mixed``).
        Raises ReportError if a span does not continue its response; nothing is appended.
        """
        of_another_version = self._columns.version[columns.rows] != version
        if of_another_version.any():
            columns = columns.only(of_another_version)
            rows = columns.rows
            held, numbers, skips = self._columns.held[rows], self._columns.numbers[rows], np.zeros(len(rows), np.int64)
            return Accepted(worker_id, version, at, columns, numbers, held, held, skips, is_mixed=True)
        held = self._columns.held[columns.rows]
        check_spans(columns, held, self._columns, self._by_row, self.routing)
        if self._owing or columns.prompt_logprobs:
            check_prompt_logprobs(columns, {row: self._by_row[row] for row in self._owing})
        return self._append(worker_id, version, columns, held, at)

    def _append(self, worker_id: str, version: int, columns: TokenColumns, held: Column, at: float) -> Accepted:
        """``held``: tokens of each span's response before. Nothing here is done token by token."""
        rows = columns.rows
        repeated = np.minimum(held - columns.first_tokens, columns.counts)
        after = held + columns.counts - repeated
        is_new = after > held
        segments = self._segments_begun(worker_id, rows, is_new & self._columns.arrives[rows], at)
        self._begin_turns(rows[is_new & self._columns.begins[rows]], at)
        tokens = np.empty(len(columns.token_ids), TOKEN)
        tokens["token_id"], tokens["logprob"] = columns.token_ids, columns.logprobs
        content = tokens.tobytes()
        begins = (columns.begins + repeated) * TOKEN.itemsize
        ends = (columns.begins + columns.counts) * TOKEN.itemsize
        delivered = map(self._delivered_by_row.__getitem__, rows.tolist())
        for held_bytes, begin, end in zip(delivered, begins.tolist(), ends.tolist(), strict=True):
            held_bytes += content[begin:end]
        skips = self._routed_skips(columns, held)
        if self.routing is not None:
            for index, skip in enumerate(skips.tolist()):
                self._by_row[int(rows[index])].routed += columns.routed(index, skip)
        for index, raw in columns.prompt_logprobs.items():
            self._by_row[int(rows[index])].prompt_logprobs = raw
        if self._owing:
            self._owing.difference_update(rows[is_new].tolist())
        self._columns.extend(rows[is_new], after[is_new], at)
        ended = tuple(self._end_response(columns, index, at) for index in np.flatnonzero(columns.ends).tolist())
        numbers, attempts = self._columns.numbers[rows], self._columns.attempts[rows]
        shifts = self._columns.shifts[rows]
        return Accepted(worker_id, version, at, columns, numbers, held, after, skips, segments, ended, attempts, shifts)

    def _note_owing(self, entry: ResponseState) -> None:
        if entry.owes_prompt:
            self._owing.add(entry.row)

    def _end_response(self, columns: TokenColumns, index: int, at: float) -> str:
        """Enters the end that the span at ``index`` reports. Returns the request's id."""
        entry = self._by_row[int(columns.rows[index])]
        entry.finish_reason, entry.finished_at = FINISH_REASONS[int(columns.ends[index])], at
        entry.stop = columns.stops.get(index, "")
        if entry.is_session:
            entry.turn_ends = entry.turn_ends or {}
            entry.turn_ends[len(entry.given)] = at
        return entry.request_id

    def _segments_begun(self, worker_id: str, rows: Column, chosen: Column, at: float) -> tuple[BegunSegment, ...]:
        """Begins the segments of the responses that have their first tokens on this worker. ``chosen``: bool, those
        of ``rows`` that have new tokens and may begin a segment."""
        begun: list[BegunSegment] = []
        for index in np.flatnonzero(chosen).tolist():
            row = int(rows[index])
            entry = self._by_row[row]
            arrival = entry.arrivals.pop(worker_id, None)
            if arrival is not None or not entry.segment_starts:
                has_waited = arrival is not None and entry.delivered
                left_at = float(self._columns.heard_at[row]) if has_waited else 0.0
                without_s = at - left_at if has_waited else None
                first_token = entry.held_tokens
                admitted_s = None if entry.segment_starts else at - entry.started_at
                begun.append(BegunSegment(index, first_token, arrival or "new", without_s, admitted_s))
                entry.segment_starts.append(SegmentStart(worker_id, first_token, arrival or "new", at, left_at))
            self._columns.expect(row, bool(entry.arrivals))
        return tuple(begun)

    def _begin_turns(self, rows: Column, at: float) -> None:
        """Notes the first tokens of turns. ``rows``: of responses that begin one; only sessions keep the time."""
        for row in rows.tolist():
            entry = self._by_row[row]
            if entry.is_session:
                entry.turn_begins = entry.turn_begins or {}
                entry.turn_begins[len(entry.given)] = at

    def _routed_skips(self, columns: TokenColumns, held: Column) -> Column:
        """Returns the bytes of each span's routed experts that belong to tokens which its response already has."""
        if self.routing is None:
            return np.zeros(len(columns), np.int64)
        begins, of_begin = self._columns.turn_begins[columns.rows], self._columns.first_fed[columns.rows] - 1
        has = held - columns.first_tokens + np.where((columns.first_tokens == begins) & (held > begins), of_begin, 0)
        skips: Column = np.minimum(has * self.routing.token_bytes, columns.routed_bytes)
        return skips

    def deliver(self, group_id: str, step: int) -> tuple[TrajectoryGroup, bool]:
        """The finished group as the trainer gets it; True on its first delivery."""
        first = group_id not in self._delivered
        if first:
            self._delivered[group_id] = self.group_of(started(self._groups[group_id]), step)
        return self._delivered[group_id], first

    def leased(self) -> list[TrajectoryGroup]:
        """Groups that were delivered and are not committed."""
        return list(self._delivered.values())

    def rewards(self, group_id: str) -> list[Reward] | None:
        """The verdicts on a group's members that have started, in order of its samples; None while one is missing."""
        entries = started(self._groups[group_id])
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        return rewards if len(rewards) == len(entries) else None

    def forget(self, group_id: str) -> tuple[ResponseState, ...]:
        """Removes a committed or cancelled group. Returns its response states."""
        self._delivered.pop(group_id, None)
        entries = self._groups.pop(group_id)
        self.end(entries)
        return entries

    def _seeded(self, prompt: Prompt) -> Iterator[SamplingParams]:
        """Yields each sibling's sampling parameters: the service's defaults, the prompt's overrides, and a seed of its
        own. Siblings with one seed would be equal.

        The seed follows from run, prompt and index; a seed in the prompt is the first sibling's.
        """
        sampling, given = self.sampling(prompt), cast(int | None, prompt.sampling.get("seed"))
        before, behind = (tuple(getattr(sampling, name) for name in names) for names in _AROUND_SEED)
        origin = f"{self._rollout.seed}/{prompt.prompt_id}" if given is None else f"{given}"
        for index in count():
            seed = given
            if seed is None or index:
                digest = hashlib.blake2b(f"{origin}/{index}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "big") >> 2
            yield SamplingParams(*before, seed, *behind)  # type: ignore[call-arg]  # replace() takes five times as long


def _record(
    entry: ResponseState, at: float, first_token: int, tokens: Column, end: int = 0, turns: Sequence[list[Any]] = ()
) -> records.Tokens:
    """The journal's record of one span that no worker has reported. ``tokens``: TOKENs."""
    return records.Tokens(
        at,
        np.array([entry.number]),
        np.array([first_token]),
        np.array([len(tokens)]),
        np.array([end] if end else [], np.uint8),
        tokens["token_id"],
        tokens["logprob"],
        turns=list(turns),
        attempts=np.array([entry.attempt] if entry.attempt else [], np.uint8),
    )


def sampling_of(rollout: RolloutConfig, prompt: Prompt) -> SamplingParams:
    """The sampling parameters of this prompt's responses, without their seeds."""
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
