"""The sessions of agents: their branches, turns, rewards and ends."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from dora.agents.chat.reply import ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.chat.tree import BREAKS, Ask, BranchPlace, SessionTree
from dora.agents.front.errors import SessionClosed
from dora.agents.front.keys import key_of
from dora.agents.front.model import ServedModel
from dora.agents.front.request import TurnRequest, version_of
from dora.agents.front.source import Sampled, SessionHandle
from dora.agents.front.turns import RunningTurn, Texts
from dora.data.verdict import check_reward
from dora.errors import Conflict, DoraError, InvalidValue, LimitExceeded

BRANCHES_MAX: Final = 256
GIVER: Final = "agent"  # what gives tokens, for the record
NAME_CHARACTERS: Final = 12  # of the name of a call, which has to differ from the others of its session
_ID_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


def giver_of(name: str) -> str:
    """Returns the service's name for the call that asked a turn, by which a retry at another front finds it."""
    return f"{GIVER} {name[:NAME_CHARACTERS]}" if name else GIVER


def new_call_id() -> str:
    """Returns the id of a tool call: nine letters, as the templates of Mistral ask for."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class SessionReward:
    """The reward of a session. If ``value`` is None, the service's reward function scores it."""

    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    log: str = ""

    def noted(self, later: "SessionReward") -> "SessionReward":
        """Returns this verdict with the components and log of a later one, as far as that has any."""
        return replace(self, components=later.components or self.components, log=later.log or self.log)


def ended_turn(handle: SessionHandle) -> RunningTurn:
    last = handle.last
    turn = RunningTurn(handle.version, tuple(handle.token_ids[: len(handle.token_ids) - len(last.token_ids)]), None)
    turn.add(last)
    return turn


