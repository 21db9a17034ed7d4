"""Finds how a response may go on: the tokens that followed the same last tokens before.

An index maps the last ``CONTEXT`` tokens of every place to the latest places with them, so a lookup costs the same for
any history. A candidate's weight grows with the square of the tokens that match before it, and falls with its age. A
draft follows the heaviest next token while its share of the weights is large enough.

Sequences lie in scopes: responses to one prompt, or sessions of one task. Sources: *SuffixDecoding: Extreme Speculative
Decoding for Emerging AI Applications* (drafts from earlier responses, path probabilities); chained matches as in LZ77.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

CONTEXT: Final = 2
CANDIDATES: Final = 12  # latest places of a context that are looked at
MATCH_MAX: Final = 24  # tokens before a place that are compared
AGE_DECAY: Final = 0.9  # of a candidate's weight, from one to the next older one
TOKEN_BYTES: Final = 180  # of an indexed token: its id, its place, and its part in the index (measured)
_MIX: Final = 1_000_003

Place = tuple["Sequence_", int]


@dataclass(eq=False, slots=True)
class Sequence_:
    """The tokens of one response, with those of its prompt that precede it."""

    scopes: tuple[bytes, ...]
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    is_live: bool = True


@dataclass(slots=True)
class _Scope:
    indexed: dict[Sequence_, int] = field(default_factory=dict)  # its sequences, and how many tokens the index has
    grown: dict[Sequence_, None] = field(default_factory=dict)  # those with more, in order
    places: dict[int, list[Place]] = field(default_factory=dict)
    tokens: int = 0

    def index(self) -> None:
        """Enters what has come since the last draft: where nothing is drafted, it costs nothing."""
        for sequence in self.grown:
            held = sequence.token_ids
            for end in range(max(self.indexed[sequence], CONTEXT - 1) + 1, len(held) + 1):
                places = self.places.setdefault(held[end - 2] * _MIX + held[end - 1], [])
                if len(places) == CANDIDATES:
                    del places[0]
                places.append((sequence, end))
            self.indexed[sequence] = len(held)
        self.grown.clear()


class History:
    """Sequences within ``most_bytes``. The scope that was longest not used is forgotten first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_tokens = max(1, most_bytes // TOKEN_BYTES)
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()
        self._tokens = 0

    @property
    def size_bytes(self) -> int:
        return self._tokens * TOKEN_BYTES

    def begin(self, scopes: Iterable[bytes], token_ids: Sequence[int]) -> Sequence_:
        """Enters a sequence that may grow. Drafts for it come from its scopes, the closest one first."""
        sequence = Sequence_(tuple(scopes))
        for key in sequence.scopes:
            self._scopes.setdefault(key, _Scope()).indexed[sequence] = 0
        self.extend(sequence, token_ids)
        return sequence

    def extend(self, sequence: Sequence_, token_ids: Sequence[int]) -> None:
        """Appends tokens to a sequence."""
        sequence.token_ids.extend(token_ids)
        for key in sequence.scopes:
            scope = self._scopes.get(key)
            if scope is None:  # it was forgotten
                continue
            self._scopes.move_to_end(key)
            scope.grown[sequence] = None
            scope.tokens += len(token_ids)
            self._tokens += len(token_ids)
        if self._tokens > self._most_tokens:
            self._make_room()

    def end(self, sequence: Sequence_, *, is_kept: bool) -> None:
        """Ends the growth of a sequence. Unless it is kept, its scopes are forgotten with their last live sequence."""
        sequence.is_live = False
        for key in sequence.scopes if not is_kept else ():
            scope = self._scopes.get(key)
            if scope is not None and not any(each.is_live for each in scope.indexed):
                self._forget(key)

    def draft(self, sequence: Sequence_, most: int, least_share: float) -> tuple[list[int], list[float]]:
        """Returns up to ``most`` tokens that may follow a sequence, with the share of each path: an estimate of its
        probability, at least ``least_share``.
        """
        candidates = self._candidates(sequence)
        draft: list[int] = []
        shares: list[float] = []
        share = 1.0
        while candidates and len(draft) < most:
            votes: dict[int, float] = {}
            for each, at, matching, age in candidates:
                token_id = each.token_ids[at]
                votes[token_id] = votes.get(token_id, 0.0) + matching * matching * age
            best = max(votes, key=votes.__getitem__)
            share *= votes[best] / (sum(votes.values()) + 1.0)  # one vote for what was never seen
            if share < least_share:
                break
            draft.append(best)
            shares.append(share)
            candidates = [
                (each, at + 1, matching + 1, age)
                for each, at, matching, age in candidates
                if each.token_ids[at] == best and at + 1 < len(each.token_ids)
            ]
        return draft, shares

    def _candidates(self, sequence: Sequence_) -> list[tuple[Sequence_, int, int, float]]:
        """Returns places after which the sequence may go on, with the tokens that match before each, and its weight by
        age.
        """
        held = sequence.token_ids
        if len(held) < CONTEXT:
            return []
        context = held[-2] * _MIX + held[-1]
        found = []
        for key in sequence.scopes:
            scope, age = self._scopes.get(key), 1.0
            if scope is None:
                continue
            scope.index()
            places = scope.places.get(context, ())
            for each, end in reversed(places):
                if end < len(each.token_ids):
                    found.append((each, end, _matching(held, each.token_ids, end), age))
                    age *= AGE_DECAY
            if found:
                break
        return found

    def _make_room(self) -> None:
        for key in list(self._scopes):
            if self._tokens <= self._most_tokens // 2:
                return
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._tokens -= self._scopes.pop(key).tokens


def _matching(held: "array[int]", other: "array[int]", end: int) -> int:
    """Returns how many last tokens of ``held`` are those of ``other`` before ``end``."""
    count, most = CONTEXT, min(MATCH_MAX, len(held), end)
    while count < most and held[-count - 1] == other[end - count - 1]:
        count += 1
    return count
