"""A front over a service in memory, which refuses what a real one does."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dora.agents.chat.rendering import ChatRenderer
from dora.agents.chat.tool_calls import format_of
from dora.agents.front.app import Mount, serving
from dora.agents.front.gateway import FrontLimits, Gateway
from dora.agents.front.listening import listening_socket
from dora.agents.front.model import ServedModel
from dora.agents.front.source import LiveVersions, Sampled, SessionOpening
from dora.errors import Conflict, InvalidValue, LimitExceeded, NotFound
from dora.rpc.roles import ServiceTokens
from dora.tls.http import HttpTls
from tests.unit.chat_templates import STYLES
from tests.unit.chats import Chat

CONTEXT = 4000
Policy = Callable[[str], str]


def text_policy(prompt: str) -> str:
    """An answer that shows how much it was given."""
    return f"It is {len(prompt)}."


def prompt_logprobs_of(token_ids: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of a prompt's tokens but the first, exact in float32."""
    return tuple(-(token_id % 64) / 64 for token_id in token_ids[1:])


@dataclass(eq=False)
class FakeSession:
    """``paths``: the tokens up to the end of each turn. Turn 0 is empty."""

    session_id: str
    version: int
    service: "FakeService"
    sampling: Any
    paths: list[list[int]] = field(default_factory=lambda: [[]])
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)  # a turn has ended
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_busy: bool = False
    last: Sampled = field(default_factory=lambda: Sampled((), ()))
    given_name: str = ""
    ended: tuple[Any, ...] | None = None
    failed: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)  # the sampling of each turn

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def capability(self) -> bytes:
        return hmac.digest(b"secret", self.session_id.encode(), "sha256")

    @property
    def turn(self) -> int:
        return len(self.paths) - 1

    @property
    def token_ids(self) -> list[int]:
        return self.paths[-1]

    async def stream(
        self,
        token_ids: Sequence[int],
        *,
        after_turn: int | None,
        max_tokens: int = 0,
        name: str = "",
        sampling: Any = None,
        prompt_logprobs: bool = False,
    ) -> AsyncGenerator[Sampled]:
        if self.is_busy or self.ended is not None or self.failed:
            raise Conflict("session_id", self.session_id, "idle")
        before = [] if after_turn is None else self.paths[after_turn]
        if after_turn == 0 or not token_ids or len(before) + len(token_ids) >= CONTEXT:
            raise InvalidValue("given_token_ids", f"{len(token_ids)} tokens", f"1 to {CONTEXT}")
        self.is_busy, path = True, [*before, *token_ids]
        self.is_idle.clear()
        self.given_name = name
        self.asked.append(dict(sampling or {}))
        own = {**(self.sampling or {}), **(sampling or {})}
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        of_prompt = owed = prompt_logprobs_of(path) if prompt_logprobs else ()
        async for piece in self.service.sample(path, own, max_tokens or 64):
            sampled, owed = replace(piece, prompt_logprobs=owed), ()
            path += sampled.token_ids
            ids, logprobs = (*ids, *sampled.token_ids), (*logprobs, *sampled.logprobs)
            if sampled.finish_reason is not None:
                self.last = replace(sampled, token_ids=ids, logprobs=logprobs, prompt_logprobs=of_prompt)
                self.is_busy = False
                self.paths.append(path)
                self.is_idle.set()
            yield sampled

    async def end(
        self, reward: float | None = None, *, components: Any = None, turn_rewards: Any = None, log: str = ""
    ) -> None:
        if not self.turn:
            raise Conflict("session", self.session_id, "a session with a sampled token", why="has none")
        if self.ended not in (None, (reward, dict(components or {}), dict(turn_rewards or {}), log)):
            raise Conflict("session", self.session_id, "an open session", why="has ended with another reward")
        self.ended = (reward, dict(components or {}), dict(turn_rewards or {}), log)
        self.has_ended.set()

    async def give_up(self, reason: str) -> None:
        self.failed = reason
        self.has_ended.set()


