"""Scores finished responses, and filters groups by their verdicts."""

import logging
import math
from dataclasses import dataclass
from typing import Protocol

from dora.core import commands as do
from dora.core import events as on
from dora.data.trajectory import Int32Array
from dora.data.types import Reward
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.distributions import SCORE
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.groups import FILTERED
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.rewards import GroupFilter
from dora.system.awake import awake_s
from dora.system.log_lines import about

log = logging.getLogger("dora.service")


class Verifier(Protocol):
    """Scores one response outside the event loop; never raises for errors of the user's function."""

    async def score(
        self, prompt_text: str, response_text: str | None, token_ids: Int32Array, verifier_json: str, name: str
    ) -> Reward: ...


@dataclass(eq=False, repr=False)
class Verdicts:
    """Carries out the core's commands to score responses. If ``group_filter`` is None, every group is kept."""

    _core: Core
    _buffer: ResponseBuffer
    _journal: Journal
    _telemetry: Telemetry
    _environments: Environments
    _verifier: Verifier
    _group_filter: GroupFilter | None

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            do.ScoreRequest: lambda command: self._begin(self._closed(command.request_id)),
            do.ScoreEvaluated: lambda command: self._begin(self._closed(command.request_id)),
            do.BreakOffSession: self._break_off_session,
        }

    def _begin(self, entry: ResponseState) -> None:
        self._core.spawn(self._score_evaluated(entry) if entry.is_evaluation else self._score(entry))

    def _closed(self, request_id: str) -> ResponseState:
        entry = self._buffer[request_id]
        if entry.is_session and not entry.is_closed:
            self._journal.session(entry, self._buffer.close(entry, self._core.now()))
            self._environments.over(request_id)
        return entry

    def _break_off_session(self, command: do.BreakOffSession) -> None:
        session = about(session=command.request_id)
        log.warning("session %s is broken off: %s", command.request_id, command.reason, extra=session)
        self._buffer[command.request_id].reward = Reward(math.nan, {}, f"broken off: {command.reason}", False)
        self._begin(self._closed(command.request_id))

    async def _score(self, entry: ResponseState) -> None:
        reward = await self._judge(entry)
        self._telemetry.trajectories_finished += 1
        if not await self._filtered(entry):
            self._journal.verdict(entry, self._core.now())
            self._core.post(on.RequestScored(entry.request_id, reward.value if reward.valid else 0.0, reward.valid))

    async def _score_evaluated(self, entry: ResponseState) -> None:
        await self._judge(entry)
        self._telemetry.trajectories_evaluated += 1
        self._core.post(on.RequestScored(entry.request_id))

    async def _judge(self, entry: ResponseState) -> Reward:
        """Scores a finished response and enters the verdict, unless its environment gave one. Returns it."""
        if entry.reward is not None:
            return entry.reward
        prompt, began_s = entry.prompt, awake_s()
        reward = await self._verifier.score(prompt.text, None, entry.tokens, prompt.verifier_json, entry.request_id)
        self._telemetry.observe(SCORE, awake_s() - began_s)
        if not reward.valid:
            self._telemetry.rewards_failed += 1
            which = about(request=entry.request_id, version=entry.version)
            log.error("%s: the verdict failed: %s", entry.request_id, reward.log, extra=which)
        entry.reward = reward
        return reward

    async def _filtered(self, entry: ResponseState) -> bool:
        """Returns whether the user's filter cancels the group after its last verdict, before any step has seen it.

        A group with a failed verdict is kept, because its rewards are incomplete.
        """
        chosen, group_id = self._group_filter, entry.group_id
        if chosen is None or self._buffer.get(entry.request_id) is None:
            return False
        rewards = self._buffer.rewards(group_id)
        if rewards is None or not all(reward.valid for reward in rewards):
            return False
        values = [reward.value for reward in rewards]
        kept = await chosen.keeps(entry.prompt.text, values, entry.prompt.verifier_json)
        if kept or self._buffer.get(entry.request_id) is None:  # it may have been cancelled meanwhile
            return False
        self._telemetry.groups_filtered += 1
        self._core.post(on.GroupCancelled(group_id, f"{FILTERED}{chosen.name}"))
        return True
