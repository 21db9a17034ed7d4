"""Collects the tokens and verdicts of live requests from the log, without per-token work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dora.data.growth import members_started
from dora.journal import records
from dora.journal.compaction import LiveOwners
from dora.journal.ledger import OPEN, LiveGroup
from dora.journal.records import Column, Tokens, Verdict

SIFT_BYTES: Final = 64 << 20  # dead data is dropped once the kept data has doubled and grown by this much
TOKEN: Final = np.dtype([("token_id", "<i4"), ("logprob", "<f4")])


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
    """Returns the number of a group's members that have started. ``first``: the position of its first request."""
    at_once, size = group.prompt.at_once, len(group.rows)
    if at_once == size:
        return size
    late = slice(first + at_once, first + size)
    verdicts = (requests.verdicts.get(position) for position in range(first, first + size))
    rewards = (each.value for each in verdicts if each is not None and each.valid)
    late_has_begun = bool(requests.counts[late].any() or requests.attempts[late].any())
    return members_started(size, at_once, rewards, late_has_begun)


class LiveContent:
    """The tokens and verdicts that a reader of the log keeps: those live at its position."""

    def __init__(self) -> None:
        self.tokens: list[Tokens] = []
        self.verdicts: list[Verdict] = []
        self._sifted_bytes = 0

    def add(self, tokens: Sequence[Tokens], verdicts: Sequence[Verdict], live: LiveOwners) -> None:
        """Adds the next records of the log. ``live``: the live owners after them."""
        self.tokens += _of_live(tokens, live)
        self.verdicts += _said_of_live(verdicts, live)
        if self._held_bytes() > 2 * self._sifted_bytes + SIFT_BYTES:
            self.tokens, self.verdicts = _of_live(self.tokens, live), _said_of_live(self.verdicts, live)
            self._sifted_bytes = self._held_bytes()

    def _held_bytes(self) -> int:
        of_tokens = sum(each.token_ids.nbytes + each.logprobs.nbytes + len(each.routed) for each in self.tokens)
        of_prompts = sum(len(raw) for each in self.tokens for _, raw in each.prompt_logprobs)
        return of_tokens + of_prompts + sum(len(each.log) for each in self.verdicts)


class Content:
    """The contents of the log up to a reader's position."""

    def __init__(self, groups: Sequence[LiveGroup]) -> None:
        """``groups``: ascending by number."""
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
        """Returns the requests' positions; -1 if not live."""
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
        begins = np.cumsum(counts) - counts
        cells = np.repeat(target - begins, counts) + np.arange(len(each.token_ids))
        if (position < 0).any():
            chosen = np.repeat(position >= 0, counts)
            cells, token_ids, logprobs = cells[chosen], each.token_ids[chosen], each.logprobs[chosen]
        else:
            token_ids, logprobs = each.token_ids, each.logprobs
        requests.tokens["token_id"][cells] = token_ids
        requests.tokens["logprob"][cells] = logprobs
        for index, *segment_start in each.segment_starts:
            if position[index] >= 0:
                requests.segment_starts.setdefault(int(position[index]), []).append(
                    (segment_start[0], segment_start[1], segment_start[2])
                )
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
        segment_starts.sort(key=lambda segment_start: segment_start[1])
    for turns in requests.turns.values():
        turns.sort()
    requests.routed = {position: b"".join(rows for _, rows in sorted(parts)) for position, parts in routed.items()}


def _of_live(tokens: Sequence[Tokens], live: LiveOwners) -> list[Tokens]:
    """Copies the live part, which shares no memory with the rest."""
    alive = live.has(_joined([each.numbers for each in tokens], np.int64))
    ends = np.cumsum([len(each.numbers) for each in tokens], dtype=np.int64)[:-1]
    kept: list[Tokens] = []
    for each, chosen in zip(tokens, np.split(alive, ends), strict=True) if tokens else ():
        if chosen.all():
            kept.append(each)
        elif chosen.any():
            kept.append(records.only(each, chosen))
    return kept


def _said_of_live(verdicts: Sequence[Verdict], live: LiveOwners) -> list[Verdict]:
    alive = live.has(np.array([each.number for each in verdicts], np.int64)).tolist()
    return [each for each, is_alive in zip(verdicts, alive, strict=True) if is_alive]


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
