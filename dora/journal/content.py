"""The live content of the log: prompts, tokens and verdicts of what a durable state names as live.

Its *owners* are requests by number and, below 0, queued prompts by arrival. No work is done per token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dora.data.growth import members_started
from dora.data.types import Prompt
from dora.journal import records
from dora.journal.durable import OPEN, Durable
from dora.journal.records import Column, LogRecord, Tokens, Verdict

TOKEN: Final = np.dtype([("token_id", "<i4"), ("logprob", "<f4")])
TOKEN_BYTES: Final = 8
SPAN_BYTES: Final = 16  # about


class LiveOwners:
    def __init__(self, durable: Durable) -> None:
        numbers = sorted(durable.groups)
        self._firsts = np.array(numbers, np.int64)
        self._ends = self._firsts + np.array([durable.groups[number].size for number in numbers], np.int64)
        self._arrivals = np.array(list(durable.queued), np.int64)

    def has(self, owners: Column) -> Column:
        """Returns which owners are live: bool, one for each."""
        alive: Column = np.isin(-owners, self._arrivals)
        if len(self._firsts):
            positions = np.searchsorted(self._firsts, owners, "right") - 1
            alive |= (positions >= 0) & (owners < self._ends[positions])
        return alive

    def of(self, found: Sequence[LogRecord]) -> list[LogRecord]:
        """Returns the live part of these records of content, which shares no memory with the rest."""
        owners = [_owners(record) for record in found]
        alive = self.has(np.concatenate(owners)) if owners else np.zeros(0, np.bool_)
        ends = np.cumsum([len(each) for each in owners])[:-1]
        kept: list[LogRecord] = []
        for record, chosen in zip(found, np.split(alive, ends), strict=True) if owners else ():
            if chosen.all():
                kept.append(record)
            elif chosen.any() and isinstance(record, Tokens):
                kept.append(records.only(record, chosen))
            elif chosen.any() and isinstance(record, records.Submitted):
                pairs = [pair for pair, stays in zip(zip(record.arrivals, record.prompts), chosen) if stays]  # noqa: B905
                kept.append(replace(record, arrivals=[a for a, _ in pairs], prompts=[p for _, p in pairs]))
        return kept


def owned_bytes(record: LogRecord) -> tuple[Column, Column] | None:
    """Returns the owners of a record's bytes and the bytes of each, or None if it has none."""
    if isinstance(record, Tokens):
        owned = record.counts.astype(np.int64) * TOKEN_BYTES + SPAN_BYTES
        return record.numbers, owned + record.routed_bytes if len(record.routed_bytes) else owned
    if isinstance(record, Verdict):
        return _owners(record), np.array([64 + len(record.log)])
    if isinstance(record, records.Admitted):
        return _owners(record), np.array([_prompt_bytes(record.prompt)])
    if isinstance(record, records.Submitted):
        return _owners(record), np.array([_prompt_bytes(each) for each in record.prompts])
    return None


def _owners(record: LogRecord) -> Column:
    if isinstance(record, Tokens):
        return record.numbers
    if isinstance(record, records.Submitted):
        return -np.array(record.arrivals, np.int64)
    assert isinstance(record, Verdict | records.Admitted)
    return np.array([record.number], np.int64)


def _prompt_bytes(prompt: list[object]) -> int:
    return 64 + sum(len(part) for part in prompt if isinstance(part, str | bytes))


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that was neither trained on nor cancelled. ``step`` is the step that took it, or OPEN."""

    number: int
    group_id: str
    prompt: Prompt
    version: int
    deadline: int
    window_versions: int
    at: float
    rows: tuple[int, ...]
    position: int
    arrival: int
    step: int
    taken: int  # the place in the order in which steps have taken groups

    def admitted(self, replaces: int = -1) -> records.Admitted:
        """Returns a record of the group, which replaces earlier ones."""
        prompt, rows = records.prompt_values(self.prompt), list(self.rows)
        times = (self.version, self.deadline, self.window_versions, self.at)
        return records.Admitted(self.number, self.group_id, prompt, *times, rows, self.position, self.arrival, replaces)


@dataclass(slots=True)
class Requests:
    """The requests of the live groups, group by group in the order of samples; columns by request."""

    begins: Column  # request i has the tokens from there on
    counts: Column
    tokens: Column  # all tokens, TOKEN
    ends: Column  # of the last span: an index of FINISH_REASONS, 0: not finished; beside it CLOSED, of ended sessions
    heard_at: Column  # when its last tokens came; 0: none did
    stops: dict[int, str]
    segment_starts: dict[int, list[tuple[str, int, str]]]  # worker, first token, arrival
    routed: dict[int, bytes]
    verdicts: dict[int, Verdict]
    turns: dict[
        int, list[tuple[Any, ...]]
    ]  # of sessions: index of the first given token, their count, time, then as in Tokens
    attempts: Column  # of sessions: replacements before
    prompt_logprobs: dict[int, dict[int, bytes]]  # of sessions: by index of the first token that they came with
    damaged: list[int]  # groups, by their place, of which something is lost that came before what is there

    def __len__(self) -> int:
        return len(self.counts)


def started(requests: Requests, group: LiveGroup, first: int) -> int:
    """Returns the number of a group's members that have started. ``first`` is the position of its first request."""
    at_once, size = group.prompt.at_once, len(group.rows)
    if at_once == size:
        return size
    late = slice(first + at_once, first + size)
    verdicts = (requests.verdicts.get(position) for position in range(first, first + size))
    rewards = (each.value for each in verdicts if each is not None and each.valid)
    late_has_begun = bool(requests.counts[late].any() or requests.attempts[late].any())
    return members_started(size, at_once, rewards, late_has_begun)


