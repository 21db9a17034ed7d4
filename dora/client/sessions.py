"""The client of an environment: it gets the turns that have ended, and answers them."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from dora.client.connection import Client, Connections, check_count
from dora.client.prompts import prompt_message
from dora.data.strict_json import check_text
from dora.data.trajectory import Float32Array, Int32Array
from dora.data.types import FinishReason, Prompt, SamplingParams, SamplingValue
from dora.data.verdict import remarks
from dora.errors import Conflict, NotFound, described
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.dora_pb2_grpc import SessionsStub
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.client")

AT_ONCE: Final = 256  # sessions that are driven at a time
REASON_MAX: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that the policy has sampled in one turn."""

    number: int  # from 0
    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason | None  # None: more tokens follow
    stop: str = ""  # the stop string that ended it
    earlier: Int32Array | None = None  # a fork's: the response tokens before these
    prompt_logprobs: Float32Array | None = None  # of all tokens before the turn but the first, if they were asked for


@dataclass(frozen=True, slots=True)
class Served:
    """The model, versions and limits that a service serves."""

    model: str  # its folder on the service's host
    newest_version: int
    versions: tuple[int, ...]  # live ones
    max_model_len_tokens: int  # a session's longest length; 0: not known
    sampling: SamplingParams  # of prompts that say nothing; its seed means nothing
    window_waits_for: str = ""  # what a full window waits for, the end of a sentence; empty: it has room


