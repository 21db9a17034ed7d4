"""Whose call it is, what it may ask, and the turns that it gets."""

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from dora.agents.chat.rendering import Rendered
from dora.agents.front.callers import TURNS, Call, Callers, Credentials
from dora.agents.front.errors import SessionClosed
from dora.agents.front.figures import Figures
from dora.agents.front.keys import KEY, is_same, opened_id, service_id_of, session_of
from dora.agents.front.model import ServedModel
from dora.agents.front.replays import Replays, Shared
from dora.agents.front.request import MODEL, TurnRequest, version_of
from dora.agents.front.sessions import AgentSession, SessionReward, ended_turn
from dora.agents.front.source import LiveVersions, SessionHandle, SessionOpening, SessionSource
from dora.agents.front.turns import RunningTurn
from dora.errors import Conflict, DoraError, InvalidValue, LimitExceeded, NotFound
from dora.rpc.errors import Unauthenticated
from dora.rpc.roles import ServiceTokens
from dora.system.crowd import Crowd
from dora.tls.certificate import Holder
from dora.tls.http import HttpTls

log = logging.getLogger("dora.front")

T = TypeVar("T")
CLOSED_MAX: Final = 65536  # ended sessions that late calls are refused for; the oldest is forgotten first
LIVE_S: Final = 1.0  # how old the list of versions may be


@dataclass(frozen=True, slots=True)
class FrontLimits:
    body_bytes: int = 32 << 20
    body_s: float = 60.0  # for a whole body to arrive
    connections: int = 4096
    connection_idle_s: float = 75.0  # a connection without a whole request head is closed, new or after a reply
    in_flight: int = 512  # requests of one key
    sessions: int = 16384
    idle_s: float = 1800.0  # a session without a call is closed
    futures: int = 4096  # samples of Tinker's clients that they have not fetched
    future_s: float = 600.0  # a sample that no client asks for is given up
    poll_s: float = 20.0  # how long a client that asks for a sample may wait
    messages: int = 4096
    tools: int = 256


