"""Carries out the core's commands: one method for each kind.

A command that has an outcome gets it as exactly one event. A background task here posts that event (prompts drawn, a
response scored), or the worker that received the command sends it.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import Handoff, Kind
from dora.core.rules.selection import REDUNDANT
from dora.data.run_record import CancelledGroup
from dora.data.trajectory import Int32Array
from dora.data.types import Prompt, Reward
from dora.errors import NotFound, VersionRejected
from dora.journal import records
from dora.journal.versions import KeptVersions
from dora.orchestrator.recording.storage import KEPT, RUN_FOLDER, Storage
from dora.orchestrator.rollout.distributions import SCORE
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.orders import PublishedVersions, worker_message
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState, started
from dora.orchestrator.rollout.streams import Sessions
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.prompts.traits import features_of, key_of
from dora.rewards import GroupFilter
from dora.rpc import dora_pb2 as pb
from dora.system.log_lines import about

log = logging.getLogger("dora.service")

ON_REQUEST: Final = "cancelled on request"  # a reason, or the beginning of one
FILTERED: Final = "filtered: "  # a reason; the filter's name follows


class Feed(Protocol):
    """Draws prompts in the ledger (feed.py)."""

    async def take(self, count: int) -> tuple[list[Prompt], bool]: ...


class Verifier(Protocol):
    """Scores one response outside the event loop; never raises for errors of the user's function."""

    async def score(
        self, prompt_text: str, response_text: str | None, token_ids: Int32Array, verifier_json: str, name: str
    ) -> Reward: ...


class Store(Protocol):
    """Keeps the weights of every live version, until they are retired."""

    def set_aside(self, version: int) -> Path | None: ...
    def free(self, gone: Path) -> None: ...


class HostVersions(PublishedVersions, Protocol):
    """The hosts with stores of their own, and the versions that are live on them (hosts.py)."""

    def retired(self, version: int) -> None: ...
    def shares_store(self, worker_id: str) -> bool: ...
    def look_at_store(self, version: int) -> None: ...


