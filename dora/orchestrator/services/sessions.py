"""The gRPC service for environments: ended turns out, next turns, ends and failures in."""

import math
import time
from collections.abc import AsyncIterator
from typing import Final

import numpy as np

from dora.core import events as on
from dora.data.types import Reward
from dora.errors import MISSING, Conflict, InvalidValue, NotFound
from dora.orchestrator.rollout.response_state import ResponseState
from dora.orchestrator.runtime import Runtime
from dora.prompts.check import check_name
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext

NAME_MAX: Final = 128  # characters, of what gave tokens
REASON_MAX: Final = 200
LOG_MAX: Final = 4096
COMPONENTS_MAX: Final = 64  # parts of a reward


class SessionService(stubs.SessionsServicer):
    """Each call checks everything before it changes anything, so a refused one disturbs no session."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def Attend(self, request: pb.AttendRequest, context: ServicerContext) -> AsyncIterator[pb.SessionTurn]:
        check_name(request.environment, "environment")
        environments, buffer = self._runtime.environments, self._runtime.buffer
        with environments.attending(request.environment) as attendee:
            while True:
                request_id = await attendee.next()
                entry = buffer.get(request_id)
                turn = -1 if entry is None else len(entry.given)
                await self._runtime.journal.settled()  # a caller acts on no turn that a crash could undo
                if entry is None or not environments.is_idle(entry) or len(entry.given) != turn:
                    continue
                yield pb.SessionTurn(session_id=request_id, turn=turn, tokens=_tokens(entry, turn), begin=_begin(entry))

    async def Turn(self, request: pb.TurnRequest, context: ServicerContext) -> AsyncIterator[pb.TurnTokens]:
        entry = self._session(request.session_id)
        turns = len(entry.given)
        if request.turn > turns:
            self._ask(entry, request)
        elif request.turn:
            self._check_repeated(entry, request)
        sent, turn = entry.turn_begin(request.turn), request.turn
        with self._runtime.environments.reading(entry.request_id) as changed:
            while True:
                changed.clear()
                has_ended = turn < len(entry.given) or entry.finish_reason is not None
                piece = _tokens(entry, turn, sent)
                if has_ended:
                    await self._runtime.journal.settled()
                    yield piece
                    return
                if self._runtime.buffer.get(entry.request_id) is not entry:
                    raise NotFound("session_id", entry.request_id, "an open session", why="was cancelled or replaced")
                if len(piece.token_ids):
                    sent += len(piece.token_ids) // convert.TOKEN_ID_BYTES
                    yield piece
                await changed.wait()

    async def EndSession(self, request: pb.EndSessionRequest, context: ServicerContext) -> pb.EndSessionReply:
        runtime, reward = self._runtime, _reward(request)
        entry = self._session(request.session_id)
        if entry.is_closed:
            if reward is not None and entry.reward != reward:
                raise Conflict("session_id", entry.request_id, "an open session", why="has ended with another reward")
        else:
            entry.reward = reward
            try:
                runtime.post(on.SessionEnded(entry.request_id))
            except InvalidValue:
                entry.reward = None
                raise
            runtime.journal.verdict(entry, time.time())
        await runtime.journal.settled()
        return pb.EndSessionReply()

    async def FailSession(self, request: pb.FailSessionRequest, context: ServicerContext) -> pb.FailSessionReply:
        runtime, entry = self._runtime, self._session(request.session_id)
        _check_line("reason", request.reason, REASON_MAX, least=1)
        runtime.post(on.SessionFailed(entry.request_id, request.reason))
        await runtime.journal.settled()
        in_place = [
            each.request_id
            for group_id, entries in runtime.buffer.groups()
            if group_id == entry.group_id
            for each in entries
            if each.sample_index == entry.sample_index and each is not entry
        ]
        return pb.FailSessionReply(replacement_id=in_place[0] if in_place else "")

    def _session(self, session_id: str) -> ResponseState:
        entry = self._runtime.buffer.get(session_id)
        if entry is None or not entry.is_session:
            raise NotFound("session_id", session_id[:80], "a session of a group that no step has trained on")
        return entry

    def _ask(self, entry: ResponseState, request: pb.TurnRequest) -> None:
        """Begins the next turn. Raises NotFound, Conflict or InvalidValue; then nothing has changed."""
        runtime = self._runtime
        if request.turn > len(entry.given) + 1:
            raise InvalidValue("turn", request.turn, f"at most {len(entry.given) + 1}, the next")
        runtime.machine.check_turn(entry.request_id)
        _check_line("name", request.name, NAME_MAX)
        given, max_tokens = self._given(entry, request)
        at = time.time()
        record = runtime.buffer.give(entry, given, max_tokens, request.name, at)
        runtime.post(on.TurnAsked(entry.request_id, len(given)), record_of=lambda: record)

    def _given(self, entry: ResponseState, request: pb.TurnRequest) -> tuple[tuple[int, ...], int]:
        """The given tokens and the limit of the sampled ones, checked against context and vocabulary."""
        limit = self._runtime.config.workers.context_tokens
        room = limit - len(entry.prompt.token_ids) - len(entry) - 1  # one is sampled at least
        count = len(request.given_token_ids) // convert.TOKEN_ID_BYTES
        if not 1 <= count <= room:  # before anything is decoded
            allowed = f"1 to {room} tokens: the session has {limit - 1 - room} of workers.max_model_len_tokens {limit}"
            raise InvalidValue("given_token_ids", f"{count} tokens" if count else MISSING, allowed)
        given = convert.token_ids_from_wire(request.given_token_ids, "given_token_ids")
        vocab_size = self._runtime.store.reference.vocab_size
        if vocab_size and not 0 <= min(given) <= max(given) < vocab_size:
            raise InvalidValue("given_token_ids", [min(given), max(given)], f"ids from 0 to {vocab_size - 1}")
        most = room - count + 1
        max_tokens = request.max_tokens or min(most, entry.sampling.max_tokens)
        if max_tokens > most:
            raise InvalidValue("max_tokens", max_tokens, f"at most {most}, which the context has room for")
        tokens = len(entry) + count + max_tokens
        most_bytes = convert.trajectory_bytes_most(len(entry.prompt.token_ids), tokens, None)
        limit_bytes = self._runtime.config.service.max_message_bytes
        if most_bytes > limit_bytes:  # it could be generated but not delivered
            allowed = f"such that a trajectory fits into service.max_message_bytes {limit_bytes}"
            raise InvalidValue("given_token_ids", f"{count} tokens, {most_bytes} bytes in all", allowed)
        return given, max_tokens

    def _check_repeated(self, entry: ResponseState, request: pb.TurnRequest) -> None:
        """Raises Conflict if a turn is asked again with other tokens."""
        run = entry.given[request.turn - 1]
        if entry.tokens[run.first_token : run.end].tobytes() != request.given_token_ids:
            raise Conflict("given_token_ids", f"{run.tokens} tokens", "those of its first call", why="differ")


def _tokens(entry: ResponseState, turn: int, first: int | None = None) -> pb.TurnTokens:
    """The sampled tokens of a turn, from the index ``first`` on (None: all), with its end if it has ended."""
    begin, end = entry.turn_begin(turn) if first is None else first, entry.turn_end(turn)
    is_last = turn == len(entry.given)
    reason, stop = entry.finish_reason, entry.stop
    if not is_last:
        reason, stop = entry.given[turn].before, entry.given[turn].stop_before
    return pb.TurnTokens(
        first_token=begin,
        token_ids=entry.tokens[begin:end].tobytes(),
        logprobs=entry.logprobs[begin:end].astype(np.float32).tobytes(),
        finish_reason=reason or "",
        stop=stop,
    )


def _begin(entry: ResponseState) -> pb.SessionBegin:
    return pb.SessionBegin(
        group_id=entry.group_id,
        prompt_id=entry.prompt.prompt_id,
        task_id=entry.prompt.task_id,
        version=entry.version,
        prompt_token_ids=np.asarray(entry.prompt.token_ids, "<i4").tobytes(),
        prompt_text=entry.prompt.text,
        verifier_json=entry.prompt.verifier_json,
        earlier_token_ids=entry.tokens[: entry.turn_begin(len(entry.given))].tobytes(),
    )


def _reward(request: pb.EndSessionRequest) -> Reward | None:
    """The environment's verdict; None if the reward function is to give it. Raises InvalidValue."""
    _check_line("log", request.log, LOG_MAX, lines=True)
    if not request.HasField("reward"):
        if request.components:
            raise InvalidValue("components", dict(request.components), "none without a reward")
        return None
    components = dict(request.components)
    if len(components) > COMPONENTS_MAX:
        raise InvalidValue("components", len(components), f"at most {COMPONENTS_MAX}")
    for name, value in (("reward", request.reward), *components.items()):
        if not math.isfinite(value):
            raise InvalidValue(name if name == "reward" else f"components.{name}", value, "a finite number")
    return Reward(request.reward, components, request.log, True)


def _check_line(field: str, text: str, most: int, *, least: int = 0, lines: bool = False) -> None:
    if not least <= len(text) <= most or not (lines or text.isprintable()):
        raise InvalidValue(field, text[:80], f"{least} to {most} printable characters")
