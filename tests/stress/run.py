"""One model's run: a service, a trainer, forced re-balancing, and kills; then what was left and what was recorded."""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora.client import Operator
from dora.config import Config
from dora.errors import Conflict, NotFound
from dora.host.command import pool_id_of
from dora.host.launcher import LOCAL
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Role
from tests.chaos.cast import Telling
from tests.service import configured, running, until
from tests.stress.load import GROUP_SIZE, LONGEST_TOKENS, REWARD

WORKERS: Final = 3
WINDOW: Final = 3
SLOTS: Final = 12
KV_TOKENS: Final = 640  # of one worker: little more than half of what twelve of these requests come to
BLOCK_TOKENS: Final = 32
CONTEXT_TOKENS: Final = 448
WATCH_PERIOD_MS: Final = 250
MOVES_ASKED: Final = 8  # by hand, with each forced re-balance
IDLE_TIMEOUT_S: Final = 60.0
LINE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stress:
    """The parameters of one run."""

    model: Path
    prompts: Path
    folder: Path  # for record and logs
    groups: int  # of the run
    groups_per_step: int
    worker_kills: int
    trainer_kills: int
    rebalance_s: float  # between two that are forced
    timeout_s: float

    @property
    def record(self) -> Path:
        return self.folder / "record"

    def config(self) -> Config:
        return configured(
            self.model,
            record=str(self.record),
            prompts__source=str(self.prompts),
            reward__function=REWARD,
            window__size=WINDOW,
            rollout__group_size=GROUP_SIZE,
            rollout__max_tokens=LONGEST_TOKENS,
            workers__count=WORKERS,
            workers__slots=SLOTS,
            workers__kv_tokens=KV_TOKENS,
            workers__block_tokens=BLOCK_TOKENS,
            workers__max_model_len_tokens=CONTEXT_TOKENS,
            kv__pool_mb=64,
        )


@dataclass
class Seen:
    """The observations of a run. ``trained``: the group ids of each step whose commit a trainer knew to be done."""

    trained: list[tuple[int, list[str]]] = field(default_factory=list)
    worker_kills: int = 0
    trainer_kills: int = 0
    rebalances: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    kv_blocks_left: int = 0
    parked_left: int = 0


Tell = Callable[[pb.Status, Seen], None]


