"""Measures the histograms of one engine, for an epoch: ``dora/data/engine_times.py``."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from dora.data import engine_times as of
from dora.data.types import TokenDelta
from dora.rpc import dora_pb2 as pb

SENT_EVERY_S: Final = 5.0  # while there is work


@dataclass(slots=True)
class _TimedRequest:
    """A request in the engine. If it came with its KV, ``prompt_tokens`` is 0 and there is no first token here."""

    began_s: float
    prompt_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    sampled: int = 0


class EngineTimes:
    """Times by ``clock``. ``message`` has all counts since the start of the epoch, in a bounded size."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timed: dict[str, _TimedRequest] = {}
        self._counts = {each.name: [0] * (len(each.bounds) + 1) for each in of.HISTOGRAMS}
        self._sums = dict.fromkeys(self._counts, 0.0)
        self._ended: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._has_changed = False
        self._sent_s = clock()

    def began(self, request_id: str, prompt_tokens: int) -> None:
        self._timed[request_id] = _TimedRequest(self._clock(), prompt_tokens)

    def forget(self, request_id: str) -> None:
        self._timed.pop(request_id, None)

    def sampled(self, deltas: Iterable[TokenDelta]) -> None:
        now_s = self._clock()
        for delta in deltas:
            timed = self._timed.get(delta.request_id)
            if timed is None:
                continue
            if timed.sampled:
                self._observe(of.TOKEN, now_s - timed.last_s)
            else:
                timed.first_s = now_s
                if timed.prompt_tokens:
                    self._observe(of.FIRST_TOKEN, now_s - timed.began_s)
                    self._prompt_tokens += timed.prompt_tokens
            timed.last_s = now_s
            timed.sampled += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._end(self._timed.pop(delta.request_id), delta.finish_reason)
        self._has_changed = True

    def message(self, *, has_work: bool) -> pb.EngineTimes | None:
        """Returns the message to send now, or None if it is unchanged or was sent just before."""
        now_s = self._clock()
        if not self._has_changed or (has_work and now_s - self._sent_s < SENT_EVERY_S):
            return None
        self._has_changed, self._sent_s = False, now_s
        found = [pb.Histogram(name=name, buckets=counts, sum=self._sums[name]) for name, counts in self._counts.items()]
        return pb.EngineTimes(histograms=found, ended=self._ended, prompt_tokens=self._prompt_tokens)

    def _end(self, timed: _TimedRequest, reason: str) -> None:
        self._ended[reason] += 1
        self._observe(of.REQUEST, timed.last_s - timed.began_s)
        self._observe(of.DECODE, timed.last_s - timed.first_s)
        self._observe(of.GENERATION, timed.sampled)
        if timed.prompt_tokens:
            self._observe(of.PROMPT, timed.prompt_tokens)

    def _observe(self, histogram: of.EngineHistogram, value: float) -> None:
        self._counts[histogram.name][bisect_left(histogram.bounds, value)] += 1
        self._sums[histogram.name] += value