class Executor:
    """Runs commands. ``post`` hands an event to the core; ``spawn`` runs a coroutine in the background.

    ``session_over`` receives a session that has ended, was replaced or is forgotten, ``session_idles`` one that begins
    without a prompt.
    ``handoff_of``: the handoff that a command id belongs to. ``row_of``: the core's rows of requests. ``trainer_name``:
    the trainer that is attached; empty: there is none. ``now``: seconds since the Unix epoch.
    """

    def __init__(
        self,
        *,
        buffer: ResponseBuffer,
        feed: Feed,
        prompts: PromptLedger,
        verifier: Verifier,
        group_filter: GroupFilter | None,
        store: Store,
        recorder: RecordQueue,
        storage: Storage,
        sessions: Sessions,
        hosts: HostVersions,
        evaluations: Evaluations,
        handoff_of: Callable[[int], Handoff | None],
        row_of: Mapping[str, int],
        telemetry: Telemetry,
        post: Callable[[on.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        journal: Journal | None = None,
        versions: KeptVersions | None = None,
        reference_version: int = 0,
        trainer_name: Callable[[], str] = lambda: "",
        session_over: Callable[[str], None] = lambda request_id: None,
        session_idles: Callable[[str], None] = lambda request_id: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._buffer = buffer
        self._feed = feed
        self._prompts = prompts
        self._verifier = verifier
        self._group_filter = group_filter
        self._store = store
        self._recorder = recorder
        self._storage = storage
        self._sessions = sessions
        self._hosts = hosts
        self._evaluations = evaluations
        self._handoff_of = handoff_of
        self._row_of = row_of
        self._telemetry = telemetry
        self._journal = Journal() if journal is None else journal
        self._versions = versions
        self._reference_version = reference_version
        self._trainer_name = trainer_name
        self._session_over, self._session_idles = session_over, session_idles
        self._now = now
        self._post = post
        self._spawn = spawn
        self._method_of: dict[type, Callable[[Any], None]] = {
            do.DrawPrompts: self._draw_prompts,
            do.AdmitGroup: self._admit_group,
            do.GrowGroup: self._grow_group,
            do.DropPrompt: self._drop_prompt,
            do.ScoreRequest: self._score_request,
            do.BreakOffSession: self._break_off_session,
            do.ReplaceRequest: self._replace_request,
            do.DropGroup: self._drop_group,
            do.ForgetGroup: self._forget_group,
            do.DeliverGroup: self._deliver_group,
            do.CloseStep: self._close_step,
            do.ScoreEvaluated: self._score_evaluated,
            do.BeginEvaluationGroup: evaluations.begin_group,
            do.EndEvaluationGroup: evaluations.end_group,
            do.EndEvaluation: evaluations.end,
            do.RetireVersion: self._retire_version,
            do.PinVersion: self._pin_version,
            do.ResizeWindow: self._resize_window,
            do.LapseLease: self._lapse_lease,
            do.RejectVersion: self._reject_version,
            do.ReleaseSnapshot: self._release_snapshot,
            do.EvictWorker: self._evict_worker,
            do.StopWorker: self._stop_worker,
        }

    def carry_out(self, command: do.Command) -> None:
        """Runs one command without waiting; slow work continues in the background. An exception here is a bug."""
        if isinstance(command, do.WorkerCommand):
            self._to_worker(command)
        else:
            self._method_of[type(command)](command)

    # --------------------------------------------------------------------------------------------- prompts and groups

    def _draw_prompts(self, command: do.DrawPrompts) -> None:
        self._spawn(self._draw(command.count))

    async def _draw(self, count: int) -> None:
        prompts, exhausted = await self._feed.take(count)
        self._post(on.PromptsOffered(tuple(offer(self._buffer, prompt) for prompt in prompts), exhausted))

    def _admit_group(self, command: do.AdmitGroup) -> None:
        prompt = self._prompts.drawn(command.prompt_id)
        rows = {request_id: self._row_of[request_id] for request_id in command.request_ids}
        entries = self._buffer.admit(command.group_id, prompt, command.version, rows, self._now())
        self._prompts.admit(entries, command.version + self._buffer.window_versions - 1)
        if not prompt.token_ids:
            for entry in started(entries):
                self._session_idles(entry.request_id)

    def _grow_group(self, command: do.GrowGroup) -> None:
        for request_id in command.request_ids:
            if not self._buffer[request_id].prompt.token_ids:
                self._session_idles(request_id)

    def _drop_prompt(self, command: do.DropPrompt) -> None:
        self._prompts.drop(command.prompt_id)

    def _score_request(self, command: do.ScoreRequest) -> None:
        self._spawn(self._score(self._closed(command.request_id)))

    def _closed(self, request_id: str) -> ResponseState:
        """Returns a finished response; a session is closed."""
        entry = self._buffer[request_id]
        if entry.is_session and not entry.is_closed:
            self._note(entry, self._buffer.close(entry, self._now()))
            self._session_over(request_id)
        return entry

    def _note(self, entry: ResponseState, record: records.Tokens) -> None:
        if not entry.is_evaluation:  # evaluations do not outlive the service
            self._journal.note(record)

    def _break_off_session(self, command: do.BreakOffSession) -> None:
        session = about(session=command.request_id)
        log.warning("session %s is broken off: %s", command.request_id, command.reason, extra=session)
        self._buffer[command.request_id].reward = Reward(math.nan, {}, f"broken off: {command.reason}", False)
        entry = self._closed(command.request_id)
        self._spawn(self._score_one_evaluated(entry) if entry.is_evaluation else self._score(entry))

    def _replace_request(self, command: do.ReplaceRequest) -> None:
        session = about(session=command.request_id)
        said = "session %s is replaced by %s: %s"
        log.warning(said, command.request_id, command.replacement_id, command.reason, extra=session)
        before = self._buffer[command.request_id]
        record = self._buffer.substitute(command.request_id, command.replacement_id, self._now())
        self._note(before, record)
        if before.is_evaluation:
            self._evaluations.replace(before, self._buffer[command.replacement_id])
        self._session_over(command.request_id)
        self._session_idles(command.replacement_id)

    def _score_evaluated(self, command: do.ScoreEvaluated) -> None:
        self._spawn(self._score_one_evaluated(self._closed(command.request_id)))

    async def _score(self, entry: ResponseState) -> None:
        reward = await self._judge(entry)
        self._telemetry.trajectories_finished += 1
        if not await self._filtered(entry):
            self._journal.verdict(entry, self._now())
            self._post(on.RequestScored(entry.request_id, reward.value if reward.valid else 0.0, reward.valid))

    async def _score_one_evaluated(self, entry: ResponseState) -> None:
        await self._judge(entry)
        self._telemetry.trajectories_evaluated += 1
        self._post(on.RequestScored(entry.request_id))

    async def _judge(self, entry: ResponseState) -> Reward:
        """Scores a finished response and enters the verdict, unless its environment gave one. Returns it."""
        if entry.reward is not None:
            return entry.reward
        prompt, began_s = entry.prompt, time.monotonic()
        reward = await self._verifier.score(prompt.text, None, entry.tokens, prompt.verifier_json, entry.request_id)
        self._telemetry.observe(SCORE, time.monotonic() - began_s)
        if not reward.valid:
            self._telemetry.rewards_failed += 1
            which = about(request=entry.request_id, version=entry.version)
            log.error("%s: the verdict failed: %s", entry.request_id, reward.log, extra=which)
        entry.reward = reward
        return reward

    async def _filtered(self, entry: ResponseState) -> bool:
        """Returns whether the user's filter cancels the group after its last verdict. No step has seen the group yet.

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
        self._post(on.GroupCancelled(group_id, f"{FILTERED}{chosen.name}"))
        return True

    def _drop_group(self, command: do.DropGroup) -> None:
        chosen = command.reason == REDUNDANT or command.reason.startswith((FILTERED, ON_REQUEST))
        level = logging.INFO if chosen else logging.WARNING
        log.log(level, "group %s was cancelled: %s", command.group_id, command.reason)
        entries = self._buffer.forget(command.group_id)
        for entry in entries if entries[0].is_session else ():
            self._session_over(entry.request_id)
        cancelled = _cancelled(entries, command, self._now())
        line, on_request = json.dumps(asdict(cancelled), allow_nan=False), command.reason.startswith(ON_REQUEST)
        self._prompts.cancel_group(entries, line, on_request=on_request)
        self._recorder.cancelled(cancelled)

    def _forget_group(self, command: do.ForgetGroup) -> None:
        entries = self._buffer.forget(command.group_id)
        self._prompts.finish(entries[0].prompt.prompt_id)

    # -------------------------------------------------------------------------------------------------------- trainer

    def _deliver_group(self, command: do.DeliverGroup) -> None:
        group, first = self._buffer.deliver(command.group_id, command.step)
        if first:
            self._journal.note(records.Leased(self._buffer.number(command.group_id), command.step))
            self._recorder.delivered(group)
        stream = self._sessions.stream_of(command.trainer_epoch, command.step)
        if stream is not None:
            stream.put(group)

    def _close_step(self, command: do.CloseStep) -> None:
        stream = self._sessions.stream_of(command.trainer_epoch, command.step)
        if stream is not None:
            stream.close(exhausted=command.exhausted)
            self._sessions.stream = None

    def _pin_version(self, command: do.PinVersion) -> None:
        self._forget_version(command.version)  # evaluations do not outlive the service

    def _forget_version(self, version: int) -> None:
        """Notes that a restart of the service does not need the version."""
        keeps = version == self._reference_version
        self._journal.note(records.Retired(version, keeps))
        if self._versions is not None and not keeps:
            self._spawn(self.drop_kept(version))

    def _retire_version(self, command: do.RetireVersion) -> None:
        self._forget_version(command.version)
        with self._storage.tidying(RUN_FOLDER):
            gone = self._store.set_aside(command.version)
            if gone is not None:
                self._spawn(self._free(gone))
        self._hosts.retired(command.version)

    async def _free(self, gone: Path) -> None:
        """Deletes a retired version's files in the background."""
        with self._storage.tidying(RUN_FOLDER):
            await asyncio.to_thread(self._store.free, gone)

    async def drop_kept(self, version: int) -> None:
        """Deletes a version's stored weights once no client can be told that they are needed."""
        if self._versions is None:
            return
        await self._journal.settled()
        with self._storage.tidying(KEPT):
            await asyncio.to_thread(self._versions.drop, version)

    def _resize_window(self, command: do.ResizeWindow) -> None:
        log.info("the window changes to %d: %s", command.size, command.reason)
        self._buffer.window_versions = command.size

    def _lapse_lease(self, command: do.LapseLease) -> None:
        name = self._trainer_name()
        if name:  # otherwise it has left, and nobody is kept out
            allowed = "another may attach without take_over, and gets the groups of its step"
            log.warning("trainer %s: %s; %s", name, command.reason, allowed)

    def _reject_version(self, command: do.RejectVersion) -> None:
        error = VersionRejected(command.version, command.reason, command.worker_ids, command.canary_difference)
        log.error("%s", error, extra=about(version=command.version))
        if command.worker_ids:  # otherwise the weights were right, and a start that carries on has its own copy
            self._journal.note(
                records.Rejected(command.version, command.reason, list(command.worker_ids), command.canary_difference)
            )
            self._recorder.withdrawn(command.version)
        if self._sessions.stream is not None:
            self._sessions.stream.close(error=error)
            self._sessions.stream = None

    # -------------------------------------------------------------------------------------------------------- workers

    def _to_worker(self, command: do.WorkerCommand) -> None:
        session = self._sessions.of_epoch(command.worker_id, command.epoch)
        if session is None:
            return  # it broke a moment ago; its loss is on the way to the core
        try:
            session.send(self._message(command))
        except (NotFound, OSError) as error:  # the store no longer knows the version's name
            if not isinstance(command, do.LoadVersion):
                raise
            which = about(worker=command.worker_id, version=command.version)
            log.error("%s cannot load version %d: %s", command.worker_id, command.version, error, extra=which)
            self._spawn(self._cannot_load(command, str(error)))

    async def _cannot_load(self, command: do.LoadVersion, error: str) -> None:
        """Reports a failed load for the worker. The worker's own host may still have the version, if it is another
        host.
        """
        kind = "missing" if self._hosts.shares_store(command.worker_id) else "refused"
        self._post(on.CommandDone(command.worker_id, command.epoch, command.command_id, False, error, kind))
        self._hosts.look_at_store(command.version)

    def _message(self, command: do.WorkerCommand) -> pb.WorkerCommand:
        """Builds the wire message. Each end of a handoff gets the address of the other, if that is connected."""
        handoff = self._handoff_of(command.command_id)
        if handoff is not None and handoff.overdue and isinstance(command, do.CancelReservation):
            ends = f"{handoff.source} to {handoff.target}"
            which = about(request=handoff.request_id)
            log.warning(
                "%s: its handoff from %s was undone: %s", handoff.request_id, ends, handoff.overdue, extra=which
            )
        if handoff is None:
            return worker_message(command, self._buffer, self._hosts)
        source, target = self._sessions.end(handoff.source), self._sessions.end(handoff.target)
        was_parked, has_pool = handoff.kind is Kind.RESUME, bool(self._sessions.pools)
        return worker_message(command, self._buffer, self._hosts, source, target, was_parked, has_pool)

    def _release_snapshot(self, command: do.ReleaseSnapshot) -> None:
        """Deletes nothing: the snapshot lies at its target, which was told to import it or drop it."""

    def _evict_worker(self, command: do.EvictWorker) -> None:
        session = self._sessions.of_epoch(command.worker_id, command.epoch)
        if session is not None:
            self._sessions.replace(session, command.reason)

    def _stop_worker(self, command: do.StopWorker) -> None:
        self._sessions.release(command.worker_id, command.epoch)


def offer(buffer: ResponseBuffer, prompt: Prompt) -> on.OfferedPrompt:
    """Converts a prompt into the core's form."""
    return on.OfferedPrompt(
        prompt.prompt_id,
        prompt.task_id,
        len(prompt.token_ids),
        prompt.group_size,
        buffer.sampling(prompt).max_tokens,
        key_of(prompt),
        features_of(prompt),
        priority=prompt.priority,
        sessions=bool(prompt.environment),
        group_size_min=prompt.group_size_min,
    )


def _cancelled(entries: tuple[ResponseState, ...], command: do.DropGroup, at: float) -> CancelledGroup:
    entries = started(entries)
    return CancelledGroup(
        group_id=command.group_id,
        prompt_id=entries[0].prompt.prompt_id,
        task_id=entries[0].prompt.task_id,
        version=entries[0].version,
        reason=command.reason,
        length_tokens=tuple(len(entry) for entry in entries),
        rewards=tuple(entry.reward.value if entry.reward and entry.reward.valid else None for entry in entries),
        cancelled_at=at,
    )
