"""Times a running engine: steps of known batches, prefills, and a mixed workload to test a fitted model.

Everything uses the engine's protocol. For each context, one set of requests is prefilled one by one (each a prefill
sample). Batches of any size are then made by freezing the others, so no token is computed in vain.

Everything is repeated in rounds, and only the fastest times of each point count: other load on the machine only adds
time, and a burst of it hardly falls on the same point in every round.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Final

import numpy as np

from dora.data.engine_samples import DecodeSample, DraftSample, Measurement, MixedRequest, PrefillSample
from dora.data.types import RequestSpec, SamplingParams
from dora.errors import MISSING, Conflict, InvalidValue
from dora.worker.engine import RolloutEngine

Clock = Callable[[], float]
SETTLING_STEPS: Final = 2  # a changed batch is re-assembled in its first step
ROUNDS: Final = 4
BATCHES: Final = 6  # sizes, if there are enough slots
MIXTURE_BATCHES: Final = 12  # for a mixture of experts, whose cost is not linear in the batch
DRAFTED: Final = 4  # tokens of each request, to time their verification
# Share of the sorted times of one point that counts. By the clock: the fastest, as on an idle machine. Beside other
# engines, and in CPU time, to which others add little: the middle half.
FASTEST: Final = (0.0, 0.125)
USUAL: Final = (0.25, 0.75)


@dataclass(frozen=True, slots=True)
class Grid:
    """The measured points: ``rounds * steps`` steps of each batch and context, in another order each round, and one
    mixed workload a round.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # prompt tokens
    steps: int = 8  # timed of one batch in one round, after SETTLING_STEPS that are not
    rounds: int = ROUNDS
    mixed_requests: int = 24
    counted: tuple[float, float] = FASTEST  # shares of one point's times in order, from and to: those that count

    @property
    def growth(self) -> int:
        """The most tokens that a request can gain while its context is measured."""
        return 1 + len(self.batches) * (self.steps + SETTLING_STEPS)


