"""Cancels prompts and groups: queued prompts are removed, admitted groups cancelled, groups in a step stay."""

from collections.abc import Sequence
from typing import Final

from dora.core import events as on
from dora.core.state import GroupStatus
from dora.errors import InvalidValue
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.groups import ON_REQUEST
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc import dora_pb2 as pb

IDS_MAX: Final = 4096  # in one call
REASON_CHARACTERS_MAX: Final = 200


def cancelled(
    core: Core, ledger: PromptLedger, buffer: ResponseBuffer, ids: Sequence[str], reason: str
) -> list[pb.CancelOutcome]:
    """Cancels each of ``ids``, prompts or groups; returns the outcomes in their order.

    Raises InvalidValue, and changes nothing, for too many ids or a reason that a record's line cannot hold.
    """
    if len(ids) > IDS_MAX:
        raise InvalidValue("ids", f"{len(ids)} ids", f"at most {IDS_MAX}")
    if not reason.isprintable() or len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidValue("reason", reason, f"printable, of at most {REASON_CHARACTERS_MAX} characters")
    why = f"{ON_REQUEST}: {reason}" if reason else ON_REQUEST
    group_of = {responses[0].prompt.prompt_id: group_id for group_id, responses in buffer.groups()}
    return [_cancelled(core, ledger, name, group_of.get(name, name), why) for name in ids]


def _cancelled(core: Core, ledger: PromptLedger, name: str, group_id: str, reason: str) -> pb.CancelOutcome:
    state = core.state
    if ledger.cancel(name):
        return pb.CancelOutcome(id=name, state="dequeued")
    if state.backlog.find(name) is not None:
        core.post(on.PromptCancelled(name))
        return pb.CancelOutcome(id=name, state="dequeued")
    if (row := state.group_row.get(group_id)) is not None:
        if state.groups["status"][row] == GroupStatus.LEASED:
            return pb.CancelOutcome(id=name, state="taken", group_id=group_id)
        core.post(on.GroupCancelled(group_id, reason))
        return pb.CancelOutcome(id=name, state="cancelled", group_id=group_id)
    return pb.CancelOutcome(id=name, state="before" if ledger.was_cancelled(name) else "unknown")
