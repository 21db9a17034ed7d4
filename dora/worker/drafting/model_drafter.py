"""Drafts what a small model samples with the noise of the request's own positions.

The engine samples a position with the same noise, so both often take the same token where their probabilities are
alike, more often than by a draw of each. Source: *Coupling without Communication and Drafter-Invariant Speculative
Decoding*.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from dora.data.types import RequestSpec, SamplePlace, SamplingParams
from dora.worker.drafting.draft_model import DraftModel
from dora.worker.drafting.drafter import LEARNING, Drafter

RETRY_STEPS: Final = 256  # without drafts, before a token is drafted to see whether they pay now
FIRST_ACCURACY: Final = 0.8  # before anything was drafted

# Returns the tokens of logits of shape (rows, vocabulary), by temperature and noise of the rows' places, as the engine
# samples. Other sampling parameters do not count.
Choose = Callable[[torch.Tensor, Sequence[SamplePlace]], list[int]]


class ModelDrafter(Drafter):
    def __init__(self, model: DraftModel, choose: Choose, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` gives seconds."""
        super().__init__(0, is_shared=False, clock=clock)
        self._model = model
        self._choose = choose
        self._sampling: dict[str, SamplingParams] = {}
        self._accuracy = FIRST_ACCURACY
        self._draft_s = 0.0  # seconds of the model for a token of each request
        self._idle = 0  # steps

    def begin(self, engine_id: str, request: RequestSpec) -> None:
        super().begin(engine_id, request)
        self._sampling[engine_id] = request.sampling

    def forget(self, engine_id: str) -> None:
        super().forget(engine_id)
        self._sampling.pop(engine_id, None)
        self._model.forget(engine_id)

    def drafts(self, room: dict[str, int]) -> dict[str, list[int]]:
        names = [name for name, most in room.items() if most > 0 and name in self._sampling][: self._model.rows]
        count = self._pace.draft_tokens(self._fed, len(names), self._accuracy, self._draft_s)
        self._idle = 0 if count else self._idle + 1
        if self._idle == RETRY_STEPS:
            self._idle, count, names = 0, 1, names[:1]
        if not count or not names:
            return {}
        requests = [(name, self._requests[name].sequence.token_ids) for name in names]
        self._model.follow(requests)
        begin_s = self._clock()
        found = self._model.draft(
            requests, count, lambda logits, number: self._choose(logits, [self._place(name, number) for name in names])
        )
        draft_s = (self._clock() - begin_s) / count
        self._draft_s += (LEARNING if self._draft_s else 1.0) * (draft_s - self._draft_s)
        drafts = {name: draft[: room[name]] for name, draft in zip(names, found, strict=True)}
        self._drafted = sum(map(len, drafts.values()))
        self._began_s = self._clock()  # a step's own cost is that of its verification
        return drafts

    def _place(self, name: str, number: int) -> SamplePlace:
        known = self._requests[name]
        return SamplePlace(self._sampling[name], known.tokens + number, len(known.sequence.token_ids) + number)

    def sampled(self, engine_id: str, token_ids: Sequence[int], drafted: int) -> None:
        before = self.accepted_tokens
        super().sampled(engine_id, token_ids, drafted)
        if drafted and token_ids:
            accepted = self.accepted_tokens - before
            tried = accepted + (accepted < drafted)
            self._accuracy += LEARNING * (accepted / tried - self._accuracy)