@dataclass(eq=False)
class FakeService:
    chat: Chat
    policy: Policy = text_policy
    versions: tuple[int, ...] = (6, 7)
    sessions: list[FakeSession] = field(default_factory=list)
    openings: list[SessionOpening] = field(default_factory=list)
    is_full: bool = False
    window: asyncio.Event | None = None  # an opening waits for it
    waiting: list[str] = field(default_factory=list)
    taken_back: list[str] = field(default_factory=list)
    context: int = CONTEXT
    gate: asyncio.Event | None = None  # a turn's second piece waits for it
    groups: dict[str, list[FakeSession]] = field(default_factory=dict)

    async def live(self) -> LiveVersions:
        return LiveVersions("styled", self.versions[-1], self.versions, self.context, {"temperature": 1.0, "stop": ()})

    async def find(self, group: str, size: int) -> list[FakeSession]:
        if group not in self.groups:
            raise NotFound("prompt_id", group, "a group that was opened")
        if len(self.groups[group]) != size:
            raise Conflict("group_size", size, "as in the first call", why="differs")
        for session in self.groups[group]:
            if session.is_busy:
                await session.is_idle.wait()
        return self.groups[group]

    async def find_opened(self, session_id: str) -> FakeSession:
        found = next((each for each in self.sessions if each.session_id == session_id), None)
        if found is None or found.failed:
            raise NotFound("session_id", session_id, "an open session")
        if found.is_busy:
            await found.is_idle.wait()
        return found

    async def open(self, opening: SessionOpening) -> list[FakeSession]:
        if self.is_full:
            raise LimitExceeded("sessions", opening.size, "less: the window is full")
        if opening.version not in (None, *self.versions):
            allowed = f"one of {', '.join(map(str, self.versions))}, as policy-vN; or policy"
            raise Conflict("model", f"policy-v{opening.version}", allowed, why="is not live")
        with suppress(NotFound):
            return await self.find(opening.group, opening.size)
        if self.window is not None:
            self.waiting.append(opening.group)
            try:
                await self.window.wait()
            except asyncio.CancelledError:
                self.taken_back.append(opening.group)
                raise
        self.openings.append(opening)
        version = self.versions[-1] if opening.version is None else opening.version
        sessions = [self.made(version, opening.sampling) for _ in range(opening.size)]
        self.groups[opening.group] = sessions
        return sessions

    async def withdraw(self, group: str, reason: str) -> None:
        for session in self.groups.pop(group, ()):
            await session.give_up(reason)

    def made(self, version: int, sampling: Any) -> FakeSession:
        session = FakeSession(f"g0.{len(self.sessions)}", version, self, sampling)
        self.sessions.append(session)
        return session

    async def sample(self, path: Sequence[int], sampling: Any, max_tokens: int) -> AsyncIterator[Sampled]:
        text = self.policy(self.chat.decode(path, special_tokens=True))
        stops = (sampling or {}).get("stop", ())
        token_ids = [*self.chat.encode(text, special_tokens=False), self.chat.ends()[0]]
        reason, stop = "stop", ""
        for count in range(1, len(token_ids)):
            stop = next((each for each in stops if each in self.chat.decode(token_ids[:count])), "")
            if stop:
                token_ids = token_ids[:count]
                break
        if len(token_ids) > max_tokens:
            token_ids, reason = token_ids[:max_tokens], "length"
        for number, piece in enumerate(_batched(token_ids, 3)):
            if number and self.gate is not None:
                await self.gate.wait()
            is_last = (number + 1) * 3 >= len(token_ids)
            logprobs = tuple(-0.5 - each / 1000 for each in piece)
            yield Sampled(tuple(piece), logprobs, reason if is_last else None, stop if is_last else "")  # type: ignore[arg-type]


def _batched(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


@asynccontextmanager
async def front(
    style: str = "qwen2.5",
    *,
    key: str = "",
    limits: FrontLimits | None = None,
    mount: Mount | None = None,
    tls: HttpTls | None = None,
    tokens: ServiceTokens | None = None,
    **service: Any,
) -> AsyncIterator[tuple[str, FakeService, Gateway]]:
    """A front's base URL, its service and its door."""
    fake = FakeService(Chat(STYLES[style]), **service)
    async with front_of(fake, key=key, limits=limits, mount=mount, tls=tls, tokens=tokens) as (url, gateway):
        yield url, fake, gateway


@asynccontextmanager
async def front_of(
    fake: FakeService,
    *,
    key: str = "",
    limits: FrontLimits | None = None,
    mount: Mount | None = None,
    tls: HttpTls | None = None,
    tokens: ServiceTokens | None = None,
) -> AsyncIterator[tuple[str, Gateway]]:
    """The base URL and the door of a front over this service."""
    async with fronts(fake, 1, key=key, limits=limits, mount=mount, tls=tls, tokens=tokens) as ((url,), (gateway,)):
        yield url, gateway


@asynccontextmanager
async def fronts(
    fake: FakeService,
    count: int,
    *,
    key: str = "",
    limits: FrontLimits | None = None,
    mount: Mount | None = None,
    tls: HttpTls | None = None,
    tokens: ServiceTokens | None = None,
) -> AsyncIterator[tuple[list[str], list[Gateway]]]:
    """The base URLs and the doors of so many fronts over this service."""
    chat = fake.chat
    ends = frozenset(chat.ends())
    model: Any = ServedModel(chat, ends, format_of(chat.style.template), ChatRenderer(chat, ends))  # type: ignore[arg-type]
    doors = [Gateway(fake, model, key=key, limits=limits, tls=tls, tokens=tokens) for _ in range(count)]
    async with AsyncExitStack() as stack:
        listening = (listening_socket("127.0.0.1:0", has_key=bool(key)) for _ in doors)
        urls = [
            await stack.enter_async_context(serving(gateway, each, mount))
            for gateway, each in zip(doors, listening, strict=True)
        ]
        yield urls, doors