async def driven(stress: Stress, tell: Tell) -> Seen:
    """Trains on all prompts, through all kills. Raises TimeoutError where it takes too long, AssertionError where a
    trainer ends that nobody killed."""
    seen = Seen()
    async with (
        running(stress.config()) as handle,
        Operator(handle.address, handle.token) as operator,
        asyncio.timeout(stress.timeout_s),
    ):
        trainer = _Trainer(stress, handle, seen)
        token, log = handle.tokens[Role.SUBMITTER], stress.folder / "environment.log"
        async with (
            aclosing(Telling("environment", ["tests.tools", handle.address], token, log)) as environment,
            asyncio.TaskGroup() as works,
        ):
            environment.begin()
            watching = works.create_task(_watch(operator, trainer, stress, seen, tell))
            forcing = works.create_task(_force(operator, stress.rebalance_s, seen))
            await trainer.run()
            watching.cancel()
            forcing.cancel()
        status = await _at_rest(operator)
        seen.counters = dict(status.counters)
        used_tokens = sum(round(worker.kv_use * KV_TOKENS) for worker in status.workers)
        seen.kv_blocks_left = -(-used_tokens // BLOCK_TOKENS)
        seen.parked_left = sum(pool.parked + pool.kv_tokens + pool.memory_bytes for pool in status.pools)
        tell(status, seen)
    return seen


class _Trainer:
    """The reference trainer, in one process after another: one that was killed is followed by the next."""

    def __init__(self, stress: Stress, handle: ServiceHandle, seen: Seen) -> None:
        self._argv = [sys.executable, "-m", "dora.trainers.grpo", "--json", "--address", handle.address]
        self._argv += ["--groups", str(stress.groups_per_step), "--lr", "1e-3"]
        self._environment = {**os.environ, "DORA_TOKEN": handle.tokens[Role.TRAINER], "OMP_NUM_THREADS": "1"}
        self._log = stress.folder / "trainer.log"
        self._seen = seen
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Until the prompts are exhausted."""
        try:
            while (code := await self._run_one()) == -signal.SIGKILL:
                self._seen.trainer_kills += 1
        finally:
            self.kill()
        assert code == 0, f"the trainer ended with {code}: {self._log.read_text()[-2000:]}"

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run_one(self) -> int:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LINE_BYTES_MAX
            )
        assert self._process.stdout is not None
        said: list[tuple[int, list[str]]] = []
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # else it was killed as it wrote
                step = json.loads(line)
                said.append((step["step"], step["group_ids"]))
        code = await self._process.wait()
        # a commit goes on beside what follows it, and is done when the next step is: one who is killed had not all done
        self._seen.trained += said if code == 0 else said[:-1]
        return code


async def _force(operator: Operator, period_s: float, seen: Seen) -> None:
    """Re-balances; and moves and parks some requests by hand each time: a plan moves only what it must."""
    while True:
        await asyncio.sleep(period_s)
        await operator.rebalance()
        seen.rebalances += 1
        await _ask_moves(operator)


async def _ask_moves(operator: Operator) -> None:
    """Of requests that decode, and of sessions that wait for their tools, those with the fewest tokens, which have the
    most before them, by turns to another worker and to the pool."""
    status = await operator.status()
    running, idle = [(await operator.trajectories(state, limit=1000)).trajectories for state in ("running", "idle")]
    decoding, waiting = (
        sorted((each for each in listed if each.tokens), key=lambda each: each.tokens) for listed in (running, idle)
    )
    for number, request in enumerate((*decoding[:MOVES_ASKED], *waiting[:MOVES_ASKED])):
        target = _emptiest(status, request) if number % 2 == 0 else None
        with suppress(Conflict, NotFound):  # it has ended or changed hands since, or there is no room
            await operator.migrate(request.trajectory_id, target or pool_id_of(LOCAL))


def _emptiest(status: pb.Status, request: pb.TrajectoryStatus) -> str | None:
    """The other worker of its version with the most KV left."""
    hosts = [worker for worker in status.workers if worker.state == "ready" and worker.version == request.version]
    others = (worker for worker in hosts if worker.worker_id != request.worker)
    return min(others, key=lambda worker: worker.kv_use, default=pb.WorkerStatus()).worker_id or None


async def _watch(operator: Operator, trainer: _Trainer, stress: Stress, seen: Seen, tell: Tell) -> None:
    """Tells every status, and kills whose turn it is, spread evenly over the groups that steps take."""
    worker_kills, trainer_kills = (
        _moments(kills, stress.groups, late)
        for kills, late in ((stress.worker_kills, 0.5), (stress.trainer_kills, 0.0))
    )
    next_worker, next_trainer = next(worker_kills), next(trainer_kills)
    async for status in operator.watch(WATCH_PERIOD_MS):
        tell(status, seen)
        taken = status.counters["groups_taken"]
        if taken >= next_trainer:
            trainer.kill()
            next_trainer = next(trainer_kills)
        if taken >= next_worker and _kill_busiest(status, seen):
            next_worker = next(worker_kills)


def _moments(kills: int, groups: int, late: float) -> Iterator[float]:
    """Returns, for each kill, the number of groups taken by then; infinite after the last one."""
    apart = groups / (kills + 1)
    return itertools.chain((apart * (number + 1 - late) for number in range(kills)), itertools.repeat(float("inf")))


def _kill_busiest(status: pb.Status, seen: Seen) -> bool:
    """Whether there was a worker at work."""
    busy = [worker for worker in status.workers if worker.running and worker.pid]
    if not busy:
        return False
    os.kill(max(busy, key=lambda worker: worker.running).pid, signal.SIGKILL)
    seen.worker_kills += 1
    return True


async def _at_rest(operator: Operator) -> pb.Status:
    """The status once all KV is free, or as it is after a minute."""
    status = await operator.status()
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            status = await until(operator, _is_empty)
    except TimeoutError:
        status = await operator.status()
    return status


def _is_empty(status: pb.Status) -> bool:
    is_ready = all(worker.state == "ready" for worker in status.workers)
    return (
        is_ready and not any(worker.kv_use for worker in status.workers) and not any(p.kv_tokens for p in status.pools)
    )
