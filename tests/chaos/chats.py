"""Agents with OpenAI's own client that chat through a front: ``python -m tests.chaos.chats URL...``.

A chat is a session by X-Session-ID, or one that ``POST /sessions`` has opened, and each of its calls has an
Idempotency-Key. The fronts, one for each URL, may be killed at any time; a call that has failed is made again at the
next. The process prints a line of JSON at each moment, and ends when the service takes
no more sessions. The log of a chat's verdict is a digest of what this client has seen: ``wrong`` compares the record.
"""

import asyncio
import hashlib
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
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
OPENED_SHARE: Final = 0.5  # of the chats
SAMPLED: Final = {"max_tokens": TURN_TOKENS, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
AGAIN: Final = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError, aiohttp.ClientError)
TOO_LATE: Final = "came too late"
Turn = list[int]  # all tokens up to its end


class BrokenOff(Exception):
    """A stream has ended before its turn, or the front has refused for a while."""


class NoMoreSessions(Exception):
    """The service takes no more."""


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


class Chat:
    """One chat, at one of the fronts until that breaks a call off, then at the next."""

    def __init__(self, name: str, apis: Sequence[AsyncOpenAI], front: int) -> None:
        self.name = name
        self._apis = apis
        self._front = front
        self._session_id = name
        self._headers = {"X-Session-ID": name}

    async def run(self) -> None:
        """Raises NoMoreSessions."""
        chance, seen, messages = random.Random(self.name), list[Turn](), list[Any]()
        if chance.random() < OPENED_SHARE:
            await self._open()
        for turn in range(turns_of(self.name)):
            text = "".join(chance.choice("abcdefghijklm") for _ in range(chance.randint(1, 20)))
            messages.append({"role": "user", "content": text})
            await asyncio.sleep(chance.random() * PAUSE_MOST_S)
            content, token_ids = await self._asked(turn, messages, streams=chance.random() < 0.5)
            if not turn:
                self._say("opened", prompt_id=self.name)
            seen.append(token_ids)
            messages.append({"role": "assistant", "content": content})
            self._say("chat answered", turn=turn)
        self._say("chat closing")
        await self._close({"reward": float(len(seen)), "log": digest(seen)})

    def _say(self, at: str, **what: Any) -> None:
        say(at, session_id=self.name, front=self._front, **what)

    @property
    def _url(self) -> str:
        return str(self._apis[self._front].base_url).removesuffix("/v1/")

    def _move(self) -> None:
        self._front = (self._front + 1) % len(self._apis)

    async def _open(self) -> None:
        """Opens the session itself, and calls by its key from then on."""
        while True:
            with suppress(*AGAIN):
                group = {"group": self.name, "size": 1, "sampling": {"ignore_eos": True}}
                status, reply = await _posted(f"{self._url}/sessions", group, {})
                if status == 200:
                    (session,) = reply["sessions"]
                    self._session_id = session["id"]
                    self._headers = {"Authorization": f"Bearer {session['key']}"}
                    self._say("opened", prompt_id=self.name)
                    return
                if status == 409 and TOO_LATE in str(reply):
                    raise NoMoreSessions
                if status < 429:
                    raise AssertionError(f"{self.name} is not opened: {status} {reply}")
            self._move()
            await asyncio.sleep(RETRY_S)

    async def _asked(self, turn: int, messages: list[Any], *, streams: bool) -> tuple[str, Turn]:
        """A turn's text, and all tokens up to its end."""
        headers = self._headers | {"Idempotency-Key": f"{self.name} {turn}"}
        while True:
            self._say("chat asking", turn=turn)
            api = self._apis[self._front]
            try:
                asked: Any = {"model": "policy", "messages": messages, "extra_headers": headers, **SAMPLED}
                if streams:
                    return await self._streamed(await api.chat.completions.create(**asked, stream=True))
                reply = await api.chat.completions.create(**asked)
                return reply.choices[0].message.content, [*reply.prompt_token_ids, *reply.choices[0].token_ids]
            except (openai.APIConnectionError, BrokenOff):
                self._move()
            except openai.ConflictError as error:
                if TOO_LATE not in str(error):
                    raise
                raise NoMoreSessions from None
            except AGAIN:
                pass
            await asyncio.sleep(RETRY_S)

    async def _streamed(self, chunks: AsyncIterator[Any]) -> tuple[str, Turn]:
        content, token_ids, reason = "", list[int](), None
        async for chunk in chunks:
            if not token_ids:
                self._say("chat turn")
            (choice,) = chunk.choices
            token_ids += [
                *(getattr(chunk, "prompt_token_ids", None) or ()),
                *(getattr(choice, "token_ids", None) or ()),
            ]
            content += choice.delta.content or ""
            reason = choice.finish_reason
        if reason is None:
            raise BrokenOff
        return content, token_ids

    async def _close(self, body: dict[str, Any]) -> None:
        """Closes the session. One that a call whose reply was lost has closed may be trained on since, and unknown."""
        is_again = False
        while True:
            with suppress(aiohttp.ClientError):
                url = f"{self._url}/sessions/{self._session_id}/close"
                status, reply = await _posted(url, body, self._headers)
                if status == 200 or (is_again and status in (404, 409)):
                    return
                if status < 429:
                    raise AssertionError(f"{self.name} is not closed: {status} {reply}")
            is_again = True
            self._move()
            await asyncio.sleep(RETRY_S)


async def _posted(url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.json(content_type=None)


async def main(urls: Sequence[str]) -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as lanes:
        apis = [
            await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
            for url in urls
        ]
        for lane in range(AT_ONCE):
            lanes.create_task(_chats(apis, lane))


async def _chats(apis: Sequence[AsyncOpenAI], lane: int) -> None:
    for number in itertools.count(lane, AT_ONCE):
        try:
            await Chat(f"{PREFIX}{number}", apis, lane % len(apis)).run()
        except NoMoreSessions:
            return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
