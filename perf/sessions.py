"""Sessions of many turns on real engines: tokens that are prefilled twice, cached share, and what a turn costs.

    python perf/sessions.py --model tiny --turns 50 --json

Two workers, window 3. Sessions of version 0 run beside single answers, which the trainer takes: two versions come
meanwhile, and workers are given to them. Half-way one worker is killed while every session waits for its tool. Its
sessions are counted apart: they must be prefilled again.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import aclosing
from typing import Any

from rich.console import Console
from rich.table import Table

import dora
from dora.client import Operator
from dora.client.sessions import Session
from dora.config import load_config
from dora.orchestrator.main import ServiceHandle, serve

SESSIONS = 8
GIVEN = [5, 6, 7]
SAMPLED = 4  # tokens a turn
LONG = 64  # tokens of the last turn, by which the time of a decode step is measured
COMMITS = 2


class Run:
    """The state that all sessions share. A session that has half of its turns waits until all have."""

    def __init__(self, turns: int, pause_s: float = 0.0) -> None:
        """``pause_s``: mean time of a tool."""
        self.turns = turns
        self._pause_s = pause_s
        self._random = random.Random(0)
        self.waiting = 0
        self.killed = asyncio.Event()
        self.half = asyncio.Event()
        self.context_tokens = 0  # of all turns at their begin: what an engine without caches would prefill
        self.prefilled_tokens = 0  # each token once
        self.first_ms: list[float] = []
        self.step_ms: list[float] = []
        self.ended = 0

    async def drive(self, session: Session) -> None:
        context = len(session.prompt_token_ids) + len(session.response)
        self.prefilled_tokens += len(session.prompt_token_ids)
        self.context_tokens += len(session.prompt_token_ids)
        for number in range(1, self.turns):
            if number == self.turns // 2:
                self.waiting += 1
                if self.waiting == SESSIONS:
                    self.half.set()
                await self.killed.wait()
            await asyncio.sleep(self._random.uniform(0.0, 2.0 * self._pause_s))
            context += len(GIVEN)
            self.context_tokens += context
            self.prefilled_tokens += len(GIVEN)
            context += await self._turn(session, LONG if number == self.turns - 1 else SAMPLED)
        await session.end(1.0)
        self.ended += 1

    async def _turn(self, session: Session, max_tokens: int) -> int:
        began_s, times, tokens, pieces = time.perf_counter(), list[float](), 0, []
        async with aclosing(session.stream(GIVEN, max_tokens=max_tokens)) as stream:
            async for piece in stream:
                tokens += len(piece.token_ids)
                pieces.append(piece)
                times.append(time.perf_counter())
        self.first_ms.append((times[0] - began_s) * 1e3)
        if max_tokens == LONG and tokens > 1:
            self.step_ms.append((times[-1] - times[0]) * 1e3 / (tokens - 1))
        session.turn = pieces[-1].__class__(session.turn.number + 1, *list(_parts(pieces[-1]))[1:])
        return tokens


def _parts(turn: Any) -> list[Any]:
    return [turn.number, turn.token_ids, turn.logprobs, turn.finish_reason, turn.stop]


async def measured(model: str, engine: str, turns: int, pause_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = 64 + turns * (len(GIVEN) + SAMPLED) + LONG
        tree = {
            "model": model, "prompts": "none", "reward.function": "dora.rewards.tiny:score", "window.size": 3,
            "service.listen": "127.0.0.1:0", "service.state": folder, "workers.engine": engine, "workers.count": 2,
            "workers.slots": 16, "workers.kv_tokens": 16 * 1024 + 8 * context, "workers.report_period_ms": 20,
            "workers.max_model_len_tokens": max(256, context), "rollout.max_tokens": SAMPLED,
            "rollout.ignore_eos": True, "kv.pool_mb": 256,
        }  # fmt: skip
        config = load_config(None, [f"{key}={_toml(value)}" for key, value in tree.items()])
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop, progress=lambda _: None))
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            return await _of_service(ready.result(), Run(turns, pause_s))
        finally:
            stop.set()
            await task


async def _of_service(handle: ServiceHandle, run: Run) -> dict[str, Any]:
    address, token = handle.address, handle.token
    async with (
        dora.Prompts(address, token) as prompts,
        dora.Trainer(address, token=token) as trainer,
        dora.Sessions(address, token) as sessions,
        Operator(address, token) as operator,
    ):
        agents = [{"text": "ab" * 4, "prompt_id": f"s{n}", "group_size": 4, "environment": "perf"} for n in range(2)]
        await prompts.submit(agents)
        verifier = {"characters": "ab"}
        await prompts.submit(
            [{"text": "ab", "prompt_id": f"a{n}", "group_size": 4, "verifier": verifier} for n in range(40)]
        )
        driving = asyncio.create_task(sessions.drive("perf", run.drive))
        training = asyncio.create_task(_train(handle, trainer))
        await run.half.wait()
        before = await operator.status()
        killed_sessions = await _kill_one(operator)
        run.killed.set()
        while run.ended < SESSIONS:
            if driving.done():
                driving.result()
            await asyncio.sleep(0.1)
        await training
        after = await operator.status()
        driving.cancel()
    return _figures(run, before.counters, after.counters, killed_sessions)


async def _train(handle: ServiceHandle, trainer: Any) -> None:
    done = 0
    async for step in trainer.steps(groups=2):
        async for _ in step:
            pass
        await step.commit(weights=handle.model, wait=True)
        done += 1
        if done > COMMITS:  # the last one has the sessions
            break


async def _kill_one(operator: Operator) -> int:
    """Kills the worker of version 0 with the most sessions. Returns how many it has."""
    idle = (await operator.trajectories("idle")).trajectories
    held: dict[str, int] = {}
    for each in idle:
        held[each.worker] = held.get(each.worker, 0) + 1
    status = await operator.status()
    pids = {worker.worker_id: worker.pid for worker in status.workers}
    victim = max((name for name in held if name in pids), key=lambda name: held[name], default=next(iter(pids)))
    os.kill(pids[victim], signal.SIGKILL)
    return held.get(victim, 0)


def _figures(run: Run, before: Any, after: Any, killed_sessions: int) -> dict[str, Any]:
    twice = before["tokens_reprefilled"]
    of_killed = after["tokens_reprefilled"] - before["tokens_reprefilled"]
    step_ms = statistics.median(run.step_ms)
    return {
        "sessions": SESSIONS,
        "turns": run.turns,
        "context_tokens": run.context_tokens,
        "prefilled_twice": twice,
        "prefilled_twice_after_kill": of_killed,
        "sessions_of_killed_worker": killed_sessions,
        "turns_resumed": after["turns_resumed"],
        "turns_reprefilled": after["turns_reprefilled"],
        "cached_share": 1.0 - (run.prefilled_tokens + twice + of_killed) / run.context_tokens,
        "first_token_ms_p50": statistics.median(run.first_ms),
        "decode_step_ms": step_ms,
        "turn_overhead_steps_p50": statistics.median(run.first_ms) / step_ms,
    }


def _toml(value: Any) -> str:
    return json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="tiny", help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder"
    )
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=0.0, help="mean time between a turn and the next one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measured(options.model, options.engine, options.turns, options.pause_s))
    if options.json:
        print(json.dumps(found))
        return
    table = Table("figure", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
