"""The small durable state of a run, folded from the log's records.

    record ──▶ apply ──▶ Durable ──▶ checkpoint ──▶ records.Checkpoint, from which a later start continues

Prompts, tokens and verdicts of live groups are only in the log (content.py): a checkpoint names their owners. The same
object serves a start, the log's thread, the simulator's crashes and the tests. A new durable fact needs a record and a
field here.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import msgpack

from dora.errors import InvalidValue
from dora.journal import records
from dora.journal.records import LogRecord

OPEN: Final = -1  # in place of a step: no step has taken the group
DROPPED_KEPT_MAX: Final = 4096  # cancelled groups' lines, the last ones: a record may lack them
CANCELLED_KEPT_MAX: Final = 65536  # names that were cancelled: cancelling may be repeated
COMMITS_KEPT_MAX: Final = 4096  # times of the last commits: a record may be of another time

_TEXT_ERRORS: Final = "surrogatepass"


class OpenGroup(NamedTuple):
    """A group that was neither trained on nor cancelled. ``step`` is the step that took it, or OPEN."""

    group_id: str
    size: int
    step: int = OPEN
    taken: int = 0  # the place in the order in which steps have taken groups


@dataclass(slots=True)
class Durable:
    """Tables are by number of a group, arrival of a queued prompt, position in the source, version or step."""

    incarnation: int = -1  # -1: no service has begun
    config: str = ""
    worker_epoch: int = 0
    host_epoch: int = 0
    hosts: dict[str, list[Any]] = field(default_factory=dict)  # that have joined: epoch, marks of tokens (HostStands)
    trainer_epoch: int = 0
    groups_per_step: int = 0
    newest: int = 0
    retired: int = 0
    window_size: int = 0
    left_behind: int = 0
    short_step: int = -1
    next_number: int = 0
    next_arrival: int = 1
    next_position: int = 0  # in the source: all prompts before it were admitted or cancelled
    groups_named: int = 0
    groups_taken: int = 0
    prompts_ended: bool = False
    commit_step: int = -1
    commit_digest: bytes = b""
    republished: int = -1
    republished_digest: bytes = b""
    counters: dict[str, int] = field(default_factory=dict)
    learnt: str = ""
    groups: dict[int, OpenGroup] = field(default_factory=dict)
    queued: dict[int, None] = field(default_factory=dict)
    passed: dict[int, None] = field(default_factory=dict)  # positions behind ``next_position``
    versions: dict[int, bytes] = field(default_factory=dict)  # published and not retired: digests
    rejected: dict[int, list[Any]] = field(default_factory=dict)  # of these, to be published again: fields of Rejected
    commits: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    cancelled: dict[str, None] = field(default_factory=dict)

    def apply(self, record: LogRecord) -> None:
        """Applies the log's next record. Those of live content change nothing here."""
        if (method := _APPLY.get(type(record))) is not None:
            method(self, record)

    def checkpoint(self) -> bytes:
        """Packs field by field, because no other thread runs while one is packed."""
        packer = msgpack.Packer(unicode_errors=_TEXT_ERRORS)
        return b"".join([packer.pack_array_header(len(_NAMES)), *(packer.pack(getattr(self, name)) for name in _NAMES)])

    @classmethod
    def from_checkpoint(cls, checkpoint: bytes) -> "Durable":
        """Raises InvalidValue for bytes that ``checkpoint`` has not returned."""
        try:
            values = msgpack.unpackb(checkpoint, strict_map_key=False, unicode_errors=_TEXT_ERRORS)
            found = cls(**dict(zip(_NAMES, values, strict=True)))
            found.groups = {number: OpenGroup(*group) for number, group in found.groups.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidValue("checkpoint", repr(error), "one that this DORA knows") from error
        return found

    def rejections(self) -> list[records.Rejected]:
        return [records.Rejected(*why) for _, why in sorted(self.rejected.items())]

    # ------------------------------------------------------------------------------------------------------- prompts

    def _begun(self, record: records.Begun) -> None:
        if self.config and record.config and source_of(self.config) != source_of(record.config):
            self.next_position, self.passed = 0, {}
        self.incarnation, self.config = record.incarnation, record.config

    def _submitted(self, record: records.Submitted) -> None:
        self.queued |= dict.fromkeys(record.arrivals)
        self.next_arrival = max([self.next_arrival, *(arrival + 1 for arrival in record.arrivals)])

    def _prompts_withdrawn(self, record: records.PromptsWithdrawn) -> None:
        for arrival in record.arrivals:
            self.queued.pop(arrival, None)
        for position in record.positions:
            self._pass(position)
        self._cancel(record.names)

    def _pass(self, position: int) -> None:
        if position >= self.next_position:
            self.passed[position] = None
            while self.next_position in self.passed:
                del self.passed[self.next_position]
                self.next_position += 1

    def _cancel(self, names: Iterable[str]) -> None:
        self.cancelled |= dict.fromkeys(names)
        _keep_last(self.cancelled, CANCELLED_KEPT_MAX)

    def _prompts_ended(self, _record: records.PromptsEnded) -> None:
        self.prompts_ended = True

    # -------------------------------------------------------------------------------------------------------- groups

    def _admitted(self, record: records.Admitted) -> None:
        """Enters a group. A later record has another prompt, or gives the group another number: then it is open again,
        without tokens.
        """
        size, is_new = len(record.rows), record.number not in self.groups and record.replaces < 0
        self.groups.pop(record.replaces, None)
        self.groups.setdefault(record.number, OpenGroup(record.group_id, size))
        self.next_number = max(self.next_number, record.number + size)
        self.groups_named = max(self.groups_named, int(record.group_id.removeprefix("g")) + 1)
        if record.position < 0:
            self.queued.pop(record.arrival, None)
        elif is_new:  # a repeated record may be of a group of an earlier source
            self._pass(record.position)

    def _leased(self, record: records.Leased) -> None:
        self.groups_taken += 1
        if group := self.groups.get(record.number):
            self.groups[record.number] = group._replace(step=record.step, taken=self.groups_taken)

    def _dropped(self, record: records.Dropped) -> None:
        self.groups.pop(record.number, None)
        self.dropped[record.number] = record.line
        _keep_last(self.dropped, DROPPED_KEPT_MAX)
        self._cancel(record.names)

    # ------------------------------------------------------------------------------------------------------ versions

    def _committed(self, record: records.Committed) -> None:
        for number in [number for number, group in self.groups.items() if group.step == record.step]:
            del self.groups[number]
        self.commits[record.step] = record.at
        _keep_last(self.commits, COMMITS_KEPT_MAX)
        self._published(record.step + 1, record.digest)
        self.newest, self.commit_step, self.commit_digest = record.step + 1, record.step, record.digest
        self.counters, self.learnt = record.counters, record.learnt

    def _published(self, version: int, digest: bytes) -> None:
        self.versions[version] = digest
        self.rejected.pop(version, None)

    def _republished(self, record: records.Republished) -> None:
        self._published(record.version, record.digest)
        self.republished, self.republished_digest = record.version, record.digest

    def _rejected(self, record: records.Rejected) -> None:
        if record.version in self.versions:
            why = [record.version, record.reason, record.worker_ids, record.canary_difference]
            self.rejected[record.version] = why

    def _retired(self, record: records.Retired) -> None:
        if not record.keeps:
            self.versions.pop(record.version, None)
            self.rejected.pop(record.version, None)
        self.retired = max(self.retired, record.version + 1)

    # ------------------------------------------------------------------------------------------------------- members

    def _attached(self, record: records.Attached) -> None:
        self.trainer_epoch, self.groups_per_step = record.trainer_epoch, record.groups_per_step

    def _worker_began(self, record: records.WorkerBegan) -> None:
        self.worker_epoch = max(self.worker_epoch, record.epoch)

    def _host_stands(self, record: records.HostStands) -> None:
        self.hosts.pop(record.name, None)
        if record.marks is not None:
            self.hosts[record.name] = [record.epoch, record.marks]
        self.host_epoch = max(self.host_epoch, record.epoch)

    def _window_stands(self, record: records.WindowStands) -> None:
        self.window_size, self.left_behind, self.short_step = record.size, record.left_behind, record.short_step


_NAMES: Final = tuple(each.name for each in fields(Durable))
_APPLY: Final[dict[type, Callable[[Durable, Any], None]]] = {
    records.Begun: Durable._begun,
    records.Submitted: Durable._submitted,
    records.PromptsWithdrawn: Durable._prompts_withdrawn,
    records.PromptsEnded: Durable._prompts_ended,
    records.Admitted: Durable._admitted,
    records.Leased: Durable._leased,
    records.Dropped: Durable._dropped,
    records.Committed: Durable._committed,
    records.Republished: Durable._republished,
    records.Rejected: Durable._rejected,
    records.Retired: Durable._retired,
    records.Attached: Durable._attached,
    records.WorkerBegan: Durable._worker_began,
    records.HostStands: Durable._host_stands,
    records.WindowStands: Durable._window_stands,
}


def source_of(config: str) -> str:
    """Returns the settings on which the prompt at a position depends, as one text. ``config`` is JSON.

    A start with others begins its source at the first prompt.
    """
    prompts = json.loads(config).get("prompts", {})
    shuffled = prompts.get("shuffle_seed", 0) if prompts.get("shuffle") else None
    return json.dumps([prompts.get("source"), prompts.get("split", ""), shuffled])


def _keep_last(table: dict[Any, Any], most: int) -> None:
    for _ in range(len(table) - most):
        del table[next(iter(table))]
