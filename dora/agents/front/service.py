"""A service over gRPC, as the front needs it."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from dora.agents.front.source import LiveVersions, Sampled, SessionOpening
from dora.client.connection import Patience, until_answered
from dora.client.sessions import Session, Sessions, Turn
from dora.data.sampling import PARAMETERS
from dora.data.types import Prompt
from dora.errors import Conflict, DoraError, LimitExceeded, NotFound
from dora.rpc.errors import ServiceUnavailable
from dora.tls import Tls

log = logging.getLogger("dora.front")

T = TypeVar("T")
REFUSED_S: Final = 10.0  # how long a call is repeated that the connection refuses
_REFUSALS: Final = ("RST_STREAM", "GOAWAY", "Stream removed", "Socket closed", "Connection reset")  # gRPC's words of it
RECONNECT_S: Final = 60.0  # how long a turn, and a session's end, wait for a service that has gone
PRIORITY: Final = 1  # of openings: an agent waits for its group, and nobody for a queued prompt of the default priority
LEAVE_S: Final = 2.0  # how long a front that is stopped waits for the service to note it
ADMIT_S: Final = 60.0  # how long an opening waits for the window
DESCRIBE_S: Final = 2.0  # how long a refusal waits to learn its reason
VERSION_S: Final = 0.5  # between two openings of a version for which the window has no room


@dataclass(eq=False)
class ServiceSession:
    session: Session
    take_back: Callable[[str, str], Awaitable[None]]

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def version(self) -> int:
        return self.session.version

    @property
    def capability(self) -> bytes:
        return self.session.capability

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.session.sampling

    @property
    def token_ids(self) -> list[int]:
        return [*self.session.prompt_token_ids.tolist(), *self.session.response]

    @property
    def last(self) -> Sampled:
        return _sampled(self.session.turn)

    @property
    def turn(self) -> int:
        return self.session.turn.number

    @property
    def given_name(self) -> str:
        return self.session.given_name

    @property
    def is_over(self) -> bool:
        return self.session.has_ended

    async def stream(
        self,
        token_ids: Sequence[int],
        *,
        after_turn: int | None,
        max_tokens: int = 0,
        name: str = "",
        sampling: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
    ) -> AsyncGenerator[Sampled]:
        """Yields a turn. If the connection breaks it asks the same turn again, which is sampled once."""
        seen, patience = 0, Patience(RECONNECT_S)
        while True:
            at = 0
            pieces = self.session.stream(
                token_ids,
                max_tokens=max_tokens,
                name=name,
                after_turn=after_turn,
                is_prompt=after_turn is None,
                sampling=sampling,
                prompt_logprobs=prompt_logprobs,
            )
            try:
                async with aclosing(pieces):
                    async for piece in pieces:
                        patience.progress()
                        new = slice(max(0, seen - at), None)
                        at += len(piece.token_ids)
                        seen = max(seen, at)
                        if piece.finish_reason is not None:
                            self.session.turn = piece
                        yield _sampled(piece, new)
                return
            except ServiceUnavailable as error:
                await patience.wait(error)

    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        log: str = "",
    ) -> None:
        about: dict[str, Any] = {"components": components, "turn_rewards": turn_rewards, "log": log}
        # a restarted service still holds the session
        await until_answered(lambda: self.session.end(reward, **about), RECONNECT_S)

    async def give_up(self, reason: str) -> None:
        """Cancels the group: nobody would drive another session in its place."""
        await self.take_back(self.session.prompt_id, reason)


async def _repeated(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeats a call that the connection has refused; each may be. Raises ServiceUnavailable only if that lasts."""
    patience = Patience(REFUSED_S)
    while True:
        try:
            return await call()
        except ServiceUnavailable as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            await patience.wait(error)


def _sampled(turn: Turn, part: slice = slice(None)) -> Sampled:
    ids, logprobs = turn.token_ids[part].tolist(), turn.logprobs[part].tolist()
    of_prompt = () if turn.prompt_logprobs is None or part.start else tuple(turn.prompt_logprobs.tolist())
    return Sampled(tuple(ids), tuple(logprobs), turn.finish_reason, turn.stop, of_prompt)