def default_grid(
    slots: int,
    kv_tokens: int,
    max_model_len_tokens: int,
    rounds: int = ROUNDS,
    batches: int = BATCHES,
    counted: tuple[float, float] = FASTEST,
) -> Grid:
    """Returns batches up to a limit, evenly spaced by ratio, and three contexts far enough apart to separate k1 and k3.

    Raises InvalidValue for an engine that is too small to be measured.
    """
    if slots < 2:
        raise InvalidValue("slots", slots, "2 or above: two batch sizes must be timed")
    sizes = tuple(sorted({round(slots ** (index / (batches - 1))) for index in range(batches)}))
    room = min(max_model_len_tokens, kv_tokens // slots)
    grid = Grid(sizes, (room // 16, room // 4, room // 2), rounds=rounds, counted=counted)
    least = 2 * (grid.growth + 1)
    if room < least:
        raise InvalidValue("max_model_len_tokens and kv_tokens / slots", room, f"{least} or above")
    check_grid(grid, slots, kv_tokens, max_model_len_tokens)
    return grid


def check_grid(grid: Grid, slots: int, kv_tokens: int, max_model_len_tokens: int) -> None:
    """Raises InvalidValue for the first field that such an engine cannot run."""
    room = min(max_model_len_tokens - 1, kv_tokens // max(slots, 1))
    most = room - grid.growth
    checks: tuple[tuple[str, object, bool, str], ...] = (
        ("batches", grid.batches, len(grid.batches) >= 2, "two at least"),
        ("batches", grid.batches, all(1 <= batch <= slots for batch in grid.batches), f"1 to {slots} slots"),
        ("contexts", grid.contexts, len(grid.contexts) >= 2, "two at least"),
        ("contexts", grid.contexts, all(1 <= tokens <= most for tokens in grid.contexts), f"1 to {most} tokens"),
        ("steps", grid.steps, grid.steps >= 1, "1 or above"),
        ("rounds", grid.rounds, grid.rounds >= 1, "1 or above"),
        ("mixed_requests", grid.mixed_requests, grid.mixed_requests >= 0, "0 or above"),
    )
    for field, value, valid, allowed in checks:
        if not valid:
            raise InvalidValue(field, value, allowed)


@dataclass(frozen=True, slots=True)
class _Timed:
    """One step, or the mean of several."""

    kv_tokens: float
    step_s: float


def measure(
    engine: RolloutEngine, grid: Grid, *, seed: int, clock: Clock, wall_clock: Clock | None = None, place: int = 0
) -> Measurement:
    """Times ``engine``, which has a version loaded and holds no request before and after.

    ``clock`` gives the monotonic seconds of a step, and ``wall_clock`` those of progress, if it is another clock.
    ``place`` is the engine's index among engines timed together; all run the same mixed workload, and each has its own
    order of batches. Raises InvalidValue for a grid that the engine cannot run or an engine without a version, Conflict
    for one that holds requests.
    """
    wall_clock = wall_clock or clock
    capability = engine.capability
    check_grid(grid, capability.slots, capability.kv_tokens, capability.max_model_len_tokens)
    if held := engine.load().running + engine.load().waiting:
        raise Conflict("requests held", held, "0 while an engine is timed", why="is too much")
    if engine.version is None:
        raise InvalidValue("engine.version", MISSING, "that of loaded weights")
    mixed = mixed_workload(grid, seed)
    bench = _Bench(engine, clock, np.random.default_rng([seed, place]))
    begin_s = wall_clock()
    bench.time_prefills(1, grid.contexts[0])  # triggers the engine's one-time work
    bench.clear()
    decode: dict[tuple[int, int], list[_Timed]] = defaultdict(list)  # by context and batch
    drafts: dict[int, list[_Timed]] = defaultdict(list)  # by batch
    prefill: dict[int, list[_Timed]] = defaultdict(list)
    runs, walls_s = [], []
    for _ in range(grid.rounds):
        for tokens in grid.contexts:
            prefill[tokens] += bench.time_prefills(max(grid.batches), tokens)
            for batch, timed in bench.time_batches(grid):
                decode[tokens, batch] += timed
            bench.clear()
        if engine.draft_always(DRAFTED):
            bench.time_prefills(max(grid.batches), grid.contexts[0])
            for batch, timed in bench.time_batches(grid):
                drafts[batch] += timed
            bench.clear()
            engine.draft_always(0)
        if mixed:
            mixed_begin_s = wall_clock()
            runs.append(bench.time_mixed(mixed))
            walls_s.append(wall_clock() - mixed_begin_s)

    def counted(timed: Sequence[_Timed]) -> _Timed:
        return _mean(timed, *grid.counted)

    steps = [counted([_Timed(0, step_s) for step_s in times]) for times in zip(*runs, strict=True)]  # the same batches
    return Measurement(
        slots=capability.slots,
        decode=tuple(
            DecodeSample(batch, *astuple(counted(decode[tokens, batch])))
            for tokens in grid.contexts
            for batch in grid.batches
        ),
        prefill=tuple(PrefillSample(1, tokens, counted(timed).step_s) for tokens, timed in prefill.items()),
        drafts=tuple(DraftSample(batch, DRAFTED, *astuple(counted(timed))) for batch, timed in sorted(drafts.items())),
        mixed=mixed,
        mixed_s=sum(step.step_s for step in steps),
        mixed_wall_s=tuple(walls_s),
        wall_s=wall_clock() - begin_s,
    )


def keep_busy(engine: RolloutEngine, grid: Grid, *, seed: int, until: Callable[[], bool]) -> None:
    """Repeats the mixed workload while other engines are timed, and leaves the engine empty."""
    bench = _Bench(engine, lambda: 0.0, np.random.default_rng(seed))
    mixed = mixed_workload(grid, seed)
    while not until():
        bench.time_mixed(mixed, until)
    bench.clear()


def mixed_workload(grid: Grid, seed: int) -> tuple[MixedRequest, ...]:
    """Returns prompts and responses of very different lengths, all within the measured contexts."""
    rng, longest = np.random.default_rng(seed), max(grid.contexts)
    prompts = rng.integers(min(grid.contexts), longest // 3, grid.mixed_requests, endpoint=True)
    responses = np.clip(rng.lognormal(np.log(longest / 8), 0.8, grid.mixed_requests), 1, longest // 2)
    return tuple(MixedRequest(int(prompt), int(response)) for prompt, response in zip(prompts, responses, strict=True))


class _Bench:
    """The requests that an engine holds for a measurement, and their contexts."""

    def __init__(self, engine: RolloutEngine, clock: Clock, rng: np.random.Generator) -> None:
        self._engine, self._clock, self._rng = engine, clock, rng
        self._contexts: dict[str, int] = {}  # request -> tokens of prompt and response
        self._serial = 0

    def time_prefills(self, count: int, tokens: int) -> list[_Timed]:
        """Adds ``count`` requests, prefills each in its own step, and freezes them."""
        timed = []
        for _ in range(count):
            response_tokens = self._engine.capability.max_model_len_tokens - tokens
            request_id = self._add(MixedRequest(tokens, response_tokens))
            timed.append(_Timed(tokens, self._timed_step()))
            self._engine.freeze(request_id)
        return timed

    def time_batches(self, grid: Grid) -> Iterator[tuple[int, list[_Timed]]]:
        """Times steps of every batch size, in random order, with newly drawn requests."""
        for batch in self._rng.permutation(grid.batches).tolist():
            chosen = [str(name) for name in self._rng.choice(sorted(self._contexts), batch, replace=False)]
            for request_id in chosen:
                self._engine.thaw(request_id)
            for _ in range(SETTLING_STEPS):
                self._timed_step()
            timed = []
            for _ in range(grid.steps):
                kv_tokens = sum(self._contexts[request_id] for request_id in chosen)
                timed.append(_Timed(kv_tokens, self._timed_step()))
            for request_id in chosen:
                self._engine.freeze(request_id)
            yield batch, timed

    def time_mixed(self, requests: Sequence[MixedRequest], until: Callable[[], bool] = lambda: False) -> list[float]:
        """Runs all requests to their ends; those without a slot wait in the engine. Returns the time of each step."""
        for request in requests:
            self._add(request)
        times = []
        while self._engine.has_work() and not until():
            times.append(self._timed_step())
        return times

    def clear(self) -> None:
        for request_id in self._contexts:
            self._engine.remove(request_id)
        self._contexts.clear()

    def _add(self, request: MixedRequest) -> str:
        """Adds a request with a unique prompt, so that no prefix cache helps, and a response of exactly its length."""
        self._serial += 1
        request_id = f"profile-{self._serial}"
        version = self._engine.version
        assert version is not None
        prompt = self._rng.integers(0, self._engine.capability.vocab_size, request.prompt_tokens)
        sampling = SamplingParams(seed=self._serial, max_tokens=request.response_tokens, ignore_eos=True)
        self._engine.add(RequestSpec(request_id, version, tuple(prompt.tolist()), sampling))
        self._contexts[request_id] = request.prompt_tokens
        return request_id

    def _timed_step(self) -> float:
        begin_s = self._clock()
        self._step()
        return self._clock() - begin_s

    def _step(self) -> None:
        for delta in self._engine.step():
            self._contexts[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason is not None:
                del self._contexts[delta.request_id]


def _mean(timed: Sequence[_Timed], begin: float, end: float) -> _Timed:
    """Returns the mean of the sorted times between these shares, at least one, with their mean KV."""
    ordered = sorted(timed, key=lambda each: each.step_s)
    first = round(begin * len(ordered))
    part = ordered[first : max(first + 1, round(end * len(ordered)))]
    return _Timed(fmean(each.kv_tokens for each in part), fmean(each.step_s for each in part))