class Content:
    """Collects the live content of a log, up to the record at which ``durable`` stands."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._live = LiveOwners(durable)
        self._admitted: dict[int, records.Admitted] = {}
        self._queued: dict[int, list[Any]] = {}
        self._tokens: list[Tokens] = []
        self._verdicts: list[Verdict] = []

    def add(self, found: Iterable[LogRecord]) -> None:
        """Adds records in the order of the log."""
        kinds = Tokens | Verdict | records.Admitted | records.Submitted
        for record in self._live.of([each for each in found if isinstance(each, kinds)]):
            if isinstance(record, Tokens):
                self._tokens.append(record)
            elif isinstance(record, Verdict):
                self._verdicts.append(record)
            elif isinstance(record, records.Admitted):
                self._admitted[record.number] = record
            elif isinstance(record, records.Submitted):
                self._queued |= zip(record.arrivals, record.prompts, strict=True)

    def lacking(self) -> list[str]:
        """Returns the groups and queued prompts whose record is lost."""
        groups = [group.group_id for number, group in self._durable.groups.items() if number not in self._admitted]
        return [*groups, *(f"queued prompt {each}" for each in self._durable.queued if each not in self._queued)]

    def groups(self) -> list[LiveGroup]:
        """Returns the live groups, ascending by number."""
        found = []
        for number, (_, _, step, taken) in sorted(self._durable.groups.items()):
            each = self._admitted[number]
            prompt, rows = records.prompt_of(each.prompt), tuple(each.rows)
            times = (each.version, each.deadline, each.window_versions, each.at)
            found.append(
                LiveGroup(number, each.group_id, prompt, *times, rows, each.position, each.arrival, step, taken)
            )
        return found

    def queued(self) -> list[tuple[int, Prompt]]:
        """Returns the queued prompts by arrival."""
        return [(arrival, records.prompt_of(self._queued[arrival])) for arrival in sorted(self._durable.queued)]

    def requests(self, groups: Sequence[LiveGroup]) -> Requests:
        """Returns the requests of ``groups``, which are all live ones."""
        return _Collector(groups).of(self._tokens, self._verdicts)


class _Collector:
    def __init__(self, groups: Sequence[LiveGroup]) -> None:
        self._groups = groups
        self._firsts = np.array([group.number for group in groups], np.int64)
        self._sizes = np.array([len(group.rows) for group in groups], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def of(self, tokens: Sequence[Tokens], verdicts: Sequence[Verdict]) -> Requests:
        """Collects the requests. ``tokens`` may have any order, ``verdicts`` have the log's.

        A token span that occurs twice counts once. Compaction copies spans with their bounds, and may be cut short by a
        crash or a failed write.
        """
        total = int(self._sizes.sum())
        numbers = _joined([each.numbers for each in tokens], np.int64)
        counts = _joined([each.counts for each in tokens], np.int64)
        firsts = _joined([each.first_tokens for each in tokens], np.int64)
        ends = _joined([_filled(each.ends, len(each.numbers), np.uint8) for each in tokens], np.uint8)
        ats = _joined([each.ats if len(each.ats) else np.full(len(each.numbers), each.at) for each in tokens], float)
        attempts = _joined([_filled(each.attempts, len(each.numbers), np.uint8) for each in tokens], np.uint8)
        positions = self._positions(numbers)
        latest = np.zeros(total + 1, np.uint8)  # the last is of what is not live
        np.maximum.at(latest, positions, attempts)
        positions[attempts < latest[positions]] = -1  # of replaced sessions
        live = np.flatnonzero(positions >= 0)
        order = live[np.lexsort((counts[live], firsts[live], positions[live]))]
        twice = _repeated(positions[order], firsts[order], counts[order])
        positions[order[twice]] = -1
        order = order[~twice]
        position, count, first = positions[order], counts[order], firsts[order]
        reached = np.cumsum(count)
        begins = np.zeros(total + 1, np.int64)
        begins[1:] = np.cumsum(np.bincount(position, count, total)) if len(position) else 0
        broken = first != reached - count - begins[position]
        requests = Requests(
            begins[:-1],
            np.diff(begins),
            np.empty(int(begins[-1]), TOKEN),
            np.zeros(total, np.uint8),
            np.zeros(total),
            {},
            {},
            {},
            {
                int(position): each
                for each in verdicts
                for position in self._positions(np.array([each.number]))
                if position >= 0
            },
            {},
            latest[:-1],
            {},
            [],
        )
        is_last = np.append(position[1:] != position[:-1], np.True_)[: len(position)]
        requests.ends[position[is_last]] = ends[order[is_last]]
        np.maximum.at(requests.heard_at, position, ats[order])
        targets = np.full(len(numbers), -1, np.int64)  # where the tokens of each span go
        targets[order] = reached - count
        _spread(requests, tokens, positions, targets)
        self._check(requests, position[broken])
        return requests

    def _positions(self, numbers: Column) -> Column:
        """Returns the requests' positions, -1 for those that are not live."""
        if not len(self._firsts):
            return np.full(len(numbers), -1, np.int64)
        groups = np.searchsorted(self._firsts, numbers, "right") - 1
        behind = numbers - self._firsts[groups]
        positions: Column = np.where((groups >= 0) & (behind < self._sizes[groups]), self._starts[groups] + behind, -1)
        return positions

    def _check(self, requests: Requests, broken: Column) -> None:
        """Finds groups with lost data. The verdict on a request whose end is lost is dropped."""
        for position in [each for each in requests.verdicts if not requests.ends[each]]:
            del requests.verdicts[position]
        scored = np.zeros(len(requests), np.bool_)
        scored[list(requests.verdicts)] = True
        lost = set((np.searchsorted(self._starts, broken, "right") - 1).tolist())
        for index, group in enumerate(self._groups):
            begin = int(self._starts[index])
            if group.step != OPEN and not scored[begin : begin + started(requests, group, begin)].all():
                lost.add(index)
        requests.damaged = sorted(lost)


