"""The client of an environment: it gets the turns that have ended, and answers them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dora.client.connection import Client, Connection, check_count
from dora.data.strict_json import check_text
from dora.data.trajectory import Float32Array, Int32Array
from dora.data.types import FinishReason
from dora.errors import Conflict, NotFound, described
from dora.rpc import dora_pb2 as pb
from dora.rpc.dora_pb2_grpc import SessionsStub
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.client")

AT_ONCE: Final = 256  # sessions that are driven at a time
REASON_MAX: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy has sampled in one turn."""

    number: int  # from 0
    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason | None  # None: more tokens follow
    stop: str = ""  # the stop string that ended it


@dataclass(slots=True)
class Session:
    """One session of a prompt with an environment. ``response`` has its tokens so far, given ones included."""

    session_id: str
    group_id: str
    prompt_id: str
    task_id: str
    version: int
    prompt_token_ids: Int32Array
    prompt_text: str
    verifier_json: str
    turn: Turn  # the last one, which has ended
    response: list[int]
    _connection: Connection = field(repr=False)

    async def ask(self, given_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = "") -> Turn:
        """Gives tokens, and returns the next turn once it has ended. A call that was interrupted may be repeated.

        ``max_tokens``: sampled tokens, at most; 0: as the prompt's sampling says. ``name``: of what gave the tokens.
        Raises InvalidValue for tokens outside the vocabulary or the context, Conflict for a session that has ended,
        NotFound for one that was cancelled or replaced.
        """
        turn = Turn(self.turn.number, np.zeros(0, np.int32), np.zeros(0, np.float32), None)
        async with aclosing(self.stream(given_token_ids, max_tokens=max_tokens, name=name)) as pieces:
            async for piece in pieces:
                token_ids, logprobs = (turn.token_ids, piece.token_ids), (turn.logprobs, piece.logprobs)
                turn = Turn(
                    piece.number, np.concatenate(token_ids), np.concatenate(logprobs), piece.finish_reason, piece.stop
                )
        self.response += [*map(int, given_token_ids), *turn.token_ids.tolist()]
        self.turn = turn
        return turn

    async def stream(
        self, given_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = ""
    ) -> AsyncGenerator[Turn]:
        """Like :meth:`ask`, and yields the turn in pieces as its tokens come. The session notes nothing of it."""
        check_count("max_tokens", max_tokens)
        check_text(name, "name")
        number = self.turn.number + 1
        request = pb.TurnRequest(
            session_id=self.session_id,
            turn=number,
            given_token_ids=np.asarray(given_token_ids, "<i4").tobytes(),
            max_tokens=max_tokens,
            name=name,
        )
        replies: Any = self._connection.stub(SessionsStub).Turn(request)
        try:
            while (piece := await self._connection.read(replies)) is not None:
                yield _turn(number, piece)
        finally:
            replies.cancel()

    async def end(
        self, reward: float | None = None, *, components: Mapping[str, float] | None = None, log: str = ""
    ) -> None:
        """Ends the session with what it has. ``reward`` None: the service's reward function scores the response."""
        request = pb.EndSessionRequest(session_id=self.session_id, components=components, log=log)
        if reward is not None:
            request.reward = reward
        await self._connection.call(self._connection.stub(SessionsStub).EndSession, request)

    async def fail(self, reason: str) -> str:
        """Gives up the session, as its environment has failed. Returns the id of the one in its place; empty: none."""
        request = pb.FailSessionRequest(session_id=self.session_id, reason=reason)
        reply = await self._connection.call(self._connection.stub(SessionsStub).FailSession, request)
        return reply.replacement_id


class Sessions(Client):
    """Attends an environment: gets sessions of the prompts that name it."""

    async def attend(self, environment: str) -> AsyncGenerator[Session]:
        """Yields each session of this environment whose first turn has ended, or that another caller has left after a
        later one. Answer each with :meth:`Session.ask`, and at last :meth:`Session.end` or :meth:`Session.fail`; many
        may be open at once.

        Ends with the service's end of the stream. Raises InvalidValue, LimitExceeded, ServiceUnavailable.
        """
        check_text(environment, "environment")
        replies: Any = self._connection.stub(SessionsStub).Attend(pb.AttendRequest(environment=environment))
        try:
            while (message := await self._connection.read(replies)) is not None:
                yield _session(message, self._connection)
        finally:
            replies.cancel()

    async def drive(
        self, environment: str, driver: Callable[[Session], Awaitable[None]], *, at_once: int = AT_ONCE
    ) -> None:
        """Runs ``driver`` for each session of this environment, ``at_once`` at most, until the service ends the stream.

        A driver asks turns and ends the session. If it raises, its session is given up with the exception as the
        reason, and the others go on. If the service is lost, all drivers are cancelled: a later call gets the sessions
        again, where they stand. Raises as :meth:`attend`.
        """
        room, running = asyncio.Semaphore(at_once), set[asyncio.Task[None]]()

        async def driven(session: Session) -> None:
            try:
                await driver(session)
            except ServiceUnavailable:
                log.warning("%s: the service is lost", session.session_id)
            except Exception as error:  # of the user's driver, or of a session that is over
                log.warning("%s: %s", session.session_id, described(error))
                reason = "".join(each if each.isprintable() else " " for each in described(error))
                with suppress(NotFound, Conflict, ServiceUnavailable):
                    await session.fail(reason[:REASON_MAX])
            finally:
                room.release()

        try:
            async with aclosing(self.attend(environment)) as sessions:
                async for session in sessions:
                    await room.acquire()
                    running.add(task := asyncio.create_task(driven(session)))
                    task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()


def _turn(number: int, tokens: pb.TurnTokens) -> Turn:
    reason: Any = tokens.finish_reason or None
    token_ids, logprobs = np.frombuffer(tokens.token_ids, "<i4"), np.frombuffer(tokens.logprobs, "<f4")
    return Turn(number, token_ids, logprobs, reason, tokens.stop)


def _session(message: pb.SessionTurn, connection: Connection) -> Session:
    begin, turn = message.begin, _turn(message.turn, message.tokens)
    earlier = np.frombuffer(begin.earlier_token_ids, "<i4").tolist()
    return Session(
        message.session_id,
        begin.group_id,
        begin.prompt_id,
        begin.task_id,
        begin.version,
        np.frombuffer(begin.prompt_token_ids, "<i4"),
        begin.prompt_text,
        begin.verifier_json,
        turn,
        [*earlier, *turn.token_ids.tolist()],
        connection,
    )
