"""The ledger: the small, queried part of the log's content, in SQLite (WAL).

It is derived. Records are applied in the log's order once they are durable, and each transaction stores its position,
so a ledger always describes a prefix of the log. Tokens and verdicts are only in the log.
"""

import errno
import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgpack

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import records
from dora.journal.records import LogRecord

LEDGER_VERSION: Final = 1
OPEN: Final = -1  # in place of a step: no step has taken the group
DROPPED_KEPT_MAX: Final = 4096  # cancelled groups' lines, the last ones: a record may lack them
CANCELLED_KEPT_MAX: Final = 65536  # names that were cancelled: cancelling may be repeated

_TEXT_ERRORS: Final = "surrogatepass"
_ERRNO: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
_SCHEMA: Final = """
CREATE TABLE standing (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL, size INTEGER NOT NULL, step INTEGER NOT NULL,
    taken INTEGER NOT NULL, fact BLOB
);
CREATE TABLE queued (arrival INTEGER PRIMARY KEY, prompt BLOB);
CREATE TABLE places (place INTEGER PRIMARY KEY);
CREATE TABLE versions (version INTEGER PRIMARY KEY, digest BLOB NOT NULL, rejected BLOB);
CREATE TABLE commits (step INTEGER PRIMARY KEY, at REAL NOT NULL, digest BLOB NOT NULL);
CREATE TABLE dropped (number INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE cancelled (name TEXT PRIMARY KEY);
"""
# values of a new service, by their names in the table ``standing``
_VALUES: Final[dict[str, Any]] = {
    "life": -1,
    "config": "",
    "worker_epoch": 0,
    "host_epoch": 0,
    "hosts": {},  # by name, those that have joined: [epoch, {worker or pool: mark of its token}]
    "trainer_epoch": 0,
    "groups_per_step": 0,
    "newest": 0,
    "retired": 0,
    "window_size": 0,
    "left_behind": 0,
    "short_step": -1,
    "next_number": 0,
    "next_arrival": 1,
    "groups_named": 0,
    "taken": 0,  # groups, by steps
    "place": 0,  # in the source: all prompts before it were admitted or cancelled
    "prompts_ended": False,
    "commit_step": -1,
    "commit_digest": b"",
    "republished": -1,
    "republished_digest": b"",
    "counters": {},
    "learnt": "",
    "position": 0,
}
_OWN: Final = ("position",)  # the ledger's own value, which the log does not hold


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that was neither trained on nor cancelled. ``step``: the step that took it, or OPEN."""

    number: int
    group_id: str
    prompt: Prompt
    version: int
    deadline: int
    window_versions: int
    at: float
    rows: tuple[int, ...]
    position: int
    arrival: int
    step: int
    taken: int  # the place in the order in which steps have taken groups


def source_of(config: str) -> str:
    """Returns the settings on which the prompt at a position depends, as one text. ``config``: as JSON.

    A start with others begins its source at the first prompt.
    """
    prompts = json.loads(config).get("prompts", {})
    shuffled = prompts.get("shuffle_seed", 0) if prompts.get("shuffle") else None
    return json.dumps([prompts.get("source"), prompts.get("split", ""), shuffled])


def admitted_again(group: LiveGroup) -> records.Admitted:
    """Returns the record of a group whose prompt has changed: the last record of a group holds."""
    return records.Admitted(
        group.number,
        group.group_id,
        records.prompt_values(group.prompt),
        group.version,
        group.deadline,
        group.window_versions,
        group.at,
        list(group.rows),
        group.position,
        group.arrival,
    )


class Ledger:
    """Used by one thread. Raises sqlite3.Error if it cannot be read or written."""

    def __init__(self, path: Path | None, named: Path | None = None) -> None:
        """Opens or creates it. ``path`` None: in memory. Raises InvalidValue, with the name ``named``, for a newer
        DORA's.
        """
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        self.version = version or LEDGER_VERSION
        if version > LEDGER_VERSION:
            raise InvalidValue(
                f"{named or path}: ledger version", version, f"at most {LEDGER_VERSION}; a newer DORA may read it"
            )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")  # the log is what must not be lost
        if not version:
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {LEDGER_VERSION}; COMMIT;")
        rows = self._database.execute("SELECT name, value FROM standing")
        self.values: dict[str, Any] = _VALUES | {name: _unpacked(value) for name, value in rows}
        self._positions = {position for (position,) in self._database.execute("SELECT place FROM places")}
        self._is_open = False

    def check(self) -> None:
        """Raises sqlite3.DatabaseError for a damaged file."""
        found = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            raise sqlite3.DatabaseError(f"the ledger is damaged: {found}")

    def close(self) -> None:
        self._database.close()

    # --------------------------------------------------------------------------------------------------------- writing

    def apply(self, following: Iterable[LogRecord], position: int) -> None:
        """Applies records in order; ``position`` is behind the last. If it raises, nothing was applied."""
        values, positions = dict(self.values), set(self._positions)
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            for record in following:
                method = _APPLY.get(type(record))
                if method is not None:
                    method(self, record)
            self.values["position"] = position
            changed = [(name, _packed(value)) for name, value in self.values.items() if value != values.get(name)]
            database.executemany("INSERT OR REPLACE INTO standing VALUES (?, ?)", changed)
            self._write_positions(positions)
            database.execute("COMMIT")
        except BaseException:
            self.values, self._positions = values, positions
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _write_positions(self, before: set[int]) -> None:
        self._database.executemany("DELETE FROM places WHERE place = ?", [(p,) for p in before - self._positions])
        self._database.executemany(
            "INSERT INTO places VALUES (?)", [(position,) for position in self._positions - before]
        )

    def _pass(self, position: int) -> None:
        if position >= self.values["place"]:
            self._positions.add(position)
            while self.values["place"] in self._positions:
                self._positions.discard(self.values["place"])
                self.values["place"] += 1

    def _begun(self, record: records.Begun) -> None:
        before = self.values["config"]
        if before and record.config and source_of(before) != source_of(record.config):
            self.values["place"] = 0
            self._positions = set()
        self.values |= {"life": record.incarnation, "config": record.config}

    def _submitted(self, record: records.Submitted) -> None:
        rows = [(arrival, _packed(prompt)) for arrival, prompt in zip(record.arrivals, record.prompts, strict=True)]
        # one that is named already was written a second time, as its segment was to go, or stands without its prompt
        self._database.executemany(
            "INSERT INTO queued VALUES (?, ?) ON CONFLICT (arrival) DO UPDATE SET prompt = excluded.prompt", rows
        )
        self.values["next_arrival"] = max([self.values["next_arrival"], *(a + 1 for a in record.arrivals)])

    def _prompts_withdrawn(self, record: records.PromptsWithdrawn) -> None:
        self._database.executemany("DELETE FROM queued WHERE arrival = ?", [(each,) for each in record.arrivals])
        for position in record.positions:
            self._pass(position)
        self._cancel(record.names)

    def _cancel(self, names: Iterable[str]) -> None:
        self._database.executemany("INSERT OR IGNORE INTO cancelled VALUES (?)", [(name,) for name in names])
        self._database.execute(
            "DELETE FROM cancelled WHERE rowid <= (SELECT max(rowid) FROM cancelled) - ?", (CANCELLED_KEPT_MAX,)
        )

    def _prompts_ended(self, _fact: records.PromptsEnded) -> None:
        self.values["prompts_ended"] = True

    def _admitted(self, record: records.Admitted) -> None:
        size = len(record.rows)
        known = self._database.execute("SELECT 1 FROM groups WHERE number = ?", (record.number,)).fetchone()
        row = (record.number, record.group_id, size, OPEN, 0, records.encoded(record))
        self._database.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE SET fact = excluded.fact", row
        )
        values = self.values
        values["next_number"] = max(values["next_number"], record.number + size)
        values["groups_named"] = max(values["groups_named"], int(record.group_id.removeprefix("g")) + 1)
        if record.position >= 0 and not known:  # a repeated record may be of a group of an earlier source
            self._pass(record.position)
        elif record.position < 0:
            self._database.execute("DELETE FROM queued WHERE arrival = ?", (record.arrival,))

    def _leased(self, record: records.Leased) -> None:
        self.values["taken"] += 1
        row = (record.step, self.values["taken"], record.number)
        self._database.execute("UPDATE groups SET step = ?, taken = ? WHERE number = ?", row)

    def _dropped(self, record: records.Dropped) -> None:
        self._forget([record.number])
        self._database.execute("INSERT OR REPLACE INTO dropped VALUES (?, ?)", (record.number, record.line))
        self._database.execute(
            "DELETE FROM dropped WHERE number NOT IN (SELECT number FROM dropped ORDER BY number DESC LIMIT ?)",
            (DROPPED_KEPT_MAX,),
        )
        self._cancel(record.names)

    def _forget(self, numbers: list[int]) -> None:
        self._database.executemany("DELETE FROM groups WHERE number = ?", [(number,) for number in numbers])

    def _committed(self, record: records.Committed) -> None:
        taken = self._database.execute("SELECT number FROM groups WHERE step = ?", (record.step,)).fetchall()
        self._forget([number for (number,) in taken])
        self._database.execute(
            "INSERT OR REPLACE INTO commits VALUES (?, ?, ?)", (record.step, record.at, record.digest)
        )
        self._database.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, NULL)", (record.step + 1, record.digest))
        self.values |= {
            "newest": record.step + 1,
            "commit_step": record.step,
            "commit_digest": record.digest,
            "counters": record.counters,
            "learnt": record.learnt,
        }

    def _republished(self, record: records.Republished) -> None:
        self._database.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, NULL)", (record.version, record.digest))
        self.values |= {"republished": record.version, "republished_digest": record.digest}

    def _rejected(self, record: records.Rejected) -> None:
        why = _packed([record.version, record.reason, record.worker_ids, record.canary_difference])
        self._database.execute("UPDATE versions SET rejected = ? WHERE version = ?", (why, record.version))

    def _retired(self, record: records.Retired) -> None:
        if not record.keeps:
            self._database.execute("DELETE FROM versions WHERE version = ?", (record.version,))
        self.values["retired"] = max(self.values["retired"], record.version + 1)

    def _attached(self, record: records.Attached) -> None:
        self.values |= {"trainer_epoch": record.trainer_epoch, "groups_per_step": record.groups_per_step}

    def _worker_began(self, record: records.WorkerBegan) -> None:
        self.values["worker_epoch"] = max(self.values["worker_epoch"], record.epoch)

    def _host_stands(self, record: records.HostStands) -> None:
        hosts = {name: stands for name, stands in self.values["hosts"].items() if name != record.name}
        if record.marks is not None:
            hosts[record.name] = [record.epoch, record.marks]
        self.values |= {"hosts": hosts, "host_epoch": max(self.values["host_epoch"], record.epoch)}

    def _window_stands(self, record: records.WindowStands) -> None:
        self.values |= {
            "window_size": record.size,
            "left_behind": record.left_behind,
            "short_step": record.short_step,
        }

    def _renumbered(self, record: records.Renumbered) -> None:
        """Opens the group again under the new number, without tokens."""
        read = "SELECT size, fact FROM groups WHERE number = ?"
        size, body = self._database.execute(read, (record.number,)).fetchone() or (0, None)
        if body is not None:
            admitted = records.decoded(body)
            assert isinstance(admitted, records.Admitted)
            body = records.encoded(replace(admitted, number=record.new_number))
        row = (record.new_number, OPEN, body, record.number)
        self._database.execute("UPDATE groups SET number = ?, step = ?, taken = 0, fact = ? WHERE number = ?", row)
        self.values["next_number"] = max(self.values["next_number"], record.new_number + size)

    def _standing(self, record: records.Standing) -> None:
        """Applies a later segment's beginning: groups that it does not name ended in a deleted segment."""
        database = self._database
        self.values |= record.values
        self._positions = set(record.positions)
        known = {number for (number,) in database.execute("SELECT number FROM groups")}
        self._forget(list(known - {number for number, *_ in record.groups}))
        database.executemany(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, NULL)"
            " ON CONFLICT (number) DO UPDATE SET step = excluded.step, taken = excluded.taken",
            record.groups,
        )
        queued = {arrival for (arrival,) in database.execute("SELECT arrival FROM queued")}
        database.executemany(
            "DELETE FROM queued WHERE arrival = ?", [(each,) for each in queued - set(record.arrivals)]
        )
        database.executemany("INSERT OR IGNORE INTO queued VALUES (?, NULL)", [(each,) for each in record.arrivals])
        database.execute("DELETE FROM versions")
        database.executemany("INSERT INTO versions VALUES (?, ?, ?)", record.versions)
        database.execute("DELETE FROM dropped")
        database.executemany("INSERT INTO dropped VALUES (?, ?)", record.dropped)
        database.execute("DELETE FROM cancelled")
        database.executemany("INSERT INTO cancelled VALUES (?)", [(name,) for name in record.cancelled])

    # --------------------------------------------------------------------------------------------------------- reading

    def standing(self, ends: list[list[int]]) -> records.Standing:
        """Returns the small state as the first record of a new segment. ``ends``: of the earlier segments."""
        read = self._database.execute
        return records.Standing(
            {name: value for name, value in self.values.items() if name not in _OWN},
            [list(row) for row in read("SELECT number, group_id, size, step, taken FROM groups ORDER BY number")],
            [arrival for (arrival,) in read("SELECT arrival FROM queued ORDER BY arrival")],
            sorted(self._positions),
            [list(row) for row in read("SELECT version, digest, rejected FROM versions ORDER BY version")],
            [list(row) for row in read("SELECT number, line FROM dropped ORDER BY number")],
            self.cancelled(),
            ends,
        )

    def live_numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the numbers and sizes of the live groups, ascending, and the queued arrivals."""
        rows = self._database.execute("SELECT number, size FROM groups ORDER BY number").fetchall()
        queued = [arrival for (arrival,) in self._database.execute("SELECT arrival FROM queued ORDER BY arrival")]
        return [number for number, _ in rows], [size for _, size in rows], queued

    def lacking(self) -> tuple[list[str], list[int]]:
        """Returns group ids and arrivals whose prompt is unknown, because the record with it is lost."""
        groups = self._database.execute("SELECT group_id FROM groups WHERE fact IS NULL ORDER BY number")
        queued = self._database.execute("SELECT arrival FROM queued WHERE prompt IS NULL ORDER BY arrival")
        return [name for (name,) in groups], [arrival for (arrival,) in queued]

    def asked(self, owners: Iterable[int]) -> list[LogRecord]:
        """Returns the records with the prompts of these owners: groups by number, below 0 queued prompts by arrival."""
        found: list[LogRecord] = []
        for owner in sorted(owners):
            if owner >= 0:
                rows = self._database.execute("SELECT fact FROM groups WHERE number = ?", (owner,))
                found += [records.decoded(body) for (body,) in rows if body is not None]
            else:
                rows = self._database.execute("SELECT prompt FROM queued WHERE arrival = ?", (-owner,))
                found += [records.Submitted([-owner], [_unpacked(prompt)]) for (prompt,) in rows if prompt is not None]
        return found

    def groups(self) -> list[LiveGroup]:
        found = []
        read = self._database.execute("SELECT number, step, taken, fact FROM groups ORDER BY number")
        for number, step, taken, body in read:
            record = records.decoded(body)
            assert isinstance(record, records.Admitted)
            found.append(
                LiveGroup(
                    number,
                    record.group_id,
                    records.prompt_of(record.prompt),
                    record.version,
                    record.deadline,
                    record.window_versions,
                    record.at,
                    tuple(record.rows),
                    record.position,
                    record.arrival,
                    step,
                    taken,
                )
            )
        return found

    def queued(self) -> list[tuple[int, Prompt]]:
        rows = self._database.execute("SELECT arrival, prompt FROM queued ORDER BY arrival")
        return [(arrival, records.prompt_of(_unpacked(prompt))) for arrival, prompt in rows]

    def positions(self) -> set[int]:
        """Returns the drawn positions of the source behind ``values["place"]``."""
        return set(self._positions)

    def rejected(self) -> list[records.Rejected]:
        rows = self._database.execute("SELECT rejected FROM versions WHERE rejected IS NOT NULL ORDER BY version")
        return [records.Rejected(*_unpacked(why)) for (why,) in rows]

    def versions(self) -> dict[int, bytes]:
        """Returns the published versions that are not retired, with their digests."""
        return dict(self._database.execute("SELECT version, digest FROM versions ORDER BY version").fetchall())

    def commits(self) -> dict[int, float]:
        """When each step was committed. A ledger that was rebuilt lacks those of deleted segments."""
        return dict(self._database.execute("SELECT step, at FROM commits").fetchall())

    def dropped(self) -> list[str]:
        return [line for (line,) in self._database.execute("SELECT line FROM dropped ORDER BY number")]

    def cancelled(self) -> list[str]:
        return [name for (name,) in self._database.execute("SELECT name FROM cancelled ORDER BY rowid")]


_APPLY: Final[dict[type, Any]] = {
    records.Begun: Ledger._begun,
    records.Submitted: Ledger._submitted,
    records.PromptsWithdrawn: Ledger._prompts_withdrawn,
    records.PromptsEnded: Ledger._prompts_ended,
    records.Admitted: Ledger._admitted,
    records.Leased: Ledger._leased,
    records.Dropped: Ledger._dropped,
    records.Committed: Ledger._committed,
    records.Republished: Ledger._republished,
    records.Rejected: Ledger._rejected,
    records.Retired: Ledger._retired,
    records.Attached: Ledger._attached,
    records.WorkerBegan: Ledger._worker_began,
    records.WindowStands: Ledger._window_stands,
    records.Renumbered: Ledger._renumbered,
    records.Standing: Ledger._standing,
    records.HostStands: Ledger._host_stands,
}


def disk_fault(error: sqlite3.Error) -> OSError | None:
    """Returns the system's error behind SQLite's, such as no space; None: the file itself is at fault."""
    number = _ERRNO.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)  # without what SQLite adds to it
    return None if number is None else OSError(number, f"{os.strerror(number)}: the ledger, {error}")


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors=_TEXT_ERRORS)
    return packed


def _unpacked(value: bytes) -> Any:
    return msgpack.unpackb(value, strict_map_key=False, unicode_errors=_TEXT_ERRORS)