def _spread(requests: Requests, tokens: Sequence[Tokens], positions: Column, targets: Column) -> None:
    begin = 0
    routed: dict[int, list[tuple[int, bytes]]] = {}
    for each in tokens:
        end = begin + len(each.numbers)
        position, target = positions[begin:end], targets[begin:end]
        counts = each.counts.astype(np.int64)
        pairs = np.empty(len(each.token_ids), TOKEN)
        pairs["token_id"], pairs["logprob"] = each.token_ids, each.logprobs
        begins = np.cumsum(counts) - counts
        cells = np.repeat(target - begins, counts) + np.arange(len(pairs))
        if np.count_nonzero(position < 0):
            chosen = np.repeat(position >= 0, counts)
            cells, pairs = cells[chosen], pairs[chosen]
        requests.tokens.view(np.int64)[cells] = pairs.view(np.int64)  # one pass: a token is as wide as an int64
        listed = position.tolist() if each.segment_starts else []
        for index, worker_id, first_token, arrival in each.segment_starts:
            if (place := listed[index]) >= 0:
                requests.segment_starts.setdefault(place, []).append((worker_id, first_token, arrival))
        for index, stop in each.stops:
            if position[index] >= 0:
                requests.stops[int(position[index])] = stop
        for index, raw in each.prompt_logprobs:
            if position[index] >= 0:
                requests.prompt_logprobs.setdefault(int(position[index]), {})[int(each.first_tokens[index])] = raw
        for index, *of_turn in each.turns:
            if position[index] >= 0:
                at = float(each.ats[index]) if len(each.ats) else each.at
                turn = (int(each.first_tokens[index]), int(counts[index]), at, *of_turn)
                requests.turns.setdefault(int(position[index]), []).append(turn)
        if len(each.routed_bytes):
            reached = np.cumsum(each.routed_bytes.astype(np.int64)).tolist()
            for index in np.flatnonzero((position >= 0) & (each.routed_bytes > 0)).tolist():
                rows = each.routed[reached[index] - int(each.routed_bytes[index]) : reached[index]]
                routed.setdefault(int(position[index]), []).append((int(each.first_tokens[index]), rows))
        begin = end
    for segment_starts in requests.segment_starts.values():
        if len(segment_starts) > 1:
            segment_starts.sort(key=lambda segment_start: segment_start[1])
    for turns in requests.turns.values():
        turns.sort()
    requests.routed = {position: b"".join(rows for _, rows in sorted(parts)) for position, parts in routed.items()}


def _repeated(*columns: Column) -> Column:
    """Returns which rows equal their predecessor: bool, one for each row."""
    repeated = np.zeros(len(columns[0]), np.bool_)
    if len(repeated):
        repeated[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return repeated


def _joined(columns: list[Column], dtype: type) -> Column:
    return np.concatenate(columns).astype(dtype, copy=False) if columns else np.zeros(0, dtype)


def _filled(column: Column, length: int, dtype: type) -> Column:
    return column if len(column) else np.zeros(length, dtype)