class Service:
    def __init__(self, address: str, token: str, *, tls: Tls | None = None) -> None:
        """``token`` must permit what the role environment may. Raises InvalidValue for unusable files of TLS."""
        self._sessions = Sessions(address, token, tls=tls)

    async def live(self) -> LiveVersions:
        served = await _repeated(self._sessions.describe)
        sampling = {name: getattr(served.sampling, name) for name in PARAMETERS if name not in ("seed", "max_tokens")}
        context_tokens = served.max_model_len_tokens
        return LiveVersions(Path(served.model).name, served.newest_version, served.versions, context_tokens, sampling)

    async def _waits(self) -> str:
        """Returns the end of a sentence on a full window: what it waits for, if the service says so in time."""
        with suppress(DoraError, TimeoutError):
            async with asyncio.timeout(DESCRIBE_S):
                if reason := (await self._sessions.describe()).window_waits_for:
                    return f", and waits for {reason}"
        return ""

    async def _in_time(self, name: str, find: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            async with asyncio.timeout(ADMIT_S):
                return await _repeated(find)
        except TimeoutError:
            allowed = f"asked later: its turn is under way, or the window is full{await self._waits()}"
            raise LimitExceeded("session", name, allowed) from None

    async def model(self) -> Path:
        return Path((await self._sessions.describe()).model)

    async def find(self, group: str, size: int) -> Sequence[ServiceSession]:
        """Returns the sessions of a group that was opened before. It stays open whatever happens to this call."""
        sessions = await self._in_time(group, lambda: self._sessions.open(Prompt(group, "", ()), size, again=True))
        return [ServiceSession(session, self._take_back) for session in sessions]

    async def find_opened(self, session_id: str) -> ServiceSession:
        found = await self._in_time(session_id, lambda: self._sessions.find(session_id))
        return ServiceSession(found, self._take_back)

    @asynccontextmanager
    async def told_of(self, url: str) -> AsyncIterator[None]:
        """Tells the service of this front during the block, for Prometheus, and again after the connection has broken;
        at the end, tells it that the front has been stopped.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        task = asyncio.create_task(self._tell(parts.netloc, secure=secure))
        try:
            yield
        finally:
            is_listed = not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if is_listed:
                with suppress(TimeoutError, DoraError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._sessions.serve_front(parts.netloc, lambda: None, secure=secure, leaving=True)

    async def _tell(self, address: str, *, secure: bool) -> None:
        patience = Patience(float("inf"))
        while True:
            try:
                await self._sessions.serve_front(address, patience.progress, secure=secure)
                error = ServiceUnavailable("the service has ended the call")
            except ServiceUnavailable as broken:
                error = broken
            except DoraError as refused:  # Prometheus is not told of it: agents are served all the same
                log.warning("the service does not list this front's metrics: %s", refused)
                return
            await patience.wait(error)

    async def open(self, opening: SessionOpening) -> Sequence[ServiceSession]:
        """Opens a group, and waits for the window. A group that it does not admit in time is taken back."""
        try:
            async with asyncio.timeout(ADMIT_S):
                sessions = await self._opened(opening)
        except TimeoutError:
            await self._take_back(opening.group, "the window did not admit it in time")
            allowed = f"opened later: the window is full{await self._waits()}"
            raise LimitExceeded("group", opening.group, allowed) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._take_back(opening.group, "its client has left"))
            raise
        return [ServiceSession(session, self._take_back) for session in sessions]

    async def _opened(self, opening: SessionOpening) -> list[Session]:
        about = json.dumps({**(opening.verifier or {}), "group": opening.group, "tags": dict(opening.tags or {})})
        fields: dict[str, Any] = {"sampling": opening.sampling or {}, "verifier_json": about, "priority": PRIORITY}
        prompt = Prompt(opening.group, opening.task, (), **fields)
        while True:
            try:
                return await _repeated(lambda: self._sessions.open(prompt, opening.size, version=opening.version))
            except LimitExceeded as error:
                if error.field != "version":
                    raise
            except Conflict as error:
                if error.field != "version":
                    raise
                allowed = f"{error.allowed}, as policy-vN; or policy"
                why = "admits no new group"
                raise Conflict("model", f"policy-v{opening.version}", allowed, why) from error
            await asyncio.sleep(VERSION_S)

    async def _take_back(self, group: str, reason: str) -> None:
        """Withdraws a group. A failure leaves it to the service's own timeouts."""
        with suppress(DoraError):
            await self.withdraw(group, reason)

    async def withdraw(self, group: str, reason: str) -> None:
        with suppress(NotFound):
            await until_answered(lambda: self._sessions.withdraw(group, reason), RECONNECT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._sessions.close()
