"""One session and its environment, from ``reset`` to the end.

History is kept as tokens: the chat's new messages are rendered, and what the policy sampled is never tokenised again.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from dora.agents.chat.message import checked_tools
from dora.agents.chat.rendering import Tools
from dora.agents.chat.reply import ChatReply as ParsedReply
from dora.agents.chat.reply import ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.chat.tree import Ask, SessionTree
from dora.agents.environment.calls import Calls, Ended, EnvironmentFailed, TimeLeft
from dora.agents.environment.pool import WarmPool, closed, prepare
from dora.agents.environment.processes import Remote
from dora.agents.environment.protocol import End, Environment, Reply, Steps, Task, new_messages
from dora.agents.environment.verdicts import ConversationDigest, VerdictCache, is_deterministic
from dora.agents.front.model import ServedModel
from dora.agents.front.source import Sampled
from dora.agents.front.turns import Texts
from dora.client.connection import until_answered
from dora.client.sessions import Turn
from dora.data.trajectory import Int32Array
from dora.errors import InvalidValue

NAME_CHARACTERS = 128
LONG_CHARACTERS = 1 << 16  # of a chat that is tokenised beside the event loop
BEGIN_CHARACTERS = 8  # for each token of the context: enough of a message to know that it has no room
RECONNECT_S = 300.0  # how long a session waits for a service that has gone


class Driven(Protocol):
    """The attributes of :class:`dora.client.sessions.Session` that an episode needs."""

    session_id: str
    prompt_id: str
    task_id: str
    prompt_token_ids: Int32Array
    prompt_text: str
    verifier_json: str
    turn: Turn
    is_evaluation: bool

    async def begin(self, prompt_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = "") -> Turn: ...
    async def ask(self, given_token_ids: Sequence[int], *, max_tokens: int = 0, name: str = "") -> Turn: ...
    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        log: str = "",
        is_cached: bool = False,
        is_warm: bool = False,
    ) -> None: ...
    def rewind(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Episodes:
    """Runs sessions with an environment class.

    ``starting`` environments may start up at once, and ``long`` chats be tokenised at once. A session has at most
    ``turns`` turns (0 for any). ``alone`` returns an environment with a process of its own for tasks that need one.
    ``context_tokens`` is the service's, 0 if not known.
    """

    make: Callable[[], Environment]
    model: ServedModel
    timeout_s: float
    starting: asyncio.Semaphore
    pool: WarmPool | None = None
    verdicts: VerdictCache = field(default_factory=lambda: VerdictCache(0))
    calls: Calls = field(default_factory=Calls)
    turns: int = 0
    alone: Callable[[Task], Awaitable[Remote | None]] | None = None
    context_tokens: int = 0
    long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    async def run(self, session: Driven) -> None:
        """Runs one session to its end. Raises Failed, what the environment raises, or what the service refuses.

        If its process ends through another's fault, it goes on in the next one, if it can.
        """
        while True:
            environments: list[Environment] = []
            try:
                return await self._run(session, environments)
            except Exception as error:
                ended = await environments[0].ended() if environments and isinstance(environments[0], Remote) else None
                if ended is None:
                    raise
                if ended.fault != "another":
                    raise ended from error

    async def _run(self, session: Driven, environments: list[Environment]) -> None:
        begun = session.turn.number
        if not begun and len(session.prompt_token_ids):
            raise EnvironmentFailed(
                f"prompt {session.prompt_id} has tokens: submit it without, as reset() gives the prompt"
            )
        left, task = TimeLeft(self.timeout_s, self.calls), task_of(session)
        alone = await self.alone(task) if self.alone is not None else None
        if alone is not None:
            environments.append(alone)

        async def start(environment: Environment, is_warm: bool) -> list[dict[str, Any]]:
            if not is_warm:
                await prepare(environment)
            if begun and not is_deterministic(environment):
                raise Ended(f"the process of its environment ended after turn {begun}", "another")
            return new_messages(await environment.reset(task), "reset()")

        try:
            async with self.starting:
                warm = None if self.pool is None or alone is not None else self.pool.take()
                if not environments:
                    environments.append(self.make() if warm is None else warm)
                (environment,) = environments
                if isinstance(environment, Remote):
                    await environment.enter()  # the start of a process is not the session's time
                chat = await left.run(start(environment, warm is not None))
            if begun:  # from its first turn on, each is repeated, with the tokens that were sampled
                session.rewind()
            await self._converse(session, environment, chat, left, is_warm=warm is not None)
        finally:
            for environment in environments:
                await closed(environment, self.calls)

    async def _converse(
        self, session: Driven, environment: Environment, chat: list[dict[str, Any]], left: TimeLeft, *, is_warm: bool
    ) -> None:
        tree, steps, numbers = SessionTree(self.model.renderer), Steps(), list[int]()
        tools = checked_tools(getattr(environment, "tools", None), "tools")
        judge = _Judge(environment, ConversationDigest(task_of(session)), self.verdicts)
        judge.told(chat)
        name, new = "reset", chat
        while True:
            try:
                ask = await self._asked(tree, chat, new, tools)
                inputs = [*tree.branches[ask.branch].token_ids, *ask.inputs] if ask.begins else ask.inputs
                call = session.begin if ask.begins else session.ask
                # a repeated turn is sampled once
                turn = await until_answered(partial(call, inputs, name=name), RECONNECT_S)
            except InvalidValue as error:
                if not numbers or error.field != "given_token_ids":
                    raise
                cut = steps.cut(f"no room for another turn: {error}")
                await until_answered(
                    partial(_end, session, cut, numbers, is_cached=False, is_warm=is_warm), RECONNECT_S
                )
                return
            parsed = self._parsed(turn, tools, is_thinking=ask.is_thinking)
            message = parsed.message()
            tree.answered(ask, turn.token_ids.tolist(), message)
            numbers.append(turn.number)
            reply = _reply(len(numbers) - 1, turn, parsed)
            found = await judge.step(reply, steps, left)
            if len(numbers) == self.turns and not isinstance(found, End):
                found = steps.cut(f"environment.turns = {self.turns}")
            if isinstance(found, End):
                await until_answered(
                    partial(_end, session, found, numbers, is_cached=judge.is_cached, is_warm=is_warm), RECONNECT_S
                )
                return
            judge.told(found)
            chat, new = [*chat, message, *found], found
            name = _name_of(found[-1], reply)

    async def _asked(
        self, tree: SessionTree, chat: list[dict[str, Any]], new: list[dict[str, Any]], tools: Tools | None
    ) -> Ask:
        """Renders the ``new`` last messages of a chat. Long ones are tokenised beside the event loop, a few at a time,
        and only their beginning if that alone has no room in the context. Raises InvalidValue then.
        """
        texts = [each["content"] for each in new if isinstance(each.get("content"), str)]
        if sum(map(len, texts)) <= LONG_CHARACTERS:
            return tree.ask(chat, tools)
        async with self.long:
            for text in texts if self.context_tokens else ():
                begin = text[: max(LONG_CHARACTERS, BEGIN_CHARACTERS * self.context_tokens)]
                tokens = len(await asyncio.to_thread(self.model.tokenizer.encode, begin, special_tokens=False))
                if tokens > self.context_tokens:
                    allowed = f"at most {self.context_tokens} tokens, the context"
                    raise InvalidValue("given_token_ids", f"a message of {len(text):,} characters", allowed)
            return await asyncio.to_thread(tree.ask, chat, tools)

    def _parsed(self, turn: Turn, tools: list[dict[str, Any]], *, is_thinking: bool) -> ParsedReply:
        offered = self.model.tools if tools else None
        parser = ReplyParser(offered, tools, is_thinking=is_thinking, new_id=_CallIds(turn.number))
        stream = TextStream(self.model.tokenizer, self.model.shows_special_tokens and bool(tools))
        stops = (turn.stop,) if turn.stop else ()
        _, reply = Texts(stream, parser, self.model.ends, stops).push(
            Sampled(tuple(turn.token_ids.tolist()), (), turn.finish_reason, turn.stop)
        )
        assert reply is not None, "a turn that has ended"
        return reply


class _Judge:
    """Steps an environment. The end of a conversation that a deterministic one has had before is not computed again."""

    def __init__(self, environment: Environment, conversation: ConversationDigest, verdicts: VerdictCache) -> None:
        self._environment = environment
        self._verdicts = verdicts if is_deterministic(environment) else None
        self._conversation = conversation
        self.is_cached = False

    def told(self, messages: list[dict[str, Any]]) -> None:
        self._conversation.told(messages)

    async def step(self, reply: Reply, steps: Steps, left: TimeLeft) -> list[dict[str, Any]] | End:
        self._conversation.replied(reply)
        key = self._conversation.key()
        known = None if self._verdicts is None else self._verdicts.get(key)
        if known is not None:
            self.is_cached = True
            return known
        found = steps.read(await left.run(self._environment.step(reply)), reply.turn)
        if self._verdicts is not None and isinstance(found, End):
            self._verdicts.put(key, found)
        return found


class _CallIds:
    """Names the calls of one turn, the same in each run. Mistral's templates ask for nine letters or digits."""

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._count = 0

    def __call__(self) -> str:
        self._count += 1
        return f"c{self._turn:04d}{self._count:04d}"


