"""The groups of prompts that the core has admitted, from admission to their end: in the response buffer, the ledger of
prompts, the journal and the run record.
"""

import json
import logging
from dataclasses import asdict, dataclass
from typing import Final

from dora.core import commands as do
from dora.core.rules.selection import REDUNDANT
from dora.data.run_record import CancelledGroup
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState, started
from dora.system.log_lines import about

log = logging.getLogger("dora.service")

ON_REQUEST: Final = "cancelled on request"  # a reason, or the beginning of one
FILTERED: Final = "filtered: "  # a reason; the filter's name follows


@dataclass(eq=False, repr=False)
class Groups:
    """Carries out the core's commands that admit, change and end groups."""

    _core: Core
    _buffer: ResponseBuffer
    _ledger: PromptLedger
    _journal: Journal
    _recorder: RecordQueue
    _environments: Environments
    _evaluations: Evaluations

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            do.AdmitGroup: self._admit,
            do.GrowGroup: self._grow,
            do.ReplaceRequest: self._replace_request,
            do.DropGroup: self._drop,
            do.ForgetGroup: self._forget,
            do.ResizeWindow: self._resize_window,
        }

    def _admit(self, command: do.AdmitGroup) -> None:
        prompt, row_of = self._ledger.drawn(command.prompt_id), self._core.state.request_row
        rows = {request_id: row_of[request_id] for request_id in command.request_ids}
        entries = self._buffer.admit(command.group_id, prompt, command.version, rows, self._core.now())
        self._ledger.admit(entries, command.version + self._buffer.window_versions - 1)
        if not prompt.token_ids:
            for entry in started(entries):
                self._environments.idles(entry.request_id)

    def _grow(self, command: do.GrowGroup) -> None:
        for request_id in command.request_ids:
            if not self._buffer[request_id].prompt.token_ids:
                self._environments.idles(request_id)

    def _replace_request(self, command: do.ReplaceRequest) -> None:
        session = about(session=command.request_id)
        said = "session %s is replaced by %s: %s"
        log.warning(said, command.request_id, command.replacement_id, command.reason, extra=session)
        before = self._buffer[command.request_id]
        self._journal.session(
            before, self._buffer.substitute(command.request_id, command.replacement_id, self._core.now())
        )
        if before.is_evaluation:
            self._evaluations.replace(before, self._buffer[command.replacement_id])
        self._environments.over(command.request_id)
        self._environments.idles(command.replacement_id)

    def _drop(self, command: do.DropGroup) -> None:
        chosen = command.reason == REDUNDANT or command.reason.startswith((FILTERED, ON_REQUEST))
        level = logging.INFO if chosen else logging.WARNING
        log.log(level, "group %s was cancelled: %s", command.group_id, command.reason)
        entries = self._buffer.forget(command.group_id)
        for entry in entries if entries[0].is_session else ():
            self._environments.over(entry.request_id)
        cancelled = _cancelled(entries, command, self._core.now())
        line, on_request = json.dumps(asdict(cancelled), allow_nan=False), command.reason.startswith(ON_REQUEST)
        self._ledger.cancel_group(entries, line, on_request=on_request)
        self._recorder.cancelled(cancelled)

    def _forget(self, command: do.ForgetGroup) -> None:
        entries = self._buffer.forget(command.group_id)
        self._ledger.finish(entries[0].prompt.prompt_id)

    def _resize_window(self, command: do.ResizeWindow) -> None:
        log.info("the window changes to %d: %s", command.size, command.reason)
        self._buffer.window_versions = command.size


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
