"""Drafts for the requests of one engine, and learns from what was accepted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.data.remembered import PROMPT_TOKENS, Remembered, scope_of
from dora.data.types import RequestSpec
from dora.worker.drafting.history import History, Sequence_
from dora.worker.drafting.pace import Pace, Worth

LOOKUPS: Final = 16  # without a draft that pays, in a step: a request of a larger batch rests some steps after one
MISSES_MAX: Final = 4  # drafts in a row of which nothing was accepted, before a request pauses
BACK_OFF_MAX: Final = 32  # steps of the longest pause
LEARNING: Final = 0.1  # weight of the latest draft in a request's accuracy
ACCURACY_MIN, ACCURACY_MAX = 0.05, 1.5
RECOVERY: Final = 0.02  # how far an accuracy returns to 1 each time that no draft pays
TASKS_MAX: Final = 65_536  # prompts whose task is known


@dataclass(slots=True)
class _Drafted:
    """A request that may get drafts. ``accuracy`` is the accepted share of the tokens that shares promised."""

    sequence: Sequence_
    tokens: int  # of the response, in the sequence
    accuracy: float = 1.0
    promised: float = 0.0  # of the present draft
    misses: int = 0
    rests: int = 0  # steps without a lookup

    def miss(self) -> None:
        self.misses += 1
        if self.misses >= MISSES_MAX:
            self.rests = min(BACK_OFF_MAX, 1 << (self.misses - MISSES_MAX))


class Drafter:
    """Requests are named by the engine's ids."""

    def __init__(self, most_bytes: int, *, is_shared: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        """Unless the history ``is_shared``, a request's drafts come from its own tokens. ``clock`` gives seconds."""
        self._is_shared = is_shared
        self._history = History(most_bytes)
        self._tasks: dict[bytes, bytes] = {}  # scope of a task by that of its prompt
        self._requests: dict[str, _Drafted] = {}
        self._pace = Pace()
        self._worth = Worth()
        self._clock = clock
        self._began_s = 0.0  # of the step's engine
        self._looked_s = 0.0  # when its drafts began
        self._fed = 0
        self._least = 1.0  # share of a token that still pays
        self._drafted = 0
        self._gained = 0  # tokens of the step
        self._looks = False
        self._is_measured = False
        self._tokens = 1.0  # of a request in a step
        self._accuracy = 1.0  # of all requests
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def begin(self, engine_id: str, request: RequestSpec) -> None:
        """Enters a request with its outputs so far, or what it has become by a next turn."""
        known, outputs = self._requests.get(engine_id), request.output_token_ids
        if known is not None and known.tokens <= len(outputs) and _ends_with(known, outputs):
            self._history.extend(known.sequence, outputs[known.tokens :])
            known.tokens = len(outputs)
            return
        self.forget(engine_id)
        prompt = request.prompt_token_ids
        own = scope_of(prompt) if self._is_shared else engine_id.encode()
        scopes = tuple(filter(None, (own, self._tasks.get(own, b""))))
        before = prompt[-PROMPT_TOKENS:] if self._is_shared else prompt
        sequence = self._history.begin(scopes, [*before, *outputs])
        self._requests[engine_id] = _Drafted(sequence, len(outputs), self._accuracy)

    def forget(self, engine_id: str) -> None:
        """Ends a request. A shared history keeps its tokens."""
        known = self._requests.pop(engine_id, None)
        if known is not None:
            self._history.end(known.sequence, is_kept=self._is_shared)

    def remember(self, response: Remembered) -> None:
        """Enters what another engine sampled."""
        if not self._is_shared:
            return
        if response.task:
            if len(self._tasks) >= TASKS_MAX:
                self._tasks.clear()
            self._tasks[response.scope] = response.task
        if response.token_ids:
            self._history.end(self._history.begin(response.scopes, response.token_ids), is_kept=True)

    def begin_step(self, fed: int) -> bool:
        """Begins a step that is fed so many tokens without drafts, one of each decoding request. Returns whether a
        draft can pay.
        """
        self._began_s = self._looked_s = self._clock()
        self._fed, self._drafted, self._gained = fed, 0, 0
        self._looks = self._worth.looks(fed)
        self._least = self._pace.least_share(fed, self._tokens * fed) if fed else 1.0
        return self._looks and self._least < 1.0

    def drafts(self, room: dict[str, int]) -> dict[str, list[int]]:
        """Returns the step's drafts, of at most ``room`` tokens for each request, if they pay."""
        found: dict[str, list[int]] = {}
        expected = 0.0
        for engine_id, most in room.items():
            known = self._requests.get(engine_id)
            if known is None or most < 1:
                continue
            known.promised = 0.0
            if known.rests:
                known.rests -= 1
                continue
            draft, shares = self._history.draft(
                known.sequence, min(most, DRAFT_TOKENS_MAX), self._least / known.accuracy
            )
            if draft:
                found[engine_id] = draft
                known.promised = sum(shares)
                expected += known.promised * known.accuracy
            else:
                known.rests = self._fed // LOOKUPS
                known.accuracy += RECOVERY * (1.0 - known.accuracy)
        drafted = sum(map(len, found.values()))
        if not self._pace.pays(self._fed, drafted, expected):
            return {}
        self._drafted = drafted
        return found

    def scheduled(self, fed: int) -> None:
        """Enters the tokens that the step is fed. Its time is measured only if these are decodes and drafts."""
        self._is_measured = fed == self._fed + self._drafted

    def stepped(self) -> None:
        """Ends a step."""
        if self._is_measured:
            now_s = self._clock()
            self._pace.observe(now_s - self._began_s, self._fed + self._drafted, drafted=self._drafted > 0)
            self._worth.stepped(self._fed, now_s - self._looked_s, self._gained, looked=self._looks)
            self._is_measured = False

    def sampled(self, engine_id: str, token_ids: Sequence[int], drafted: int) -> None:
        """Enters the tokens of a step, which verified ``drafted`` ones of this request."""
        known = self._requests.get(engine_id)
        if known is None or not token_ids:
            return
        self._history.extend(known.sequence, token_ids)
        known.tokens += len(token_ids)
        self._gained += len(token_ids)
        self._tokens += 0.01 * (len(token_ids) - self._tokens)
        if drafted:
            accepted = min(drafted, len(token_ids) - 1)
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            if accepted:
                known.misses = 0
            else:
                known.miss()
            if known.promised:
                found = min(ACCURACY_MAX, accepted / known.promised)
                known.accuracy = max(ACCURACY_MIN, known.accuracy + LEARNING * (found - known.accuracy))
                self._accuracy += 0.1 * LEARNING * (found - self._accuracy)


def _ends_with(known: _Drafted, outputs: Sequence[int]) -> bool:
    """Returns whether the response begins with the outputs that are known of it."""
    held = known.sequence.token_ids
    return held[len(held) - known.tokens :].tolist() == list(outputs[: known.tokens])


class FixedDrafter(Drafter):
    """Drafts the same number of arbitrary tokens for each request, to time their verification."""

    def __init__(self, tokens: int) -> None:
        super().__init__(0, is_shared=False)
        self._draft = [0] * tokens

    def begin(self, engine_id: str, request: RequestSpec) -> None:
        """Does nothing: the draft does not depend on the request."""

    def begin_step(self, fed: int) -> bool:
        return fed > 0

    def drafts(self, room: dict[str, int]) -> dict[str, list[int]]:
        return {engine_id: self._draft[:most] for engine_id, most in room.items() if most > 0}