@dataclass(slots=True)
class Session:
    """One session of a prompt with an environment. ``response`` has the tokens of its present branch."""

    session_id: str
    group_id: str
    prompt_id: str
    task_id: str
    version: int
    prompt_token_ids: Int32Array
    prompt_text: str
    verifier_json: str
    turn: Turn  # the last one, which has ended; of a session without a prompt first one without tokens
    response: list[int]
    _connections: Connections = field(repr=False)
    has_ended: bool = False  # when it was opened again
    given_name: str = ""  # of what gave the tokens of ``turn``
    is_evaluation: bool = False  # of an evaluation: no step trains on it
    capability: bytes = field(default=b"", repr=False)  # shown with each call
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict)  # that its prompt gives

    async def ask(
        self,
        given_token_ids: Sequence[int],
        *,
        max_tokens: int = 0,
        name: str = "",
        after_turn: int | None = None,
        first_token: int | None = None,
        sampling: Mapping[str, SamplingValue] | None = None,
        prompt_logprobs: bool = False,
    ) -> Turn:
        """Gives tokens, and returns the next turn once it has ended. A call that was interrupted may be repeated.

        ``max_tokens`` limits the sampled tokens; 0 is the limit of the prompt's sampling. ``name`` says what gave the
        tokens. ``sampling`` has parameters of this turn alone, as a prompt has them; others are the session's. With
        ``prompt_logprobs``, the turn has those of all tokens before it, which are prefilled whole for that.
        ``after_turn`` and ``first_token`` fork the session: the tokens follow the first ``first_token`` response tokens
        of that turn (None for all) instead of the last turn.

        Raises InvalidValue for tokens outside the vocabulary or the context or an unknown place, Conflict for a session
        that has ended or a turn that was asked in another way, LimitExceeded for too many forks, NotFound for a session
        that was cancelled or replaced.
        """
        about: dict[str, Any] = {"sampling": sampling, "prompt_logprobs": prompt_logprobs, "whole": True}
        request = self._request(given_token_ids, max_tokens, name, after_turn, first_token, **about)
        return await self._whole(given_token_ids, request)

    async def begin(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int = 0,
        name: str = "",
        sampling: Mapping[str, SamplingValue] | None = None,
        prompt_logprobs: bool = False,
    ) -> Turn:
        """Gives a prompt, and returns the turn after it: the first of a session without a prompt, or a fork that begins
        a context of its own. Raises as :meth:`ask`.
        """
        about: dict[str, Any] = {"sampling": sampling, "prompt_logprobs": prompt_logprobs, "whole": True}
        request = self._request(prompt_token_ids, max_tokens, name, is_prompt=True, **about)
        turn = await self._whole(prompt_token_ids, request)
        self.prompt_token_ids, self.response = np.asarray(prompt_token_ids, np.int32), turn.token_ids.tolist()
        return turn

    async def _whole(self, given_token_ids: Sequence[int], request: pb.TurnRequest) -> Turn:
        parts: list[Turn] = []
        async with aclosing(self._pieces(request)) as pieces:
            async for piece in pieces:
                parts.append(piece)
        turn = replace(
            parts[-1],
            token_ids=np.concatenate([each.token_ids for each in parts]),
            logprobs=np.concatenate([each.logprobs for each in parts]),
            earlier=next((each.earlier for each in parts if each.earlier is not None), None),
            prompt_logprobs=next((each.prompt_logprobs for each in parts if each.prompt_logprobs is not None), None),
        )
        before = [*self.response, *map(int, given_token_ids)] if turn.earlier is None else turn.earlier.tolist()
        self.response, self.turn = [*before, *turn.token_ids.tolist()], turn
        return turn

    async def stream(
        self,
        given_token_ids: Sequence[int],
        *,
        max_tokens: int = 0,
        name: str = "",
        after_turn: int | None = None,
        first_token: int | None = None,
        is_prompt: bool = False,
        sampling: Mapping[str, SamplingValue] | None = None,
        prompt_logprobs: bool = False,
    ) -> AsyncGenerator[Turn]:
        """Like :meth:`ask`, or :meth:`begin` with ``is_prompt``, and yields the turn in pieces as its tokens come. The
        session notes nothing of it.
        """
        about: dict[str, Any] = {"is_prompt": is_prompt, "sampling": sampling, "prompt_logprobs": prompt_logprobs}
        request = self._request(given_token_ids, max_tokens, name, after_turn, first_token, **about)
        async with aclosing(self._pieces(request)) as pieces:
            async for piece in pieces:
                yield piece

    def _request(
        self,
        given_token_ids: Sequence[int],
        max_tokens: int,
        name: str,
        after_turn: int | None = None,
        first_token: int | None = None,
        *,
        is_prompt: bool = False,
        sampling: Mapping[str, SamplingValue] | None = None,
        prompt_logprobs: bool = False,
        whole: bool = False,
    ) -> pb.TurnRequest:
        check_count("max_tokens", max_tokens)
        check_text(name, "name")
        return pb.TurnRequest(
            session_id=self.session_id,
            turn=self.turn.number + 1,
            given_token_ids=np.asarray(given_token_ids, "<i4").tobytes(),
            max_tokens=max_tokens,
            name=name,
            after_turn=after_turn,
            first_token=first_token,
            fork=pb.TurnRequest.PROMPT if is_prompt else pb.TurnRequest.PLACE,
            whole=whole,
            sampling_json=json.dumps(dict(sampling)) if sampling else "",
            prompt_logprobs=prompt_logprobs,
            capability=self.capability,
        )

    async def _pieces(self, request: pb.TurnRequest) -> AsyncGenerator[Turn]:
        with self._connections.for_a_call() as connection:
            replies: Any = connection.stub(SessionsStub).Turn(request)
            try:
                while (piece := await connection.read(replies)) is not None:
                    yield _turn(request.turn, piece)
            finally:
                replies.cancel()

    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        log: str = "",
        is_cached: bool = False,
        is_warm: bool = False,
    ) -> None:
        """Ends the session with what it has. A ``reward`` of None is the sum of ``turn_rewards``, which are those of
        single turns by their numbers; without these, the service's reward function scores the response. Components and
        log are cut to the limits of :mod:`dora.data.verdict`. The service counts rewards that are those of an equal
        session (``is_cached``), and environments that had been prepared ahead (``is_warm``).
        """
        kept, said = remarks(components, log)
        request = pb.EndSessionRequest(
            session_id=self.session_id,
            components=kept,
            turn_rewards=turn_rewards,
            log=said,
            is_cached=is_cached,
            is_warm=is_warm,
            capability=self.capability,
        )
        if reward is not None:
            request.reward = reward
        with self._connections.for_a_call() as connection:
            await connection.call(connection.stub(SessionsStub).EndSession, request)

    def rewind(self) -> None:
        """Goes back to before the first turn of a session whose first turn brought its prompt. Turns that are then
        asked with the same tokens are not sampled again: the service repeats their tokens.
        """
        self.prompt_token_ids, self.response = np.zeros(0, np.int32), []
        self.turn = Turn(0, np.zeros(0, np.int32), np.zeros(0, np.float32), None)

    async def fail(self, reason: str, fault: Literal["session", "another", "prompt"] = "session") -> str:
        """Gives up the session, as its environment has failed. Returns the id of the one in its place, if any.

        ``fault`` says whose it is. That of ``another`` session, which ended the environment's process, counts for no
        replacement; if it is the ``prompt``, whose sessions all fail, its group is cancelled.
        """
        request = pb.FailSessionRequest(
            session_id=self.session_id, reason=reason, fault=fault, capability=self.capability
        )
        with self._connections.for_a_call() as connection:
            reply = await connection.call(connection.stub(SessionsStub).FailSession, request)
        return reply.replacement_id