def task_of(session: Driven) -> Task:
    verifier = json.loads(session.verifier_json or "{}")
    return Task(
        session.prompt_id, session.task_id, session.prompt_text, verifier, session.session_id, session.is_evaluation
    )


def _reply(number: int, turn: Turn, parsed: ParsedReply) -> Reply:
    assert turn.finish_reason is not None
    return Reply(
        number,
        parsed.content,
        tuple(turn.token_ids.tolist()),
        turn.finish_reason,
        parsed.tool_calls,
        parsed.reasoning,
    )


def _name_of(message: Mapping[str, Any], reply: Reply) -> str:
    called = {call.id: call.name for call in reply.tool_calls}
    said = message.get("name") or called.get(message.get("tool_call_id") or "")
    name = said if isinstance(said, str) and said.isprintable() else ""
    return name[:NAME_CHARACTERS] or ("tool" if message["role"] == "tool" else "step")


async def _end(session: Driven, end: End, numbers: Sequence[int], *, is_cached: bool, is_warm: bool) -> None:
    rewards = {numbers[turn]: float(reward) for turn, reward in end.turn_rewards.items()}
    reward = None if end.reward is None else float(end.reward)
    await session.end(
        reward, components=end.components, turn_rewards=rewards, log=end.log, is_cached=is_cached, is_warm=is_warm
    )
