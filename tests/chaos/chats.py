"""Agents with OpenAI's own client that chat through a front: ``python -m tests.chaos.chats URL``.

A chat is a session by X-Session-ID, and each of its calls has an Idempotency-Key. The front may be killed at any time;
a call that has failed is made again. The process prints a line of JSON at each moment, and ends when the service takes
no more sessions. The log of a chat's verdict is a digest of what this client has seen: ``wrong`` compares the record.
"""

import asyncio
import hashlib
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import aiohttp
import openai
from openai import AsyncOpenAI

from dora.data.trajectory import Trajectory
from tests.session_audit import spans
from tests.session_script import turns_of
from tests.tools import say

PREFIX: Final = "chat"  # of the ids
AT_ONCE: Final = 3
PAUSE_MOST_S: Final = 0.5
RETRY_S: Final = 0.1
TURN_TOKENS: Final = 60
SAMPLED: Final = {"max_tokens": TURN_TOKENS, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
AGAIN: Final = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError, aiohttp.ClientError)
Turn = list[int]  # all tokens up to its end


class BrokenOff(Exception):
    """A stream has ended before its turn, or the front has refused for a while."""


def digest(turns: Sequence[Turn]) -> str:
    return hashlib.blake2s(json.dumps(sorted(turns)).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------ its audit


def is_chat(prompt_id: str) -> bool:
    return prompt_id.startswith(PREFIX)


def sampled(branches: Sequence[Trajectory]) -> list[Turn]:
    """Returns the turns of a chat's branches, each with all tokens up to its end."""
    return [
        [*each.prompt_token_ids.tolist(), *each.response_token_ids[:end].tolist()]
        for each in branches
        for _, end in spans(each)
    ]


def counted(chats: Iterable[Sequence[Trajectory]]) -> dict[str, int]:
    """A report's fields."""
    more = [len(sampled(branches)) - turns_of(branches[0].prompt_id) for branches in chats]
    return {
        "chats": len(more),
        "chat_turns_lost": -sum(min(each, 0) for each in more),
        "chat_turns_twice": sum(max(each, 0) for each in more),
    }


def wrong(branches: Sequence[Trajectory]) -> str:
    """What a chat's record says that its client did not see; empty: nothing."""
    turns, name = turns_of(branches[0].prompt_id), branches[0].prompt_id
    found = sampled(branches)
    if len(found) != turns:
        return f"{name} has {len(found)} turns of {turns}"
    if any(not each.reward_valid or each.reward != turns for each in branches):
        return f"{name} has another reward than {turns}"
    if branches[0].verifier_log != digest(found):
        return f"{name} has other turns than its client saw"
    return ""


# ----------------------------------------------------------------------------------------------------------- its client


async def chat(api: AsyncOpenAI, name: str) -> None:
    """One chat, to its end. Raises openai.ConflictError at its first call if the service takes no more sessions."""
    chance, seen, messages = random.Random(name), list[Turn](), list[Any]()
    for turn in range(turns_of(name)):
        text = "".join(chance.choice("abcdefghijklm") for _ in range(chance.randint(1, 20)))
        messages.append({"role": "user", "content": text})
        await asyncio.sleep(chance.random() * PAUSE_MOST_S)
        content, token_ids = await _asked(api, name, turn, messages, streams=chance.random() < 0.5)
        if not turn:
            say("opened", prompt_id=name)
        seen.append(token_ids)
        messages.append({"role": "assistant", "content": content})
        say("chat answered", session_id=name, turn=turn)
    say("chat closing", session_id=name)
    await _closed(api, name, {"reward": float(len(seen)), "log": digest(seen)})


async def _asked(api: AsyncOpenAI, name: str, turn: int, messages: list[Any], *, streams: bool) -> tuple[str, Turn]:
    """A turn's text, and all tokens up to its end."""
    headers = {"X-Session-ID": name, "Idempotency-Key": f"{name} {turn}"}
    while True:
        say("chat asking", session_id=name, turn=turn)
        try:
            asked: Any = {"model": "policy", "messages": messages, "extra_headers": headers, **SAMPLED}
            if streams:
                return await _streamed(await api.chat.completions.create(**asked, stream=True))
            reply = await api.chat.completions.create(**asked)
            return reply.choices[0].message.content, [*reply.prompt_token_ids, *reply.choices[0].token_ids]
        except (*AGAIN, BrokenOff):
            await asyncio.sleep(RETRY_S)


async def _streamed(chunks: AsyncIterator[Any]) -> tuple[str, Turn]:
    content, token_ids, reason = "", list[int](), None
    async for chunk in chunks:
        if not token_ids:
            say("chat turn")
        (choice,) = chunk.choices
        token_ids += [*(getattr(chunk, "prompt_token_ids", None) or ()), *(getattr(choice, "token_ids", None) or ())]
        content += choice.delta.content or ""
        reason = choice.finish_reason
    if reason is None:
        raise BrokenOff
    return content, token_ids


async def _closed(api: AsyncOpenAI, name: str, body: dict[str, Any]) -> None:
    """Closes a session. One that a call whose reply was lost has closed may be trained on since, and unknown."""
    url, is_again = f"{str(api.base_url).removesuffix('/v1/')}/sessions/{name}/close", False
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.post(url, json=body) as reply:
                    if reply.status == 200 or (is_again and reply.status in (404, 409)):
                        return
                    if reply.status < 429:
                        raise AssertionError(f"{name} is not closed: {reply.status} {await reply.text()}")
            except aiohttp.ClientError:
                pass
            is_again = True
            await asyncio.sleep(RETRY_S)


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as api, asyncio.TaskGroup() as lanes:
        for lane in range(AT_ONCE):
            lanes.create_task(_chats(api, lane))


async def _chats(api: AsyncOpenAI, lane: int) -> None:
    for number in itertools.count(lane, AT_ONCE):
        try:
            await chat(api, f"{PREFIX}{number}")
        except openai.ConflictError as error:
            if "came too late" not in str(error):
                raise
            return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