class Gateway:
    """One front's state. All clients have ``key``; if it is empty, any key is accepted. Without ``tls`` clients are not
    encrypted. Under TLS, scrapers have ``tokens`` of roles; if these are None, they show certificates.
    """

    def __init__(
        self,
        source: SessionSource,
        model: ServedModel,
        *,
        key: str = "",
        limits: FrontLimits | None = None,
        tls: HttpTls | None = None,
        tokens: ServiceTokens | None = None,
    ) -> None:
        self.model = model
        self.tls = tls
        self.limits = limits or FrontLimits()
        self.replays = Replays()
        self.prefix_breaks: Counter[str] = Counter()
        self.figures = Figures()
        self.tokens = tokens
        self.crowd = Crowd(self.limits.connections)
        self._source = source
        self.takes_any_key = not key and not (tls is not None and tls.mutual)
        self._callers = Callers(key, mutual=tls is not None and tls.mutual)
        self._sessions: dict[str, AgentSession | Shared[AgentSession]] = {}
        self._groups: dict[str, Shared[list[AgentSession]]] = {}  # opened, until all their sessions are closed
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._in_flight: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._live: tuple[float, LiveVersions] | None = None
        self._asking: Shared[LiveVersions] | None = None

    # ------------------------------------------------------------------------------------------------------- callers

    async def caller(self, key: str, session_id: str, holder: Holder | None = None, method: str = TURNS) -> Call:
        """Returns who calls. ``session_id`` is that of header or path, ``method`` what the request does.

        Raises Unauthenticated, PermissionDenied, NotFound, InvalidValue.
        """
        return self._callers.call_of(Credentials(key, session_id, await self._owner(key), holder, method))

    async def _owner(self, key: str) -> str:
        """Returns the session whose key it is, or an empty text. Raises Unauthenticated."""
        if not key.startswith(KEY) or self._callers.is_fronts(key):
            return ""
        found = session_of(key)
        with suppress(NotFound):
            if found and is_same(key, (await self.session(found)).key):
                return found
        raise Unauthenticated("key", "(of no open session)", "that of a session of this service")

    @contextmanager
    def in_flight(self, call: Call) -> Iterator[None]:
        """Counts a request. Raises LimitExceeded."""
        if self._in_flight[call.holder] >= self.limits.in_flight:
            raise LimitExceeded("requests", self._in_flight[call.holder], f"at most {self.limits.in_flight} in flight")
        self._in_flight[call.holder] += 1
        try:
            yield
        finally:
            self._in_flight[call.holder] -= 1
            if not self._in_flight[call.holder]:
                del self._in_flight[call.holder]

    async def page(self) -> bytes:
        return await self.figures.page(self.prefix_breaks, self._in_flight.total(), len(self._sessions))

    # --------------------------------------------------------------------------------------------------------- turns

    async def live(self) -> LiveVersions:
        now_s = time.monotonic()
        if self._live is None or self._live[0] < now_s - LIVE_S:
            asking = self._asking = self._asking or Shared(self.spawn(self._source.live()))
            try:
                self._live = now_s, await asking.result()
            finally:
                self._asking = None
            self.model.renderer.context_tokens = self._live[1].context_tokens
        return self._live[1]

    async def rendered(self, requested: TurnRequest) -> Rendered:
        """Returns a chat as a prompt of its own. Raises InvalidValue."""
        self._check(requested)
        await self.live()
        return await self.model.beside(
            partial(self.model.renderer.prompt, requested.messages, requested.tools, requested.options)
        )

    async def turns(self, call: Call, requested: TurnRequest, name: str = "", group: str = "") -> list[RunningTurn]:
        """Begins the turns of a request: in the call's session, or each in one of its own. ``name`` is that of the
        request and its retries, ``group`` that of the group of sessions of their own. If that has turns, of a front
        that died, they are returned and not sampled again.

        Raises InvalidValue, NotFound, Conflict, LimitExceeded, ServiceUnavailable.
        """
        came = self.figures.until_first_token()
        self._check(requested)
        await self._check_model(requested.model)
        if requested.messages and call.session_id not in self._sessions:  # a wrong one is refused before it waits
            requested = replace(requested, prompt=await self.rendered(requested))
        given = requested.token_ids if requested.prompt is None else requested.prompt.token_ids
        self.model.renderer.check_tokens(len(given), requested.max_tokens)
        if call.session_id:
            session = await self._session(call, requested)
            session.used_s = time.monotonic()
            return await self._begun(session, requested, came, name)
        call.check_opens()
        group_id = group or f"one-{uuid.uuid4().hex}"
        opening = SessionOpening(
            group_id, requested.choices, version_of(requested.model), requested.first_of_session or None
        )
        defaults = await self._defaults()
        turns: list[RunningTurn] = []
        handles = await (self._found_or_opened(opening) if group else self._source.open(opening))
        for number, handle in enumerate(handles):
            wants_prompt = requested.prompt_logprobs and not number  # those of other choices would be the same
            one = replace(requested, choices=1, sampling=requested.sampling_of(number), prompt_logprobs=wants_prompt)
            session = self._made(handle.session_id, handle, defaults)
            turns += [ended_turn(handle)] if handle.turn else await self._begun(session, one, came)
            self.spawn(self._end_after(session, turns[-1]))
        return turns

    async def _begun(
        self, session: AgentSession, requested: TurnRequest, came: Callable[[], None], name: str = ""
    ) -> list[RunningTurn]:
        turns = await session.begin(requested, name)
        for turn in turns:
            turn.came = came
            if turn.prefix_break:
                self.prefix_breaks[turn.prefix_break] += 1
                log.warning("%s: a history was given anew: %s", session.session_id, turn.prefix_break)
        return turns

    def _check(self, requested: TurnRequest) -> None:
        for name, parts, most in (
            ("messages", requested.messages, self.limits.messages),
            ("tools", requested.tools, self.limits.tools),
        ):
            if len(parts) > most:
                raise InvalidValue(name, len(parts), f"at most {most}")

    async def _check_model(self, model: str) -> None:
        """Raises NotFound for the name of another model. The service refuses versions that are not live."""
        live = await self.live()
        if model not in (MODEL, live.model, self.model.reference) and version_of(model) is None:
            raise NotFound("model", model, f"{MODEL}, or {MODEL}-vN for a version N of {_listed(live)}")

    async def _end_after(self, session: AgentSession, turn: RunningTurn) -> None:
        try:
            await turn.ended()
            if turn.finish_reason == "abort":
                await self._abandon(session, "its client has aborted it")
            else:
                await session.close()
        except DoraError as error:
            log.warning("%s: %s", session.session_id, error)
            await self._abandon(session, "its only turn has failed")

    # ------------------------------------------------------------------------------------------------------ sessions

    async def open(self, opening: SessionOpening) -> list[AgentSession]:
        """Opens the sessions of one group. A repeated call for a group gets those of the first one.

        Raises LimitExceeded, Conflict, InvalidValue, ServiceUnavailable.
        """
        while (known := self._groups.get(opening.group)) is not None and known.is_left:
            await known.gone()
        if known is None:
            self._check_room(opening.size)
            known = self._groups[opening.group] = Shared(self.spawn(self._open(opening)))
        sessions = await known.result()
        if len(sessions) != opening.size:
            raise Conflict("size", opening.size, f"{len(sessions)}, as in the group's first request", why="differs")
        return sessions

    async def _open(self, opening: SessionOpening) -> list[AgentSession]:
        try:
            defaults = await self._defaults(opening.sampling or {})
            handles = await self._found_or_opened(opening)
        except BaseException:
            del self._groups[opening.group]
            raise
        sessions = []
        for each in handles:
            session_id = opened_id(each.session_id, each.capability)
            known = self._sessions.get(session_id)
            if not isinstance(known, AgentSession):  # no call has found it before
                known = self._sessions[session_id] = self._made(session_id, each, defaults)
            known.group = opening.group
            sessions.append(known)
        return sessions

    async def withdraw(self, group: str) -> None:
        """Withdraws the group of a front that died, if the service has it."""
        await self._source.withdraw(group, "its front has died")

    async def _found_or_opened(self, opening: SessionOpening) -> Sequence[SessionHandle]:
        try:
            handles = await self._source.find(opening.group, opening.size)
        except NotFound:
            return await self._source.open(opening)
        found = handles[0].version
        if opening.version not in (None, found):
            why = "is another version than the session's"
            raise Conflict("model", f"{MODEL}-v{opening.version}", f"{MODEL}-v{found}: it was opened before", why)
        return handles

    async def version_for(self, model: str) -> int | None:
        """Returns the version that a model's name asks for; None is the newest. Raises NotFound for another model."""
        await self._check_model(model)
        return version_of(model)

    async def session(self, session_id: str) -> AgentSession:
        """Returns an open session, also of another front. Raises NotFound, SessionClosed."""
        self._check_open(session_id)
        await self._settled(session_id)
        if session_id not in self._sessions:
            await self._find(session_id)
        found = self._sessions[session_id]
        return await found.result() if isinstance(found, Shared) else found

    def adopt(self, handle: SessionHandle) -> AgentSession:
        """Lets calls by its id reach a session that an environment drives, which ends it itself."""
        session = self._made(handle.session_id, handle, {}, is_driven=True)
        self._sessions[session.session_id] = session
        return session

    def release(self, session: AgentSession) -> None:
        """Refuses later calls of a session that was adopted."""
        session.is_closed = True
        self._forget(session)

    async def close(self, session: AgentSession, verdict: SessionReward | None = None) -> None:
        await session.close(verdict)
        self._forget(session)

    async def sweep(self) -> None:
        """Closes sessions without a call for long, with the reward that they have."""
        oldest_s = time.monotonic() - self.limits.idle_s
        for session in [each for each in self._sessions.values() if isinstance(each, AgentSession)]:
            if session.used_s < oldest_s and not session.turns:
                log.info("%s: closed, as it had no call for %g s", session.session_id, self.limits.idle_s)
                try:
                    await self.close(session)
                except DoraError as error:
                    log.warning("%s: %s", session.session_id, error)
                    self._forget(session)

    async def _session(self, call: Call, requested: TurnRequest) -> AgentSession:
        session_id = call.session_id
        self._check_open(session_id)
        await self._settled(session_id)
        if session_id not in self._sessions and not service_id_of(session_id) and not session_id.startswith(KEY):
            call.check_opens()
            self._check_room(1)
            self._sessions[session_id] = Shared(self.spawn(self._opened(session_id, requested)))
        return await self.session(session_id)

    async def _settled(self, session_id: str) -> None:
        while isinstance(known := self._sessions.get(session_id), Shared) and known.is_left:
            await known.gone()

    async def _opened(self, session_id: str, requested: TurnRequest) -> AgentSession:
        try:
            opening = SessionOpening(session_id, 1, version_of(requested.model), requested.first_of_session or None)
            defaults = await self._defaults()
            (handle,) = await self._found_or_opened(opening)
        except BaseException:
            del self._sessions[session_id]
            raise
        session = self._sessions[session_id] = self._made(session_id, handle, defaults)
        return session

    async def _find(self, session_id: str) -> None:
        """Notes a session that another front opened. Raises NotFound."""
        service_id, unknown = service_id_of(session_id), NotFound("session", session_id, "the id of an open session")
        try:
            if service_id:
                handle = await self._source.find_opened(service_id)
            else:
                (handle,) = await self._source.find(session_id, 1)
        except NotFound:
            raise unknown from None
        if service_id and not is_same(session_id, opened_id(service_id, handle.capability)):
            raise unknown
        defaults = await self._defaults(handle.sampling if service_id else {})
        if session_id not in self._sessions:  # no call has found it meanwhile
            self._check_room(1)
            self._sessions[session_id] = self._made(session_id, handle, defaults)

    async def _defaults(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        own = {name: value for name, value in (own or {}).items() if name not in ("seed", "max_tokens")}
        return {**(await self.live()).sampling, **own}

    def _made(
        self,
        session_id: str,
        handle: SessionHandle,
        defaults: Mapping[str, Any],
        *,
        is_driven: bool = False,
    ) -> AgentSession:
        about: dict[str, Any] = {"defaults": defaults, "is_driven": is_driven}
        return AgentSession(session_id, handle, self.model, **about, now_s=time.monotonic(), spawn=self.spawn)

    async def _abandon(self, session: AgentSession, reason: str) -> None:
        try:
            await session.abandon(reason)
        except DoraError as error:
            log.warning("%s: %s", session.session_id, error)

    def _check_open(self, session_id: str) -> None:
        if session_id in self._closed:
            raise SessionClosed("session", session_id, "an open session: open another one")

    def _check_room(self, sessions: int) -> None:
        if len(self._sessions) + sessions > self.limits.sessions:
            raise LimitExceeded("sessions", len(self._sessions), f"at most {self.limits.sessions} open: close some")

    def _forget(self, session: AgentSession) -> None:
        self._sessions.pop(session.session_id, None)
        self._closed[session.session_id] = None
        opened = self._groups.get(session.group)
        if opened is not None and all(each.is_closed for each in opened.task.result()):
            del self._groups[session.group]
        while len(self._closed) > CLOSED_MAX:
            self._closed.popitem(last=False)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins work that ends with the front at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _listed(live: LiveVersions) -> str:
    return ", ".join(map(str, live.versions)) or "none"
