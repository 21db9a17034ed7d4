"""Whole conversations through a front: histories that are given anew, and tokens that differ from the service's.

    python -m perf.front_chats --json

Clients converse over HTTP in the styles of well-known chat templates, with reasoning that templates drop, calls whose
arguments come back written in another way, and merges of the tokenizer over the boundaries of messages. The service is
one in memory, whose policy samples tokens that the tokenizer would not choose. What it holds of a session is the
record.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from dora.agents.front.source import Sampled
from tests.unit.chat_templates import STYLES
from tests.unit.chats import Conversation
from tests.unit.front_service import FakeService, front


class HttpConversation(Conversation):
    """A conversation whose session is behind a front. ``mismatches``: replies whose tokens are not the record's."""

    def __init__(self, style: str, seed: int, service: FakeService) -> None:
        super().__init__(style, seed)
        self.service = service
        self.mismatches = 0
        service.sample = self.sampled  # type: ignore[method-assign]

    async def sampled(self, path: Sequence[int], sampling: Any, max_tokens: int) -> AsyncIterator[Sampled]:
        """Samples an answer for the front, as the service does."""
        token_ids = tuple(self.sample())
        reason: Any = "stop" if token_ids and token_ids[-1] in self.chat.ends() else "length"
        yield Sampled(token_ids, (-0.5,) * len(token_ids), reason)

    async def turn(self, http: aiohttp.ClientSession, url: str) -> None:
        """One request and its reply, which must continue the tokens before it."""
        self.user()
        body = {"model": "policy", "messages": self.messages, "tools": self.tools, "return_token_ids": True}
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            reply = await response.json()
        (choice,) = reply["choices"]
        told, before = [*reply["prompt_token_ids"], *choice["token_ids"]], self.tokens
        is_same = told == self.service.sessions[-1].paths[-1] and told[: len(before)] == before
        self.mismatches += not is_same
        self.tokens = told
        self.messages.append(self.repeated(choice["message"]))


async def converse(style: str, count: int, turns: int) -> dict[str, int]:
    """Plays conversations of one template, one after the other."""
    found = {"prefix_breaks": 0, "token_mismatch": 0, "forks": 0, "tokens": 0}
    async with front(style) as (base, service, door), aiohttp.ClientSession() as http:
        for seed in range(count):
            conversation, url = HttpConversation(style, seed, service), f"{base}/sessions/{style}-{seed}"
            for _ in range(turns):
                await conversation.turn(http, url)
            async with http.get(url) as response:
                found["forks"] += len((await response.json())["branches"]) - 1
            async with http.post(f"{url}/close", json={"reward": 1.0}) as response:
                assert response.status == 200, await response.text()
            found["token_mismatch"] += conversation.mismatches
            found["tokens"] += len(conversation.tokens)
            service.sessions.clear()
        found["prefix_breaks"] = door.prefix_breaks.total()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000, help="at least so many, evenly over the templates")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    each, began_s = -(-options.conversations // len(STYLES)), time.monotonic()
    by_style = {style: asyncio.run(converse(style, each, options.turns)) for style in STYLES}
    total = {name: sum(found[name] for found in by_style.values()) for name in by_style["chatml"]}
    run = {"conversations": each * len(STYLES), "turns": options.turns, "templates": len(STYLES)}
    report: dict[str, Any] = {**total, **run, "took_s": time.monotonic() - began_s}
    report |= {"ok": not (total["prefix_breaks"] or total["token_mismatch"] or total["forks"])}
    if options.json:
        print(json.dumps({**report, "by_template": by_style}))
        return
    for name, value in report.items():
        print(f"{name:<20} {value:,.0f}")


if __name__ == "__main__":
    main()