class Sessions(Client):
    """Attends an environment: gets sessions of the prompts that name it."""

    @cached_property
    def _connections(self) -> Connections:
        return Connections(self._connection)

    async def close(self) -> None:
        await self._connections.close()

    async def attend(self, environment: str) -> AsyncGenerator[Session]:
        """Yields each session of this environment whose first turn has ended, or that another caller has left after a
        later one. Answer each with :meth:`Session.ask`, and at last :meth:`Session.end` or :meth:`Session.fail`; many
        may be open at once.

        Ends with the service's end of the stream. Raises InvalidValue, LimitExceeded, ServiceUnavailable.
        """
        check_text(environment, "environment")
        async with aclosing(self._sessions(pb.AttendRequest(environment=environment))) as sessions:
            async for session in sessions:
                yield session

    async def open(
        self,
        prompt: Prompt | str | Mapping[str, Any],
        size: int = 1,
        *,
        version: int | None = None,
        again: bool = False,
    ) -> list[Session]:
        """Opens a group of ``size`` sessions that this client drives, and returns them once the window has admitted it.

        ``prompt`` is given as in :meth:`dora.Prompts.submit`. It may be empty, as ``Prompt("id", "", ())``: then the
        first turn of each session brings its prompt (:meth:`Session.begin`). With a prompt, the sessions are returned
        as their first turns have ended. A call that was interrupted may be repeated with the same prompt id. The id is
        free once a step has trained on the group. With ``again`` no new group is opened: a caller that may have ended
        all of its sessions gets NotFound. ``version`` samples all turns. The group does not wait for the window then:
        it is admitted or refused at once. If it is None, the window gives the version.

        Raises InvalidValue for a refused prompt, Conflict for an id in use or a version that admits no new group,
        LimitExceeded for too many sessions or a version for whose group the window has no room.
        """
        check_count("size", size)
        message = prompt_message(prompt)
        message.group_size = size
        found: dict[str, Session] = {}
        request = pb.OpenRequest(prompt=message, version=version, again=again)
        async with aclosing(self._sessions(request)) as sessions:
            async for session in sessions:
                found[session.session_id] = session
                if len(found) == size:
                    return [found[name] for name in sorted(found, key=_sample_index)]
        raise ServiceUnavailable(f"{len(found)} of {size} sessions had come: the service ended the stream")

    async def find(self, session_id: str) -> Session:
        """Returns a session of a group that any client opened, at the end of its turn under way. Raises NotFound."""
        check_text(session_id, "session_id")
        with self._connections.for_a_call() as connection:
            request = pb.FindSessionRequest(session_id=session_id)
            found = await connection.call(connection.stub(SessionsStub).FindSession, request)
            return _session(found, self._connections)

    async def serve_front(
        self, address: str, noted: Callable[[], None], *, secure: bool = False, leaving: bool = False
    ) -> None:
        """Tells the service of an HTTP front at ``address`` until the service ends the call. ``noted`` is called once
        it knows. ``leaving`` says that the front has been stopped, and is not lost.

        Raises InvalidValue, LimitExceeded, ServiceUnavailable.
        """
        hello = pb.FrontHello(address=address, secure=secure, leaving=leaving)
        with self._connections.for_a_call() as connection:
            replies: Any = connection.stub(SessionsStub).ServeFront(hello)
            try:
                while await connection.read(replies) is not None:
                    noted()
            finally:
                replies.cancel()

    async def withdraw(self, prompt_id: str, reason: str = "") -> None:
        """Cancels or unqueues the group of this prompt id. May be repeated. Raises InvalidValue, NotFound."""
        check_text(prompt_id, "prompt_id")
        check_text(reason, "reason")
        request = pb.WithdrawRequest(prompt_id=prompt_id, reason=reason)
        with self._connections.for_a_call() as connection:
            await connection.call(connection.stub(SessionsStub).Withdraw, request)

    async def describe(self) -> "Served":
        """Returns what is served. Raises ServiceUnavailable."""
        with self._connections.for_a_call() as connection:
            reply = await connection.call(connection.stub(SessionsStub).Describe, pb.DescribeRequest())
        sampling = convert.sampling_from_wire(reply.sampling)
        versions, reason = tuple(reply.versions), reply.window_wait.reason
        return Served(reply.model, reply.newest_version, versions, reply.max_model_len_tokens, sampling, reason)

    async def _sessions(self, request: pb.AttendRequest | pb.OpenRequest) -> AsyncGenerator[Session]:
        with self._connections.for_a_call() as connection:
            stub = connection.stub(SessionsStub)
            replies: Any = stub.Open(request) if isinstance(request, pb.OpenRequest) else stub.Attend(request)
            try:
                while (message := await connection.read(replies)) is not None:
                    yield _session(message, self._connections)
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
        room = asyncio.Semaphore(at_once)

        async def driven(session: Session) -> None:
            try:
                await driver(session)
            except ServiceUnavailable:
                raise
            except Exception as error:  # of the user's driver, or of a session that is over
                log.warning("%s: %s", session.session_id, described(error))
                reason = "".join(each if each.isprintable() else " " for each in described(error))
                with suppress(NotFound, Conflict):
                    await session.fail(reason[:REASON_MAX])
            finally:
                room.release()

        try:
            async with aclosing(self.attend(environment)) as sessions, asyncio.TaskGroup() as drivers:
                async for session in sessions:
                    await room.acquire()
                    drivers.create_task(driven(session))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


def _sample_index(session_id: str) -> int:
    return int(session_id.partition("~")[0].rpartition(".")[2])


def _turn(number: int, tokens: pb.TurnTokens) -> Turn:
    reason: Any = tokens.finish_reason or None
    token_ids, logprobs = np.frombuffer(tokens.token_ids, "<i4"), np.frombuffer(tokens.logprobs, "<f4")
    earlier = np.frombuffer(tokens.earlier_token_ids, "<i4") if tokens.earlier_token_ids else None
    of_prompt = np.frombuffer(tokens.prompt_logprobs, "<f4") if tokens.prompt_logprobs else None
    return Turn(number, token_ids, logprobs, reason, tokens.stop, earlier, of_prompt)


def _session(message: pb.SessionTurn, connections: Connections) -> Session:
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
        connections,
        message.ended,
        begin.given_name,
        begin.is_evaluation,
        begin.capability,
        json.loads(begin.sampling_json or "{}"),
    )
