"""Drafters for tests: they stand in for an engine's own (``dora.worker.drafting.drafter``)."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dora.data.types import RequestSpec
from tests.contract.driver import Response


class Wrong:
    """Drafts tokens that are hardly ever sampled: a request keeps the pace of one token a step."""

    drafted_tokens = accepted_tokens = 0
    token_ids = (0, 0, 0, 0)

    def begin_step(self, fed: int) -> bool:
        return True

    def drafts(self, room: dict[str, int]) -> dict[str, list[int]]:
        return {engine_id: list(self.token_ids[:most]) for engine_id, most in room.items() if most > 0}

    def sampled(self, engine_id: str, token_ids: list[int], drafted: int) -> None: ...
    def begin(self, engine_id: str, request: RequestSpec) -> None: ...
    def forget(self, engine_id: str) -> None: ...
    def scheduled(self, fed: int) -> None: ...
    def stepped(self) -> None: ...


class Guessing(Wrong):
    """Drafts the tokens of known responses, some of them wrong, of random lengths."""

    def __init__(self, tokens_of: Callable[[str], list[int]], so_far: Callable[[str], int], seed: int) -> None:
        self._tokens_of, self._so_far, self._random = tokens_of, so_far, random.Random(seed)
        self.drafted_tokens = self.accepted_tokens = self.longest = 0

    def drafts(self, room: dict[str, int]) -> dict[str, list[int]]:
        found = {}
        for engine_id, most in room.items():
            name = engine_id.partition("-")[2]
            first, count = self._so_far(name), min(most, self._random.randrange(9))
            draft = self._tokens_of(name)[first : first + count]
            draft += [self._random.randrange(3, 60) for _ in range(count - len(draft))]
            if draft and self._random.random() < 0.5:
                draft[self._random.randrange(len(draft))] = self._random.randrange(3, 60)
            if draft:
                found[engine_id] = draft
        return found

    def sampled(self, engine_id: str, token_ids: list[int], drafted: int) -> None:
        self.drafted_tokens += drafted
        self.accepted_tokens += len(token_ids) - 1
        self.longest = max(self.longest, len(token_ids))


@contextmanager
def guessed(engine: Any, responses: Mapping[str, Response] | None, seed: int = 1) -> Iterator[Guessing | None]:
    """An engine that drafts the tokens of these responses, with mistakes; of None, as it would."""
    scheduler = engine.core.scheduler
    own, guessing = scheduler.drafter, None
    if responses is not None:
        guessing = scheduler.drafter = Guessing(
            lambda name: responses[name].token_ids, lambda name: len(engine.request(name).output_token_ids), seed
        )
    yield guessing
    scheduler.drafter = own


def model_drafter(own: Any) -> Any:
    """A drafter with an engine's own draft model, which takes no time. ``longest`` is as of ``Guessing``."""
    from dora.worker.drafting.model_drafter import ModelDrafter

    class Counted(ModelDrafter):
        longest = now_ms = 0

        def stepped(self) -> None:
            self.now_ms += 1
            super().stepped()

        def sampled(self, engine_id: str, token_ids: Sequence[int], drafted: int) -> None:
            super().sampled(engine_id, token_ids, drafted)
            self.longest = max(self.longest, len(token_ids))

    drafter = Counted(own._model, own._choose, clock=lambda: drafter.now_ms / 1e3)
    return drafter
