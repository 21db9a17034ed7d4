"""One simulated engine, event-driven: it advances piecewise at the cost model's rate, never token by token.

Between two changes of its batch an engine with ``n`` running requests and ``kv`` cached tokens takes
``a(n) + k1 * kv`` seconds a step, and every step adds ``n`` to ``kv``. What waits for its environment holds KV that no
step reads, and is not counted; what a handoff copies is read too, by the copy. So ``m`` steps take

    m * a(n) + k1 * (kv * m + n * m**2 / 2)

which is solved for ``m`` or for the time. Each running request is one entry in a heap by the engine step at which it
ends, and one in another by how young it is, for preemption; nothing else is touched as time goes on.
"""

from collections import Counter, deque
from heapq import heapify, heappop, heappush
from math import inf, sqrt

from dora.core.forecast.cost import CostModel
from dora.lab.sim_engine.request import AWAY, FROZEN, RUNNING, WAITING, EnginePhase, SimRequest, Totals

__all__ = ["EnginePhase", "SimEngine", "SimRequest"]

EPSILON_STEPS = 1e-6
STALE_MAX = 256  # entries of requests that have stopped, beside as many as run, before a heap is made anew


class SimEngine:
    """A worker with continuous batching: first come first served, the youngest preempted when KV runs out."""

    def __init__(self, cost: CostModel, slots: int, kv_tokens: int) -> None:
        self.cost, self.slots, self.kv_capacity = cost, slots, kv_tokens
        self.clock_s = 0.0
        self.steps = 0.0
        self.kv = 0.0  # tokens resident
        self.unread = 0  # of them, those that no step reads
        self.debt_s = 0.0  # prefill to compute before the next decode step
        self.paused = False
        self.slowness = 1.0  # a slow engine takes this many times longer
        self.requests: dict[str, SimRequest] = {}
        self.waiting: deque[SimRequest] = deque()
        self.running = 0
        self.totals = Totals()
        self._ends: list[tuple[float, int, SimRequest]] = []  # heap by engine step; stale where it does not run so
        self._youngest: list[tuple[int, int, SimRequest]] = []  # heap by order of arrival, the last first; stale alike
        self._arrivals = 0
        self._starts = 0
        self._siblings: Counter[str] = Counter()  # group -> requests whose KV is here: they share the prompt's prefill

    # ------------------------------------------------------------------------------------------------------- requests

    def add(self, request: SimRequest) -> None:
        """Queues a request; it runs as soon as a slot and KV are free. One that brings its KV goes first."""
        self._arrivals += 1
        request.order, request.phase = self._arrivals, WAITING
        request.resident = request.unread = False  # it may have been both where it comes from
        self.requests[request.request_id] = request
        if request.is_kept:
            self._settle_in(request)
            request.phase = AWAY
            self._unread(request)
        elif request.cached:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self._admit()

    def remove(self, request_id: str) -> SimRequest | None:
        """Takes a request out, wherever it stands. Returns None if it is not here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._stop(request)
        if request.phase is WAITING:
            self.waiting.remove(request)
        self._let_out(request)
        self._admit()
        return request

    def freeze(self, request_id: str) -> SimRequest | None:
        """Stops a request for a handoff. It keeps its KV until removed or thawed. Returns None if it is not here."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._stop(request)
        if request.phase is WAITING:
            self.waiting.remove(request)
        request.phase = FROZEN
        self._admit()
        return request

    def thaw(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.phase is not FROZEN:
            return
        if request.is_kept:
            request.phase = AWAY
        else:
            self._queue_first(request)
            self._admit()

    def extend(self, request: SimRequest, input_tokens: int, turn_tokens: int, cut_tokens: int = 0) -> None:
        """Begins the next turn of a kept request: removes its last ``cut_tokens``, prefills the environment tokens,
        then samples ``turn_tokens``.
        """
        request.turn += 1
        request.left = turn_tokens
        if request.resident:
            self.kv -= cut_tokens
            self.unread -= cut_tokens * request.unread
        request.tokens -= cut_tokens
        self._give(request, input_tokens)
        request.tokens += input_tokens
        self._queue_first(request)
        self._admit()

    def resume(self, request: SimRequest) -> None:
        """Begins the next turn after the environment's answer, which is prefilled."""
        if request.phase is not AWAY or self.requests.get(request.request_id) is not request:
            return  # it was moved or removed meanwhile
        answer_tokens = request.turns[request.turn].answer_tokens
        request.turn += 1
        request.left = request.turns[request.turn].tokens
        self._give(request, answer_tokens)
        request.prompt += answer_tokens
        self._queue_first(request)
        self._admit()

    def renew(self, load_s: float) -> None:
        """Loads new weights under running requests: all KV on the engine is computed again (partial rollout)."""
        again_s = self.kv * self.cost.prefill_token_s
        self.debt_s += load_s + again_s
        self.totals.reprefill_s += again_s

    def tokens_of(self, request: SimRequest) -> int:
        if request.phase is not RUNNING:
            return request.tokens
        return request.tokens + self._done(request)

    # ----------------------------------------------------------------------------------------------------------- time

    def advance(self, now_s: float) -> None:
        """Advances the engine's clock. The caller never passes over ``next_s``."""
        left_s, self.clock_s = (now_s - self.clock_s) / self.slowness, now_s
        if self.paused or left_s <= 0.0:
            return
        paid_s = min(self.debt_s, left_s)
        self.debt_s -= paid_s
        self.totals.prefill_s += paid_s
        if self.running and left_s > paid_s:
            self._decode(left_s - paid_s)

    def next_s(self) -> float:
        """The time of the next event by itself: a turn or response ends, or KV runs out. ``inf`` if there is none."""
        if self.paused or not self.running:
            return inf
        while self._stale(self._ends[0]):
            heappop(self._ends)
        steps = max(0.0, self._ends[0][0] - self.steps)
        if self._evictable():
            steps = min(steps, max(0.0, (self.kv_capacity - self.kv) / self.running))
        kv_token_s = self.cost.kv_s(self.running)
        linear_s = self.cost.matmul_s(self.running) + kv_token_s * (self.kv - self.unread)
        decode_s = steps * linear_s + kv_token_s * self.running * steps * steps / 2
        return self.clock_s + (self.debt_s + decode_s) * self.slowness

    def happened(self) -> list[SimRequest]:
        """Frees the slots of requests whose turn or response ended at ``next_s``, the clock's time, and returns these.

        Those with turns left are AWAY until ``resume``; the others have gone.
        """
        ended = self._ended()
        full = self.kv + EPSILON_STEPS * self.running >= self.kv_capacity and self._evictable()
        if not ended and not full and self.next_s() <= self.clock_s:
            self._pass_over()
            ended = self._ended()
        for request in ended:
            self._stop(request, ended=True)
            if request.tokens >= request.length and not request.keeps:
                del self.requests[request.request_id]
                self._let_out(request)
            else:
                self._unread(request)
        if self.kv + EPSILON_STEPS * self.running >= self.kv_capacity and self._evictable():
            self._preempt()
        self._admit()
        return ended

    # -------------------------------------------------------------------------------------------------------- details

    def _ended(self) -> list[SimRequest]:
        ended: list[SimRequest] = []
        while self._ends and self._ends[0][0] <= self.steps + EPSILON_STEPS:
            entry = heappop(self._ends)
            if not self._stale(entry):
                ended.append(entry[2])
        return ended

    def _pass_over(self) -> None:
        """Handles an event so near that the clock cannot tell it from the present: it would never come by itself."""
        self.totals.prefill_s += self.debt_s
        self.debt_s = 0.0
        end, room = self._ends[0][0], (self.kv_capacity - self.kv) / self.running
        if self._evictable() and self.steps + room < end:
            self._grow(room)
        else:
            self._grow(end - self.steps)
            self.steps = end  # whatever rounding left

    def _stale(self, entry: tuple[float, int, SimRequest]) -> bool:
        _, start, request = entry
        return request.phase is not RUNNING or start != request.start

    def _done(self, request: SimRequest) -> int:
        return min(int(self.steps - request.since_step + EPSILON_STEPS), request.left)

    def _decode(self, seconds: float) -> None:
        kv_token_s = self.cost.kv_s(self.running)
        linear_s = self.cost.matmul_s(self.running) + kv_token_s * (self.kv - self.unread)
        square_s = kv_token_s * self.running / 2
        if square_s > 0.0:
            # the root in the form that loses no digits when the square term is small
            steps = 2.0 * seconds / (linear_s + sqrt(linear_s * linear_s + 4.0 * square_s * seconds))
        else:
            steps = seconds / linear_s
        self.totals.decode_s += seconds
        self._grow(steps)

    def _grow(self, steps: float) -> None:
        totals = self.totals
        totals.context_token_steps += (self.kv - self.unread) * steps + self.running * steps * steps / 2
        totals.steps += steps
        self.steps += steps
        self.kv += self.running * steps

    def _prefill(self, tokens: int, again: bool = False) -> None:
        seconds = tokens * self.cost.prefill_token_s
        self.debt_s += seconds
        self.totals.reprefill_s += seconds * again

    def _stop(self, request: SimRequest, *, ended: bool = False) -> None:
        if request.phase is not RUNNING:
            return
        done = request.left if ended else self._done(request)
        self.kv -= (self.steps - request.since_step) - done  # a fraction of a step does not count
        request.tokens += done
        request.left -= done
        self.totals.generated_tokens += done
        self.running -= 1
        request.phase = AWAY

    def _let_out(self, request: SimRequest) -> None:
        if not request.resident:
            return
        self.kv -= request.context
        request.resident = False
        self._read(request)
        self._siblings[request.group_id] -= 1
        if not self._siblings[request.group_id]:
            del self._siblings[request.group_id]
        if not self._siblings:
            self.kv = 0.0  # what rounding left

    def _read(self, request: SimRequest) -> None:
        if request.unread:
            request.unread = False
            self.unread -= request.context

    def _unread(self, request: SimRequest) -> None:
        request.unread = True
        self.unread += request.context

    def _give(self, request: SimRequest, tokens: int) -> None:
        if request.resident:
            self.kv += tokens
            self.unread += tokens * request.unread
            self._prefill(tokens)

    def _settle_in(self, request: SimRequest) -> None:
        self.kv += request.context
        request.resident = request.cached = True
        self._siblings[request.group_id] += 1

    def _queue_first(self, request: SimRequest) -> None:
        request.phase = WAITING
        self.waiting.appendleft(request)

    def _evictable(self) -> bool:
        if self.running != 1 or not self.unread:
            return self.running > 1
        return any(request.resident and request.phase in (AWAY, WAITING) for request in self.requests.values())

    def _preempt(self) -> None:
        """Preempts the youngest request, as KV has run out. It computes its KV again (vLLM's recompute preemption).

        One whose environment is about to answer goes before one that decodes. If only one decodes, it goes on.
        """
        request = self._youngest_running() if self.running > 1 and not self.unread else self._least_needed()
        ran = request.phase is RUNNING
        self._stop(request)
        self._let_out(request)
        request.cached = False
        self.totals.preemptions += 1
        if ran:
            self._queue_first(request)

    def _youngest_running(self) -> SimRequest:
        while self._stale(self._youngest[0]):
            heappop(self._youngest)
        return self._youngest[0][2]

    def _least_needed(self) -> SimRequest:
        phases = (RUNNING, AWAY) if self.running > 1 else (AWAY, WAITING)
        candidates = (r for r in self.requests.values() if r.resident and r.phase in phases)
        return max(candidates, key=lambda r: (r.phase is AWAY, r.order))

    def _admit(self) -> None:
        while self.waiting and self.running < self.slots:
            request = self.waiting[0]
            # a step's growth is kept free, else the newcomer would be preempted at once
            needs = 0 if request.resident else request.context + self.running + 1
            if self.running and self.kv + needs > self.kv_capacity:
                return
            self.waiting.popleft()
            self._start(request)

    def _start(self, request: SimRequest) -> None:
        if not request.resident:
            if not request.cached:
                shared = request.prompt if self._siblings[request.group_id] and not request.turn else 0
                self._prefill(request.context - shared, again=request.tokens > 0)
            self._settle_in(request)
        self._read(request)
        request.phase, request.since_step = RUNNING, self.steps
        self.running += 1
        self._starts += 1
        request.start = self._starts
        heappush(self._ends, (self.steps + request.left, self._starts, request))
        heappush(self._youngest, (-request.order, self._starts, request))
        if len(self._youngest) > 2 * self.running + STALE_MAX:
            self._youngest = [entry for entry in self._youngest if not self._stale(entry)]
            heapify(self._youngest)
