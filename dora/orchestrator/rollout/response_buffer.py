"""The trajectory book: tokens, logprobs, rewards and history of every admitted group. The core counts, the book holds.

The delivered tokens and logprobs here are the truth; KV is a cache of them. A report is appended as it came: of each of
its stretches the bytes go behind those that are held, whatever that is. The journal writes what is written here.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import count
from typing import Final, cast

import numpy as np

from dora.config import RolloutConfig
from dora.data.sampling import effective
from dora.data.token_spans import Column, TokenColumns
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import FINISH_REASONS, Arrival, Prompt, Reward, RoutingShape, SamplingParams
from dora.journal.content import Requests
from dora.journal.ledger import LiveGroup
from dora.orchestrator.rollout.delivery import delivered
from dora.orchestrator.rollout.response_state import TOKEN, ResponseState, SegmentStart

COLUMNS: Final[Mapping[str, type[np.generic]]] = {  # of requests, by row
    "held": np.int64,  # tokens
    "version": np.int64,
    "max_tokens": np.int64,
    "prompt_tokens": np.int64,
    "heard_at": np.float64,  # when its last tokens came
    "arrives": np.bool_,  # its next tokens may be the first ones at a worker
    "number": np.int64,  # in the journal; -1: of an evaluation
}
_NAMES: Final = tuple(each.name for each in fields(SamplingParams))
_AROUND_SEED: Final = (_NAMES[: _NAMES.index("seed")], _NAMES[_NAMES.index("seed") + 1 :])


class ResponseBuffer:
    """Entries by request and by group; forgotten once their group is committed or cancelled."""

    def __init__(self, rollout: RolloutConfig, routing: RoutingShape | None = None, window_versions: int = 0) -> None:
        """``routing``: what workers report of it, and responses keep; None: nothing. ``window_versions``: of the window
        in force, which each response is told when it is admitted; 0: not known."""
        self._rollout = rollout
        self.routing = routing
        self.window_versions = window_versions
        self._entries: dict[str, ResponseState] = {}
        self._by_row: dict[int, ResponseState] = {}
        self._delivered_by_row: dict[int, bytearray] = {}
        self._columns: dict[str, Column] = {name: np.zeros(1024, dtype) for name, dtype in COLUMNS.items()}
        self._groups: dict[str, tuple[ResponseState, ...]] = {}
        self.tokens = 0  # taken over since the start
        self.segments_begun: dict[int, SegmentStart] = {}  # with the last report, by rows
        self.next_number = 0
        self._delivered: dict[str, TrajectoryGroup] = {}  # leased groups, as they were sent

    def __getitem__(self, request_id: str) -> ResponseState:
        return self._entries[request_id]

    def get(self, request_id: str) -> ResponseState | None:
        return self._entries.get(request_id)

    def groups(self) -> Iterator[tuple[str, tuple[ResponseState, ...]]]:
        return iter(self._groups.items())

    def sampling(self, prompt: Prompt) -> SamplingParams:
        """How this prompt's responses are sampled, but for their seeds."""
        return sampling_of(self._rollout, prompt)

    def admit(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """``rows``: of the group's requests, by their ids, in order of their samples. Returns its entries."""
        entries = self._groups[group_id] = self.begin(group_id, prompt, version, rows, at)
        for entry in entries:
            entry.window_versions = self.window_versions
        self._number(entries, self.next_number)
        return entries

    def number(self, group_id: str) -> int:
        """Of a group, in the journal."""
        return self._groups[group_id][0].number

    def _number(self, entries: tuple[ResponseState, ...], first: int) -> None:
        """From ``first`` on."""
        for number, entry in enumerate(entries, start=first):
            entry.number = number
            self._columns["number"][entry.row] = number
        self.next_number = max(self.next_number, first + len(entries))

    def restore(self, group: LiveGroup, first: int, found: Requests) -> None:
        """A group as the journal has kept it; ``first``: the place of its first request in ``found``."""
        rows = {f"{group.group_id}.{index}": row for index, row in enumerate(group.rows)}
        entries = self._groups[group.group_id] = self.begin(group.group_id, group.prompt, group.version, rows, group.at)
        self._number(entries, group.number)
        for position, entry in enumerate(entries, start=first):
            entry.window_versions = group.window_versions
            begin, count = int(found.begins[position]), int(found.counts[position])
            entry.delivered += found.tokens[begin : begin + count].tobytes()
            entry.routed += found.routed.get(position, b"")
            starts = found.segment_starts.get(position, ())
            entry.segment_starts += [SegmentStart(*start) for start in starts]  # type: ignore[arg-type]
            entry.finish_reason = FINISH_REASONS[int(found.ends[position])]
            entry.finished_at = float(found.heard_at[position]) if entry.finish_reason is not None else 0.0
            entry.stop = found.stops.get(position, "")
            verdict = found.verdicts.get(position)
            if verdict is not None:
                entry.reward = Reward(verdict.value, verdict.components, verdict.log, verdict.valid)
        positions = np.array(group.rows)
        span = slice(first, first + len(entries))
        self._columns["held"][positions] = found.counts[span]
        self._columns["heard_at"][positions] = np.maximum(found.heard_at[span], group.at)

    def begin(
        self, group_id: str, prompt: Prompt, version: int, rows: Mapping[str, int], at: float
    ) -> tuple[ResponseState, ...]:
        """Makes the entries of a group that is whose they are given to: of an evaluation, not of a step."""
        entries = tuple(
            ResponseState(row, request_id, group_id, prompt, index, version, sampling, at, self.routing)
            for index, ((request_id, row), sampling) in enumerate(zip(rows.items(), self._seeded(prompt), strict=False))
        )
        self._entries.update((entry.request_id, entry) for entry in entries)
        self._reach(max(rows.values()) + 1)
        for entry in entries:
            self._by_row[entry.row], self._delivered_by_row[entry.row] = entry, entry.delivered
        values = (0, version, entries[0].sampling.max_tokens, len(prompt.token_ids), at, True, -1)
        positions = np.array([entry.row for entry in entries])
        for name, value in zip(COLUMNS, values, strict=True):
            self._columns[name][positions] = value
        return entries

    def end(self, entries: tuple[ResponseState, ...]) -> None:
        """Nothing more comes of them."""
        for entry in entries:
            del self._entries[entry.request_id]
            del self._by_row[entry.row], self._delivered_by_row[entry.row]

    def group_of(self, entries: tuple[ResponseState, ...], step: int) -> TrajectoryGroup:
        """The finished responses of a group, as one."""
        return delivered(entries, step, self._rollout.reference_version)

    def at(self, row: int) -> ResponseState:
        """The request that the core names so."""
        return self._by_row[row]

    def column(self, name: str, rows: Column) -> Column:
        """Of the requests in these rows. ``name``: of COLUMNS."""
        found: Column = self._columns[name][rows]
        return found

    def arrives(self, request_id: str, worker_id: str, arrival: Arrival) -> ResponseState:
        """The request is on its way to this worker."""
        entry = self._entries[request_id]
        entry.arrivals[worker_id] = arrival
        self._columns["arrives"][entry.row] = True
        return entry

    def goes_on(self, row: int, worker_id: str) -> None:
        """A worker that has outlived the service goes on with this request, whatever has become of its ways there.

        What it reports next begins a stay only where it is not known to be at this worker already.
        """
        entry = self._by_row[row]
        entry.arrivals.clear()
        if entry.segment_starts and entry.segment_starts[-1].worker_id != worker_id:
            entry.arrivals[worker_id] = "migrated"
        self._columns["arrives"][row] = bool(entry.arrivals) or not entry.segment_starts

    def append(self, worker_id: str, columns: TokenColumns, at: float) -> list[tuple[Arrival, float]]:
        """Takes the stretches of a report over, which were checked before.

        Tokens already held (repeated after a re-prefill) are skipped. Returns, of the requests that have had tokens
        before and whose first ones at this worker these are, how they came there, and how long they were without.
        """
        rows, held_column = columns.rows, self._columns["held"]
        held, reached = held_column[rows], columns.first_tokens + columns.counts
        new = reached > held
        arrived = self._arrived(worker_id, rows[new & self._columns["arrives"][rows]], at)
        tokens = np.empty(len(columns.token_ids), TOKEN)
        tokens["token_id"], tokens["logprob"] = columns.token_ids, columns.logprobs
        content = tokens.tobytes()
        begins = (columns.begins + (held - columns.first_tokens)) * TOKEN.itemsize
        ends = (columns.begins + columns.counts) * TOKEN.itemsize
        positions = map(self._delivered_by_row.__getitem__, rows.tolist())
        for held_bytes, begin, end in zip(positions, begins.tolist(), ends.tolist(), strict=True):
            held_bytes += content[begin:end]
        if self.routing is not None:
            for index, before in enumerate(held.tolist()):
                entry = self._by_row[int(rows[index])]
                entry.routed += columns.routed(index, entry.routed_bytes(int(columns.first_tokens[index]), before))
        held_column[rows] = np.maximum(held, reached)
        self._columns["heard_at"][rows[new]] = at
        self.tokens += int((reached - held)[new].sum())
        for index in np.flatnonzero(columns.ends).tolist():
            entry = self._by_row[int(rows[index])]
            entry.finish_reason, entry.finished_at = FINISH_REASONS[int(columns.ends[index])], at
            entry.stop = columns.stops.get(index, "")
        return arrived

    def _arrived(self, worker_id: str, rows: Column, at: float) -> list[tuple[Arrival, float]]:
        """Of the requests in these rows, which have new tokens from this worker, those that have just come there."""
        arrived: list[tuple[Arrival, float]] = []
        for row in rows.tolist():
            entry = self._by_row[row]
            arrival = entry.arrivals.pop(worker_id, None)
            if arrival is not None and entry.delivered:
                arrived.append((arrival, at - float(self._columns["heard_at"][row])))
            if arrival is not None or not entry.segment_starts:
                segment_start = self.segments_begun[row] = SegmentStart(worker_id, len(entry), arrival or "new")
                entry.segment_starts.append(segment_start)
            self._columns["arrives"][row] = bool(entry.arrivals)
        return arrived

    def _reach(self, rows: int) -> None:
        """Columns for so many rows."""
        lacking = rows - len(self._columns["held"])
        if lacking > 0:
            more = np.zeros(max(lacking, rows), np.int64)
            self._columns = {
                name: np.concatenate([column, more.astype(column.dtype)]) for name, column in self._columns.items()
            }

    def deliver(self, group_id: str, step: int) -> tuple[TrajectoryGroup, bool]:
        """The finished group as the trainer gets it; True where this is its first delivery."""
        first = group_id not in self._delivered
        if first:
            self._delivered[group_id] = self.group_of(self._groups[group_id], step)
        return self._delivered[group_id], first

    def leased(self) -> list[TrajectoryGroup]:
        """What was delivered and not committed."""
        return list(self._delivered.values())

    def rewards(self, group_id: str) -> list[Reward] | None:
        """The verdicts on a group, in order of its samples; None while one is due."""
        entries = self._groups[group_id]
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        return rewards if len(rewards) == len(entries) else None

    def forget(self, group_id: str) -> tuple[ResponseState, ...]:
        """Lets a committed or cancelled group go. Returns its entries."""
        self._delivered.pop(group_id, None)
        entries = self._groups.pop(group_id)
        self.end(entries)
        return entries

    def _seeded(self, prompt: Prompt) -> Iterator[SamplingParams]:
        """The service's defaults, the prompt's overrides, and of each sibling a seed of its own: siblings of one seed
        would be equal.

        It follows from run, prompt and index; where the prompt names one, that is the first sibling's.
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


def sampling_of(rollout: RolloutConfig, prompt: Prompt) -> SamplingParams:
    """How this prompt's responses are sampled, but for their seeds."""
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
