"""Groups whose sessions their caller drives: opened, for a version of its choice too, and withdrawn."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from dora.config import Config
from dora.core import events as on
from dora.errors import Conflict, InvalidValue, NotFound
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.prompt_ledger import PromptState
from dora.orchestrator.rollout.prompts import offer
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.rollout.window_wait import OPENED
from dora.orchestrator.services.cancel import cancelled
from dora.orchestrator.services.status import version_state
from dora.prompts.check import check_name
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded


@dataclass(eq=False, repr=False)
class Opening:
    """Opens and withdraws groups. ``model`` is the model's folder on this host."""

    _config: Config
    _core: Core
    _feed: PromptFeed
    _buffer: ResponseBuffer
    _environments: Environments
    _trainers: Trainers
    _model: Path

    async def open_group(self, request: pb.OpenRequest) -> str:
        """Queues the prompt of a group whose sessions its caller drives, or admits it as the request's version, unless
        that was done. Returns the group's environment.

        Raises InvalidValue, Conflict, LimitExceeded, and NotFound if the request only asks for a group that was opened;
        then nothing has changed.
        """
        prompt = request.prompt
        if prompt.environment:
            raise InvalidValue("environment", prompt.environment, "none: the caller is the environment")
        environment = f"{OPENED}{prompt.prompt_id}"
        check_name(environment, "prompt_id")
        ledger = self._feed.ledger
        version = request.version if request.HasField("version") else None
        if ledger.state(prompt.prompt_id) is not PromptState.DONE:
            known = ledger.prompt(prompt.prompt_id)
            if known.environment != environment:
                raise Conflict("prompt_id", prompt.prompt_id, "an id that is not in use", why="is in use")
            if prompt.group_size not in (0, known.group_size):
                raise Conflict("group_size", prompt.group_size, f"{known.group_size}, as in the first call", "differs")
            self._check_same(prompt.prompt_id, version)
            return environment
        if request.again:
            raise NotFound("prompt_id", prompt.prompt_id, "a group that was opened, and that no step has trained on")
        message = pb.Prompt()
        message.CopyFrom(prompt)
        message.environment = environment
        checked = await asyncio.to_thread(self._feed.check.from_wire, message)
        checked = replace(checked, group_size_min=checked.group_size)  # its caller drives all that it has opened
        ledger.check_free(prompt.prompt_id)
        self._environments.check_room(prompt.prompt_id, checked.group_size, ledger, self._config.sessions.open_max)
        if version is not None:
            self._check_version(version)
        self._feed.queue([checked])
        if version is not None:  # nothing comes between
            self._core.post(on.GroupRequested(offer(self._buffer, ledger.draw_one(prompt.prompt_id)), version))
        return environment

    def _check_version(self, version: int) -> None:
        """Raises Conflict for a version that is not live or admits no new group, LimitExceeded if the window has no
        room for it.
        """
        window = self._core.state.window
        alive = self._live()
        admitting = [each for each in alive if each >= window.oldest_admitting and each not in window.quarantined]
        if version not in admitting:
            why = "admits no new group" if version in alive else "is not live"
            raise Conflict("version", version, f"one of {', '.join(map(str, admitting)) or 'none now'}", why=why)
        if self._feed.closed or not window.admissible(version):
            wait = self._trainers.window_wait()
            why = "until the trainer takes a step" if wait is None else f"and waits for {wait.reason}"
            full = f"the window has no room for a group of version {version} {why}"
            raise LimitExceeded("version", version, f"opened later: {full}")

    def _live(self) -> list[int]:
        state = self._core.state
        versions = range(state.window.oldest_live, state.window.newest + 1)
        return [each for each in versions if version_state(state, each) not in ("rejected", "unavailable")]

    def withdraw(self, request: pb.WithdrawRequest) -> None:
        """Cancels an opened group, or takes it back from the queue. Raises InvalidValue, NotFound."""
        ledger, name = self._feed.ledger, request.prompt_id
        held = ledger.state(name) is not PromptState.DONE
        if held and ledger.prompt(name).environment == f"{OPENED}{name}":
            cancelled(self._core, ledger, self._buffer, [name], request.reason)
        elif held or not ledger.was_cancelled(name):
            raise NotFound("prompt_id", name[:80], "that of a group that Open has opened")

    def described(self) -> pb.DescribeReply:
        """Returns what is served."""
        sampling = self._buffer.default_sampling
        return pb.DescribeReply(
            model=str(self._model),
            newest_version=self._core.state.window.newest,
            versions=self._live(),
            max_model_len_tokens=self._config.workers.context_tokens,
            sampling=convert.sampling_to_wire(sampling),
            window_wait=self._trainers.window_wait(),
        )

    def _check_same(self, prompt_id: str, version: int | None) -> None:
        """Raises Conflict if a group was opened already and has another version."""
        found = (
            responses[0].version for _, responses in self._buffer.groups() if responses[0].prompt.prompt_id == prompt_id
        )
        own = None if version is None else next(found, None)
        if own != version:
            first = "left out" if own is None else str(own)
            raise Conflict("version", version, f"{first}, as in the group's first call", why="is another one")
