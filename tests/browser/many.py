"""A service of many simulated workers: its state follows from a count of seconds. Its calls are guarded."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

import grpc
import numpy as np

from dora.errors import NotFound
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import server_options
from dora.rpc.dora_pb2_grpc import OperatorServicer, add_OperatorServicer_to_server
from dora.rpc.interceptor import server_interceptors
from dora.rpc.roles import ServiceTokens

WINDOW: Final = 4
STEP_S: Final = 24  # seconds from one commit to the next
GROUPS: Final = 64
TOKENS_SHOWN: Final = 2400  # of a trajectory's response
MOVES_EACH_S: Final = 8
MOVES_EACH_S_OF_A_WORKER: Final = 0.01
STATES: Final = ("waiting", "running", "moving", "parked", "idle", "finished", "leased")


@dataclass
class World:
    """``second`` is what has passed. ``now``: the wall-clock time of its end."""

    workers: int
    trajectories: int = 100_000
    model: str = "/models/simulated-8b"
    now: float = field(default_factory=time.time)
    text: tuple[int, ...] = ()  # token ids of what trajectories say, again and again
    asked: list[str] = field(default_factory=list)  # actions

    def version_of(self, worker: int, second: int) -> tuple[int, str]:
        """Workers take a new version one after the other, in the first half of a step; each loads for 3 s."""
        newest, into = divmod(second, STEP_S)
        share = (worker * 0.6180339887) % 1.0
        newer = newest - int(share * 3)
        since = into - share * STEP_S / 2
        if since < 0:
            return max(0, newer - 1), "vacating" if since > -1 else "ready"
        return max(0, newer), "loading" if since < 3 and newer > 0 else "ready"

    def status(self, second: int, ahead: int = 0) -> pb.Status:
        """``ahead``: seconds up to the present one, for the times of steps and moves."""
        at, newest, into = self.now - ahead, second // STEP_S, second % STEP_S
        random = Random(second)
        versions = range(max(0, newest - WINDOW + 1), newest + 1)
        status = pb.Status(
            model=self.model, uptime_s=second, window_versions=WINDOW, groups_per_step=GROUPS, filling_step=newest,
            filling_left=GROUPS - int(GROUPS * into / STEP_S), newest_version=newest, trainer="grpo",
            prompts_queued=400 + second % 37, dp_groups_to_add=0,
            counters={"groups_admitted": second * 3, "groups_trained": newest * GROUPS, "migrations_kv": second * 2,
                      "blackout_ms_p50": 11.5, "workers_lost": 1, "c1_violations": 0, "groups_lost": 0},
        )  # fmt: skip
        for version in versions:
            age = newest - version
            status.versions.add(
                version=version, deadline_step=version + WINDOW - 1, newest=not age, state="published",
                workers=self.workers // 4, groups_open=max(6, 60 - 14 * age + into * (1 if not age else -1)),
                groups_finished=min(14, 3 + 4 * age), requests_running=self.workers * 4 // (age + 1),
                requests_waiting=9 * age,
            )  # fmt: skip
        for index in range(self.workers):
            version, state = self.version_of(index, second)
            kv = 0.5 + 0.45 * np.sin(second / 40 + index)
            status.workers.add(
                worker_id=f"w{index}", epoch=1, state=state, version=version, target_version=version,
                running=random.randrange(9, 17), waiting=0, slots=16, kv_use=max(0.02, float(kv)),
                tokens_per_s=random.uniform(800, 1200) if state == "ready" else 0.0, pid=1000 + index,
                host=f"gpu-{index // 8}",
            )  # fmt: skip
        if self.workers > 2:
            lost = status.workers[-1]
            lost.Clear()
            lost.worker_id, lost.state, lost.version, lost.reason = (
                f"w{self.workers - 1}",
                "lost",
                -1,
                "silent for 61 s",
            )
        status.pools.add(
            pool_id="local/pool", state="ready", parked=40, memory_bytes=(30 + second % 30) << 30,
            memory_most_bytes=64 << 30, kv_tokens=10, capacity_tokens=20,
        )  # fmt: skip
        self._add_news(status, second, at, random)
        return status

    def parts_of(self, step: int) -> dict[str, float]:
        """What a step's time went to. Its sum is STEP_S."""
        parts = {
            "first": 2.0, "sampling": 4 + np.sin(step / 3), "tail": 3 + 2 * np.sin(step / 5), "queue": 0.4,
            "moves": 0.5 + 0.4 * np.sin(step), "tools": 2 + np.cos(step / 4), "rewards": 0.6, "publishing": 0.9,
            "asking": 0.5,
        }  # fmt: skip
        return {**parts, "training": STEP_S - sum(parts.values())}

    def _add_news(self, status: pb.Status, second: int, at: float, random: Random) -> None:
        step = second // STEP_S - 1
        if step >= 0 and second % STEP_S == 0:
            status.steps.add(
                step=step, committed_at=at, mean_reward=0.8 - 0.6 / (1 + step / 20) + random.uniform(-0.03, 0.03),
                staleness_mean=1.0 + 0.4 * np.sin(step), staleness_max=min(step, WINDOW - 1), tokens=120_000,
                took_s=STEP_S, waited_s=4 + 3 * np.sin(step / 3), metrics={"loss": 0.1, "step_s": 16.0},
                parts_s=self.parts_of(step),
            )  # fmt: skip
        rate = min(MOVES_EACH_S, self.workers * MOVES_EACH_S_OF_A_WORKER)
        for number in range(int(rate) + (random.random() < rate % 1)):
            source, near = random.randrange(self.workers), random.randrange(1, 40)
            target = f"w{(source + near) % self.workers}" if random.random() < 0.8 else "local/pool"
            status.moves.add(
                number=second * MOVES_EACH_S + number, at=at - random.random(), trajectory_id=f"g{second}.{number}",
                source=f"w{source}", target=target, kind="move" if target != "local/pool" else "park",
                reason="pressure", result="done" if random.random() < 0.93 else "failed",
            )  # fmt: skip

    def row(self, index: int) -> pb.TrajectoryStatus:
        group, sample = divmod(index, 8)
        return pb.TrajectoryStatus(
            trajectory_id=f"g{group}.{sample}", group_id=f"g{group}", prompt_id=f"prompt-{group}",
            state=STATES[index % 7], version=index % 4, deadline_step=9, worker=f"w{index % self.workers}",
            tokens=index % 4000, max_tokens=4096, age_s=index / 10, moves=index % 3,
        )  # fmt: skip

    def shown(self, asked: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
        """A session of four turns, which three workers sampled."""
        if not asked.trajectory_id.startswith("g"):
            raise NotFound("trajectory_id", asked.trajectory_id, "a trajectory that is admitted and not committed")
        random, prompt, turns, given = np.random.default_rng(7), 24, 4, 12
        each = TOKENS_SHOWN // turns
        sampled = np.tile(np.arange(each) >= given, turns)
        sampled[:given] = True  # the prompt begins the first turn
        ids = np.resize(np.array(self.text or (5, 6, 7)), prompt + TOKENS_SHOWN)
        logprobs = np.where(sampled, -(random.pareto(1.3, TOKENS_SHOWN) * 0.25), 0.0)
        chosen = slice(asked.first_token, asked.first_token + (asked.tokens or 4096))
        row = self.row(7)
        row.trajectory_id, row.tokens, row.state = asked.trajectory_id, TOKENS_SHOWN, "idle"
        return pb.ShownTrajectory(
            status=row, task_id="maze", started_at=self.now - 90, finished_at=self.now, finish_reason="stop",
            reward=0.75, reward_components={"format": 1.0, "exit": 0.5}, turn_rewards={1: 0.25, 3: 0.5},
            worker_history=[
                pb.Segment(worker="w7", first_token=0, last_token=699, arrival="new", version=3),
                pb.Segment(worker="w12", first_token=700, last_token=1399, arrival="migrated", version=3),
                pb.Segment(worker="w3", first_token=1400, last_token=TOKENS_SHOWN - 1, arrival="parked", version=3),
            ],
            arrivals=[
                pb.ShownArrival(at=self.now - 89),
                pb.ShownArrival(at=self.now - 64, left_at=self.now - 65),
                pb.ShownArrival(at=self.now - 46, left_at=self.now - 50),
            ],
            turns=[
                pb.ShownTurn(
                    turn=turn, at=self.now - 90 + 20 * turn, given_tokens=given if turn else 0,
                    first_token=turn * each + (given if turn else 0), sampled_tokens=each - (given if turn else 0),
                    name="tool" if turn else "", after_turn=max(0, turn - 1),
                    ended_at=self.now - 78 + 21 * turn, begun_at=self.now - 89 + 20 * turn + 3 * (turn == 2),
                )
                for turn in range(turns)
            ],
            prompt_tokens=prompt, total_tokens=prompt + TOKENS_SHOWN, first_token=asked.first_token,
            token_ids=ids[chosen].astype("<i4").tobytes(),
            logprobs=np.concatenate([np.zeros(prompt), logprobs])[chosen].astype("<f4").tobytes(),
            is_sampled=np.concatenate([np.zeros(prompt, bool), sampled])[chosen].astype("u1").tobytes(),
        )  # fmt: skip


class SimulatedOperator(OperatorServicer):
    def __init__(self, world: World, second: int, period_s: float) -> None:
        self._world, self._second, self._period_s = world, second, period_s

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.Status:
        return self._world.status(self._second)

    async def WatchStatus(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Status]:
        while True:
            self._second += 1
            self._world.now = time.time()
            yield self._world.status(self._second)
            await asyncio.sleep(self._period_s)

    async def ListTrajectories(
        self, request: pb.TrajectoriesRequest, context: grpc.aio.ServicerContext
    ) -> pb.TrajectoriesReply:
        total = self._world.trajectories
        shown = range(request.offset, min(total, request.offset + request.limit))
        return pb.TrajectoriesReply(trajectories=[self._world.row(index) for index in shown], total=total)

    async def ShowTrajectory(
        self, request: pb.ShowTrajectoryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ShownTrajectory:
        return self._world.shown(request)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        self._world.asked.append(f"drain {request.worker_id}")
        return pb.OperatorReply(message=f"{request.worker_id} is draining and will leave", moves=4)

    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        self._world.asked.append(f"scale {request.workers}")
        return pb.OperatorReply(message=f"{request.workers} workers")

    async def Rebalance(self, request: pb.RebalanceRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        self._world.asked.append("rebalance")
        return pb.OperatorReply(message="a re-balancing cycle was run", moves=2, loads=1)


@asynccontextmanager
async def simulated(world: World, tokens: ServiceTokens, second: int = 0, period_s: float = 1.0) -> AsyncIterator[str]:
    """Yields the address of a service. ``second``: that have passed; one more with each status."""
    server = grpc.aio.server(interceptors=server_interceptors(tokens), options=server_options())
    add_OperatorServicer_to_server(SimulatedOperator(world, second, period_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
