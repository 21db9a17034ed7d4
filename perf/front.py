"""One front's capacity: chats that stream at once, tokens a second for each second of its processor, time to a token.

    python perf/front.py --streams 500 --json

The front is a process of its own over a service in memory, which samples for every stream at ``--rate`` tokens a second
and reports twenty times a second, as workers do. The clients are in another process and read every event.
"""

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dora.agents.front.app import serving
from dora.agents.front.gateway import FrontLimits, Gateway
from dora.agents.front.listening import INHERITED, listening_socket, url_of
from dora.agents.front.model import served_model
from dora.agents.front.source import LiveVersions, Sampled, SessionOpening
from dora.errors import NotFound
from dora.models import resolve_model

REPORTS_PER_S = 20
TEXT = "the quick brown fox jumps over the lazy dog, "


@dataclass(eq=False)
class MemorySession:
    session_id: str
    rate: float
    token_ids: Sequence[int]  # that it samples, again and again
    version: int = 0
    turn: int = 0
    last: Sampled = field(default_factory=lambda: Sampled((), ()))
    given_name: str = ""
    is_over: bool = False

    async def stream(
        self, token_ids: Sequence[int], *, after_turn: int | None, max_tokens: int = 0, **_: Any
    ) -> AsyncGenerator[Sampled]:
        began_s, sent, source = time.monotonic(), 0, itertools.cycle(self.token_ids)
        while sent < max_tokens:
            due = min(max_tokens, 1 + int((time.monotonic() - began_s) * self.rate))
            ids = tuple(itertools.islice(source, due - sent))
            sent = due
            yield Sampled(ids, (-1.0,) * len(ids), "length" if sent == max_tokens else None)
            await asyncio.sleep(1 / REPORTS_PER_S)

    async def end(self, reward: float | None = None, **_: Any) -> None: ...
    async def give_up(self, reason: str) -> None: ...


@dataclass
class MemoryService:
    rate: float
    sampled: Sequence[int]
    numbers: Any = field(default_factory=itertools.count)

    async def live(self) -> LiveVersions:
        return LiveVersions("tiny", 0, (0,))

    async def find(self, group: str, size: int) -> list[MemorySession]:
        raise NotFound("group", group, "one that was opened")

    async def open(self, opening: SessionOpening) -> list[MemorySession]:
        return [self._session() for _ in range(opening.size)]

    def _session(self) -> MemorySession:
        session = MemorySession(f"s{next(self.numbers)}", self.rate, self.sampled)
        session.token_ids = self.sampled
        return session


async def serve(listen: str, folder: Path, rate: float) -> None:
    model = await asyncio.to_thread(served_model, folder)
    service: Any = MemoryService(rate, model.tokenizer.encode(TEXT, special_tokens=False))
    door = Gateway(service, model, limits=FrontLimits(in_flight=1 << 20, connections=1 << 16))
    async with serving(door, listening_socket(listen, has_key=False)):
        await asyncio.Event().wait()


async def read(http: aiohttp.ClientSession, url: str, tokens: int, first_s: list[float]) -> int:
    """One chat. Returns the number of its events that have text."""
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": tokens, "stream": True}
    asked_s, events = time.monotonic(), 0
    async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if b'"content":"' in line:
                events += 1
                if events == 2:  # the first one is empty
                    first_s.append(time.monotonic() - asked_s)
    return events


async def measure(url: str, front: psutil.Process, streams: int, tokens: int) -> dict[str, float]:
    first_s: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await read(http, url, 2, [])
        before, began_s = front.cpu_times(), time.monotonic()
        await asyncio.gather(*(read(http, url, tokens, first_s) for _ in range(streams)))
        took_s, after = time.monotonic() - began_s, front.cpu_times()
    busy_s = after.user + after.system - before.user - before.system
    return {
        "streams": streams,
        "tokens_per_s": streams * tokens / took_s,
        "tokens_per_core_s": streams * tokens / busy_s,
        "core_use": busy_s / took_s,
        "first_token_ms_p50": 1e3 * statistics.median(first_s),
        "first_token_ms_max": 1e3 * max(first_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=250, help="of each answer")
    parser.add_argument("--rate", type=float, default=25.0, help="tokens a second of each stream")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--listen", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    if options.listen:
        asyncio.run(serve(options.listen, folder, options.rate))
        return
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        command = [sys.executable, __file__, "--listen", f"{INHERITED}{listening.fileno()}"]
        command += ["--model", options.model, "--rate", str(options.rate)]
        with subprocess.Popen(command, pass_fds=(listening.fileno(),)) as process:
            try:
                front = psutil.Process(process.pid)
                found = asyncio.run(measure(url_of(listening), front, options.streams, options.tokens))
            finally:
                process.terminate()
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<20} {value:,.1f}")


if __name__ == "__main__":
    main()