class AgentSession:
    """One session of an agent. Each of its branches is a trajectory.

    ``defaults`` are the sampling parameters of a turn whose call does not give them. ``begun`` is set once a turn was
    requested, ``idle`` while none is under way. If it ``is_driven``, the prompt of an environment's session gives its
    sampling, and no request does.
    """

    def __init__(
        self,
        session_id: str,
        handle: SessionHandle,
        model: ServedModel,
        *,
        defaults: Mapping[str, Any],
        now_s: float,
        spawn: Callable[[Any], asyncio.Task[None]],
        is_driven: bool = False,
    ) -> None:
        self.session_id = session_id
        self.group = ""  # of an opening; empty: its first call has opened it
        self.version = handle.version
        self.tree = SessionTree(model.renderer)
        self.used_s = now_s
        self.verdict = SessionReward()
        self._turn_rewards: dict[int, float] = {}
        self.is_closed = handle.is_over
        self.turns = 0  # under way
        self.begun, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._is_driven = is_driven
        self._handle = handle
        self._numbers: dict[tuple[int, int], int] = {}  # of the service's turns, by branch and tokens up to their end
        self._restored = handle.given_name  # of the last turn of another front, until a call comes
        tokens = handle.token_ids
        if handle.turn and tokens:
            self.tree.restored(tokens, len(tokens) - len(handle.last.token_ids))
            self._numbers[0, len(tokens)] = handle.turn
        self._origins: dict[int, int] = {}  # the branches that others begin with
        self._model = model
        self._defaults = dict(defaults)
        self._spawn = spawn
        self._asking = asyncio.Lock()  # a service begins the turns of a session one after another

    @property
    def key(self) -> str:
        return key_of(self.session_id, self._handle.capability)

    async def begin(self, requested: TurnRequest, name: str = "") -> list[RunningTurn]:
        """Begins the turns of a request, one for each choice. ``name`` is that of the request and its retries.

        If another front began the session's last turn for it, that turn is the answer. Raises InvalidValue, Conflict,
        LimitExceeded.
        """
        self._check(requested)
        restored, self._restored = self._restored, ""
        if restored and restored == giver_of(name) and requested.choices == 1 and self._handle.last.token_ids:
            return [await self._replayed(requested, self._handle.last)]
        if requested.token_ids:
            asks = [self.tree.ask_tokens(requested.token_ids) for _ in range(requested.choices)]
        else:
            plan = self.tree.plan(requested.messages, requested.tools, requested.options, requested.prompt)
            if not plan.is_rendered:  # a session that was just opened begins at once, whoever leaves
                await self._model.beside(plan.rendered)
                self._check(requested)  # the session may have ended meanwhile
            asks = [self.tree.begin(plan) for _ in range(requested.choices)]
        return [self._begin(requested, ask, number, name) for number, ask in enumerate(asks)]

    async def _replayed(self, requested: TurnRequest, last: Sampled) -> RunningTurn:
        work = partial(self._model.renderer.prompt, requested.messages, requested.tools, requested.options)
        prompt = requested.prompt or (await self._model.beside(work) if requested.messages else None)
        about = (requested.messages, requested.tools, requested.options)
        ask = self.tree.ask_restored(*about, is_thinking=prompt is not None and prompt.is_thinking)
        turn = self._running(requested, ask, self._sampling_of(requested, 0))
        turn.add(last)
        self._answered(requested, ask, turn)
        return turn

    def _check(self, requested: TurnRequest) -> None:
        if self.is_closed:
            raise SessionClosed("session", self.session_id, "an open session: open another one")
        version = version_of(requested.model)
        if version is not None and version != self.version:
            why = "is another version than the session's"
            raise Conflict(
                "model", requested.model, f"policy-v{self.version}: all turns of a session have one version", why
            )
        for name, value in requested.sampling.items() if self._is_driven else ():
            if name != "stop_token_ids" or not self._model.ends.issuperset(value):
                raise InvalidValue(
                    name, value, "left out", why="is the prompt's: rollout and a prompt's sampling give it"
                )
        if len(self.tree.branches) + requested.choices > BRANCHES_MAX:
            raise LimitExceeded("branches", len(self.tree.branches), f"at most {BRANCHES_MAX} in one session")

    def _begin(self, requested: TurnRequest, ask: Ask, number: int, name: str) -> RunningTurn:
        if ask.origin is not None:
            self._origins[ask.branch] = ask.origin.branch
        sampling = self._sampling_of(requested, number)
        turn = self._running(requested, ask, sampling)
        turn.prefix_break = ask.reason if ask.begins and ask.reason in BREAKS else ""
        self.turns += 1
        self.begun.set()
        self.idle.clear()
        wants_prompt = requested.prompt_logprobs and not number  # those of other choices would be the same
        self._spawn(self._run(turn, ask, requested, sampling, giver_of(name), wants_prompt=wants_prompt))
        return turn

    def _sampling_of(self, requested: TurnRequest, number: int) -> dict[str, Any]:
        if self._is_driven:
            return {}
        return {**self._defaults, **requested.sampling_of(number)}

    def _running(self, requested: TurnRequest, ask: Ask, sampling: Mapping[str, Any]) -> RunningTurn:
        model = self._model
        texts = None
        if not requested.token_ids or requested.is_text:
            parser = ReplyParser(
                model.tools if requested.calls else None,
                requested.tools,
                is_thinking=ask.is_thinking,
                new_id=new_call_id,
                is_plain=bool(requested.token_ids),
            )
            stream = TextStream(model.tokenizer, special_tokens=model.shows_special_tokens and requested.calls)
            texts = Texts(stream, parser, model.ends, tuple(sampling.get("stop", ())))
        branch = self.tree.branches[ask.branch]
        return RunningTurn(self.version, (*branch.token_ids, *ask.inputs), texts)

    async def _run(
        self,
        turn: RunningTurn,
        ask: Ask,
        requested: TurnRequest,
        sampling: Mapping[str, Any],
        giver: str,
        *,
        wants_prompt: bool,
    ) -> None:
        try:
            async with self._asking:
                after = self._after(ask)
                pieces = self._handle.stream(
                    ask.inputs,
                    after_turn=after,
                    max_tokens=requested.max_tokens,
                    name=giver,
                    sampling=sampling,
                    prompt_logprobs=wants_prompt,
                )
                await turn.run(pieces)
                if turn.finish_reason not in (None, "abort"):
                    self._numbers[ask.branch, len(turn.prompt_token_ids) + len(turn.token_ids)] = self._handle.turn
        finally:
            self.turns -= 1
            if not self.turns:
                self.idle.set()
            if turn.finish_reason in (None, "abort"):
                self.tree.dropped(ask, is_known=not isinstance(turn.error, InvalidValue))
            else:
                self._answered(requested, ask, turn)

    def _answered(self, requested: TurnRequest, ask: Ask, turn: RunningTurn) -> None:
        message = None if turn.reply is None or requested.token_ids else turn.reply.message()
        self.tree.answered(ask, turn.token_ids, message)

    def _after(self, ask: Ask) -> int | None:
        place = ask.origin
        if not ask.begins:
            place = BranchPlace(ask.branch, len(self.tree.branches[ask.branch].token_ids))
        if place is None or not place.tokens:
            return None
        branch = place.branch
        while (branch, place.tokens) not in self._numbers:
            branch = self._origins[branch]
        return self._numbers[branch, place.tokens]

    def reward_turn(self, turn: int, reward: float) -> None:
        """Notes the reward of one turn. Raises InvalidValue for a turn that the session lacks."""
        turns = len(self.tree.branches[0].turns) if self.tree.branches else 0
        if type(turn) is not int or not 0 <= turn < turns:
            raise InvalidValue("turn", turn, f"a turn of the session's first branch: it has {turns}, from 0")
        rewards = {**self._turn_rewards, turn: reward}
        check_reward("reward: the sum of the turns", sum(rewards.values()))
        self._turn_rewards = rewards

    async def close(self, verdict: SessionReward | None = None) -> None:
        """Ends the session, all its branches with one reward. Raises Conflict if it has sampled nothing yet, or a turn
        is under way; then it stays open.
        """
        if self.turns:
            raise Conflict("session", self.session_id, "closed after its turns", why="has a turn under way")
        reward = self.verdict if verdict is None else verdict
        ends = [end for _, end in self.tree.branches[0].turns] if self._turn_rewards else []
        rewards = {self._numbers[0, ends[turn]]: reward for turn, reward in self._turn_rewards.items()}
        was_closed, self.is_closed = self.is_closed, True  # no turn begins meanwhile
        try:
            await self._handle.end(reward.value, components=reward.components, turn_rewards=rewards, log=reward.log)
        except DoraError:
            self.is_closed = was_closed
            raise

    async def abandon(self, reason: str) -> None:
        """Gives the session up, and its group with it."""
        self.is_closed = True
        await self._handle.give_up(reason)
