"""The gRPC service for environments: ended turns out, next turns, ends and failures in."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np

from dora.core import events as on
from dora.data.types import Reward
from dora.data.verdict import check_reward, remarks
from dora.errors import Conflict, InvalidValue, NotFound
from dora.orchestrator.core import ServiceCore
from dora.orchestrator.hosts.fronts import Front, Fronts
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.session_paths import places, shift_of
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.responses.turn_order import TurnLimits, TurnOrder, check_line
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.rollout.window_wait import OPENED
from dora.orchestrator.services.capabilities import Capabilities
from dora.orchestrator.services.opening import Opening
from dora.orchestrator.services.turn_request import check_repeated
from dora.prompts.check import check_name
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext
from dora.rpc.interceptor import SMALL_BYTES
from dora.rpc.room import host_of_peer

REASON_MAX: Final = 200  # characters


@dataclass(eq=False, repr=False)
class SessionService(stubs.SessionsServicer):
    """Serves sessions. Each call checks everything before it changes anything, so a refused one disturbs no session."""

    _core: ServiceCore
    _buffer: ResponseBuffer
    _journal: Journal
    _telemetry: Telemetry
    _environments: Environments
    _evaluations: Evaluations
    _fronts: Fronts
    _opening: Opening
    _limits: TurnLimits
    _capabilities: Capabilities

    async def Attend(self, request: pb.AttendRequest, context: ServicerContext) -> AsyncIterator[pb.SessionTurn]:
        check_name(request.environment, "environment")
        async for turn in self._attend(request.environment):
            yield turn

    async def Open(self, request: pb.OpenRequest, context: ServicerContext) -> AsyncIterator[pb.SessionTurn]:
        environment = await self._opening.open_group(request)
        await self._journal.settled()
        for turn in self._ended(request.prompt.prompt_id):
            yield turn
        async for turn in self._attend(environment):
            yield turn

    async def _attend(self, environment: str) -> AsyncIterator[pb.SessionTurn]:
        environments, buffer = self._environments, self._buffer
        with environments.attending(environment) as attendee:
            while True:
                request_id = await attendee.next()
                response = buffer.get(request_id)
                turn = -1 if response is None else len(response.inputs)
                await self._journal.settled()  # a caller acts on no turn that a crash could undo
                if response is None or not environments.is_idle(response) or len(response.inputs) != turn:
                    continue
                yield self._session_turn(response)

    def _ended(self, prompt_id: str) -> list[pb.SessionTurn]:
        groups = (responses for _, responses in self._buffer.groups() if responses[0].prompt.prompt_id == prompt_id)
        return [self._session_turn(each) for responses in groups for each in responses if each.is_closed]

    async def FindSession(self, request: pb.FindSessionRequest, context: ServicerContext) -> pb.SessionTurn:
        response = self._session(request.session_id)
        if not response.prompt.environment.startswith(OPENED):
            raise NotFound("session_id", request.session_id[:80], "that of a session that Open has opened")
        with self._environments.reading(response.request_id, whole_turns=True) as changed:
            while not response.is_closed and not self._environments.is_idle(response):
                self._session(request.session_id)
                changed.clear()
                await changed.wait()
        await self._journal.settled()
        return self._session_turn(response)

    async def Withdraw(self, request: pb.WithdrawRequest, context: ServicerContext) -> pb.WithdrawReply:
        self._opening.withdraw(request)
        await self._journal.settled()
        return pb.WithdrawReply()

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeReply:
        return self._opening.described()

    async def Turn(self, request: pb.TurnRequest, context: ServicerContext) -> AsyncIterator[pb.TurnTokens]:
        response, journal, buffer = self._session(request.session_id), self._journal, self._buffer
        self._capabilities.check(response.request_id, request.capability)
        if request.turn > len(response.inputs):
            order = TurnOrder.parse(request, response, self._limits)
            self._core.post(order.event, lambda: journal.session(response, buffer.give(order, time.time())))
        elif request.turn:
            check_repeated(response, request, self._limits.resolved)
        sent, turn, is_whole = response.turn_begin(request.turn), request.turn, request.whole
        is_large = request.ByteSize() > SMALL_BYTES
        del request
        if is_large:  # few large messages are in memory at a time, each until its first reply
            yield pb.TurnTokens()
        earlier = _earlier(response, turn) if turn and response.inputs[turn - 1].is_fork else b""
        with self._environments.reading(response.request_id, whole_turns=is_whole) as changed:
            while True:
                changed.clear()
                has_ended, reached = (
                    turn < len(response.inputs) or response.finish_reason is not None,
                    response.turn_end(turn),
                )
                if has_ended:
                    piece = _tokens(response, turn, sent, earlier)
                    await journal.settled()
                    yield piece
                    return
                if buffer.get(response.request_id) is not response:
                    raise NotFound(
                        "session_id", response.request_id, "an open session", why="was cancelled or replaced"
                    )
                if reached > sent and not is_whole:
                    piece, sent, earlier = _tokens(response, turn, sent, earlier), reached, b""
                    yield piece
                await changed.wait()

    async def EndSession(self, request: pb.EndSessionRequest, context: ServicerContext) -> pb.EndSessionReply:
        response = self._session(request.session_id)
        self._capabilities.check(response.request_id, request.capability)
        reward = _reward(request, len(response.inputs))
        if response.is_closed:
            if reward is not None and response.reward != reward:
                raise Conflict(
                    "session_id", response.request_id, "an open session", why="has ended with another reward"
                )
        else:

            def rewarded() -> None:
                response.reward = reward

            self._core.post(on.SessionEnded(response.request_id), rewarded)
            self._journal.verdict(response, time.time())
            self._telemetry.session_ended(is_cached=request.is_cached, is_warm=request.is_warm)
        await self._journal.settled()
        return pb.EndSessionReply()

    async def FailSession(self, request: pb.FailSessionRequest, context: ServicerContext) -> pb.FailSessionReply:
        response = self._session(request.session_id)
        self._capabilities.check(response.request_id, request.capability)
        check_line("reason", request.reason, REASON_MAX, least=1)
        fault = next((each for each in get_args(on.Fault) if each == (request.fault or "session")), None)
        if fault is None:
            raise InvalidValue("fault", request.fault[:80], ", ".join(get_args(on.Fault)))
        if fault != "session" and self._capabilities.needed():
            raise InvalidValue("fault", fault, "session: a caller of the role session answers for its own alone")
        self._core.post(on.SessionFailed(response.request_id, request.reason, fault))
        await self._journal.settled()
        members = (self._evaluations if response.is_evaluation else self._buffer).members(response.group_id)
        in_place = members[response.sample_index] if members else response
        return pb.FailSessionReply(replacement_id="" if in_place is response else in_place.request_id)

    async def ServeFront(self, request: pb.FrontHello, context: ServicerContext) -> AsyncIterator[pb.FrontNoted]:
        caller = host_of_peer(context.peer())
        front = Front.of(request.address, caller, secure=request.secure)
        await self._fronts.check(front, caller)
        if request.leaving:
            self._fronts.leave(front)
            yield pb.FrontNoted()
            return
        with self._fronts.serving(front):
            yield pb.FrontNoted()
            await asyncio.Event().wait()  # until the front leaves

    def _session_turn(self, response: ResponseState) -> pb.SessionTurn:
        return _session_turn(response, self._capabilities.of(response.request_id))

    def _session(self, session_id: str) -> ResponseState:
        response = self._buffer.get(session_id)
        if response is None or not response.is_session:
            raise NotFound("session_id", session_id[:80], "a session of a group that no step has trained on")
        return response


def _tokens(response: ResponseState, turn: int, first: int | None = None, earlier: bytes = b"") -> pb.TurnTokens:
    """Returns a turn's sampled tokens from the index ``first`` on, or all, with its end if it has ended. ``earlier``
    has the response tokens before the turn, if the caller needs them.
    """
    begin, end = response.turn_begin(turn) if first is None else first, response.turn_end(turn)
    rows = response.buffered()[begin:end]
    reason, stop = response.end_of(turn)
    return pb.TurnTokens(
        first_token=max(0, begin - shift_of(response.inputs, turn)),
        token_ids=rows["token_id"].tobytes(),
        logprobs=rows["logprob"].astype(np.float32).tobytes(),
        finish_reason=reason or "",
        stop=stop,
        earlier_token_ids=earlier,
        prompt_logprobs=response.prompt_logprobs
        if turn == len(response.inputs) and begin == response.turn_begin(turn)
        else b"",
    )


def _session_turn(response: ResponseState, capability: bytes) -> pb.SessionTurn:
    turn = len(response.inputs)
    tokens, begin = _tokens(response, turn), _begin(response, capability)
    return pb.SessionTurn(
        session_id=response.request_id, turn=turn, tokens=tokens, begin=begin, ended=response.is_closed
    )


def _earlier(response: ResponseState, turn: int) -> bytes:
    return response.buffered()["token_id"][places(response.inputs, turn, response.turn_begin(turn))].tobytes()


def _begin(response: ResponseState, capability: bytes) -> pb.SessionBegin:
    return pb.SessionBegin(
        group_id=response.group_id,
        prompt_id=response.prompt.prompt_id,
        task_id=response.prompt.task_id,
        version=response.version,
        prompt_token_ids=np.asarray(response.prompt_ids(), "<i4").tobytes(),
        prompt_text=response.prompt.text,
        verifier_json=response.prompt.verifier_json,
        earlier_token_ids=_earlier(response, len(response.inputs)),
        given_name=response.inputs[-1].name if response.inputs else "",
        is_evaluation=response.is_evaluation,
        capability=capability,
        sampling_json=json.dumps(dict(response.prompt.sampling)),
    )


def _reward(request: pb.EndSessionRequest, last_turn: int) -> Reward | None:
    """Returns the environment's verdict, or None if the reward function is to give it. Without a reward of the session,
    the turns' rewards add up. Raises InvalidValue.
    """
    turns = dict(request.turn_rewards)
    if not (request.HasField("reward") or turns):
        if request.components:
            raise InvalidValue("components", dict(request.components), "none without a reward")
        return None
    if turns and max(turns) > last_turn:
        raise InvalidValue("turn_rewards", max(turns), f"turns from 0 to {last_turn}")
    for turn, value in turns.items():
        check_reward(f"turn_rewards.{turn}", value)
    name, reward = ("reward", request.reward) if request.HasField("reward") else ("turn_rewards", sum(turns.values()))
    check_reward(name, reward)
    components, log = remarks(request.components, request.log)
    return Reward(reward, components, log, True, turns)
