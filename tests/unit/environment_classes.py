"""Environments of the tests."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from dora.agents.environment import End, Messages, Reply, Task

CHARACTERS = "characters"


class Echo:
    """Three turns; the reward is their number. Turns are rewarded with their numbers, too."""

    async def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.text or "abc"}]

    async def step(self, reply: Reply) -> Messages | End:
        if reply.turn == 2:
            return End(3.0, {"turns": 3.0}, {0: 0.5, 2: 1.5}, log=f"{len(reply.token_ids)} tokens")
        return [{"role": "user", "content": f"more {reply.turn}"}]


class HeldOut(Echo):
    """Tells whether its session is an evaluation: the reward is 1 if it is, else 0."""

    async def reset(self, task: Task) -> Messages:
        self.reward = float(task.is_evaluation)
        return await super().reset(task)

    async def step(self, reply: Reply) -> Messages | End:
        found = await super().step(reply)
        return End(self.reward, {"turns": 3.0}) if isinstance(found, End) else found


class Five:
    """Gymnasium's five-tuple: a turn is worth 1, and the third ends it."""

    async def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": "go"}]

    async def step(self, reply: Reply) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        return f"turn {reply.turn}", 1.0, reply.turn == 2, False, {}


class Calls:
    """One tool, and the result of each call of it."""

    tools: Sequence[Mapping[str, Any]] = [
        {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    ]

    async def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": "add"}]

    async def step(self, reply: Reply) -> Messages | End:
        if not reply.tool_calls:
            return End(1.0 if reply.turn else 0.0, log=reply.text)
        return [
            {"role": "tool", "tool_call_id": call.id, "content": str(sum(call.value()["numbers"]))}
            for call in reply.tool_calls
        ]


def echoes(spec: str) -> type[Echo]:
    """An adapter."""
    return Echo


class Stuck(Echo):
    """Its second step never ends. ``closed`` counts the instances that were closed."""

    closed = 0

    async def step(self, reply: Reply) -> Messages | End:
        if reply.turn:
            await asyncio.Event().wait()
        return await super().step(reply)

    async def close(self) -> None:
        type(self).closed += 1


class Broken(Echo):
    async def step(self, reply: Reply) -> Messages | End:
        raise RuntimeError("no\nsuch thing")


class Wrong(Echo):
    async def step(self, reply: Reply) -> Any:
        return {"role": "user"}


class Held(Echo):
    """Deterministic. Its second step never ends unless the file that GATE names exists."""

    deterministic = True

    async def prepare(self) -> None:
        self.is_prepared = True

    async def reset(self, task: Task) -> Messages:
        assert self.is_prepared
        return await super().reset(task)

    async def step(self, reply: Reply) -> Messages | End:
        if reply.turn == 1 and not await asyncio.to_thread(os.path.exists, os.environ["GATE"]):
            await asyncio.Event().wait()
        return await super().step(reply)


class NotAsync:
    def reset(self, task: Task) -> Messages:
        return []


class Faulty(Echo):
    """Does what its prompt's text says, in the method that it says: ``METHOD HOW``."""

    async def reset(self, task: Task) -> Messages:
        self.method, _, self.how = task.text.partition(" ")
        self.misbehave("reset")
        print(f"{task.text} begins", end="")
        return await super().reset(task)

    async def step(self, reply: Reply) -> Messages | End:
        if reply.turn == 1:
            self.misbehave("step")
            await asyncio.gather(self.deeper())
        return await super().step(reply)

    async def deeper(self) -> None:
        self.misbehave("task")

    def misbehave(self, method: str) -> None:
        if method != self.method:
            return
        if self.how == "exits":
            sys.exit(3)
        if self.how == "leaves":
            os._exit(4)
        if self.how == "crashes":
            ctypes.string_at(0)
        if self.how == "blocks":
            time.sleep(1000)
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)


class Replayed(Faulty):
    deterministic = True


class Sleeper(Echo):
    async def reset(self, task: Task) -> Messages:
        await asyncio.sleep(1000)
        return await super().reset(task)


class Odd(Five):
    """Returns values of numpy, and an info that is no JSON."""

    async def step(self, reply: Reply) -> Any:
        info = {"state": object(), "components": {1: np.int64(2), "b": np.float32(0.5)}}
        return f"turn {reply.turn}", np.float64(0.5), np.bool_(reply.turn == 2), False, info


class Mixed(Faulty):
    """Of five prompts one exits at once, one leaves later and one crashes later; the others behave."""

    async def reset(self, task: Task) -> Messages:
        what = ("reset exits", "step leaves", "task crashes", "behaves", "behaves")[crc32(task.prompt_id.encode()) % 5]
        return await super().reset(replace(task, text=what))
