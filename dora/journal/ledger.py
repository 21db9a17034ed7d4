"""The ledger: what the log comes to, as far as it is small and asked for, in SQLite (WAL).

It is derived. Facts are applied in the order of the log, after they are on disk; each transaction also notes the
position up to which it has come, so a ledger is what a beginning of the log says, whenever it is looked at. Tokens and
verdicts stay in the log alone.
"""

import errno
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgpack

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import facts
from dora.journal.facts import Fact
from dora.journal.frames import SCHEMA_VERSION

LEDGER_VERSION: Final = 1
OPEN: Final = -1  # in place of a step: no step has taken the group
DROPPED_KEPT_MOST: Final = 4096  # cancelled groups' lines, the last ones: a record may lack them
CANCELLED_KEPT_MOST: Final = 65536  # names that were cancelled: cancelling may be repeated

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
# what a service that has just begun stands at; each by its name in the table ``standing``
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
    "place": 0,  # in the source: all before were admitted, or let go
    "prompts_ended": False,
    "commit_step": -1,
    "commit_digest": b"",
    "republished": -1,
    "republished_digest": b"",
    "counters": {},
    "learnt": "",
    "position": 0,
    "schema": 1,  # of the facts that are kept as they came; the ledgers that do not say it are of 1
}
_OWN: Final = ("position", "schema")  # of these, what is the ledger's and of no other


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that was neither trained on nor cancelled. ``step``: that has taken it, or OPEN."""

    number: int
    group_id: str
    prompt: Prompt
    version: int
    deadline: int
    window_versions: int
    at: float
    rows: tuple[int, ...]
    place: int
    arrival: int
    step: int
    taken: int  # the place in the order in which steps have taken groups


class Ledger:
    """Of one thread. Raises sqlite3.Error where it cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        """Opens or makes it. ``path`` None: in memory. Raises InvalidValue for one of a newer DORA."""
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        self.version = version or LEDGER_VERSION
        if version > LEDGER_VERSION:
            raise InvalidValue(
                f"{path}: ledger version", version, f"at most {LEDGER_VERSION}; a newer DORA may read it"
            )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")  # the log is what must not be lost
        if not version:
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {LEDGER_VERSION}; COMMIT;")
        rows = self._database.execute("SELECT name, value FROM standing")
        self.values: dict[str, Any] = _VALUES | {name: _unpacked(value) for name, value in rows}
        self._places = {place for (place,) in self._database.execute("SELECT place FROM places")}
        self._is_open = False
        if not version:
            self._note_schema()

    def check(self) -> None:
        """Raises sqlite3.DatabaseError for a file that is damaged."""
        found = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            raise sqlite3.DatabaseError(f"the ledger is damaged: {found}")

    def upgrade(self) -> None:
        """Brings the facts that are kept to today's schema, where an older DORA has kept them.

        Raises InvalidValue where there is no way, or a newer DORA has kept them.
        """
        schema = self.values["schema"]
        if schema > SCHEMA_VERSION:
            raise InvalidValue("ledger: schema version", schema, f"at most {SCHEMA_VERSION}; a newer DORA may read it")
        if schema < SCHEMA_VERSION:
            kept = self._database.execute("SELECT number, fact FROM groups WHERE fact IS NOT NULL").fetchall()
            rows = [(facts.encoded(facts.decoded(body, schema)), number) for number, body in kept]
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("UPDATE groups SET fact = ? WHERE number = ?", rows)
            self._note_schema()
            self._database.execute("COMMIT")

    def _note_schema(self) -> None:
        row = ("schema", _packed(SCHEMA_VERSION))
        self._database.execute("INSERT OR REPLACE INTO standing VALUES (?, ?)", row)
        self.values = {**self.values, "schema": SCHEMA_VERSION}

    def close(self) -> None:
        self._database.close()

    # --------------------------------------------------------------------------------------------------------- writing

    def apply(self, following: Iterable[Fact], position: int) -> None:
        """Applies facts in order; ``position`` is behind the last. All or none: where it raises it is as before."""
        values, places = dict(self.values), set(self._places)
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            for fact in following:
                method = _APPLY.get(type(fact))
                if method is not None:
                    method(self, fact)
            self.values["position"] = position
            changed = [(name, _packed(value)) for name, value in self.values.items() if value != values.get(name)]
            database.executemany("INSERT OR REPLACE INTO standing VALUES (?, ?)", changed)
            self._write_places(places)
            database.execute("COMMIT")
        except BaseException:
            self.values, self._places = values, places
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _write_places(self, before: set[int]) -> None:
        self._database.executemany("DELETE FROM places WHERE place = ?", [(p,) for p in before - self._places])
        self._database.executemany("INSERT INTO places VALUES (?)", [(place,) for place in self._places - before])

    def _pass(self, place: int) -> None:
        """The source's prompt at this place need not be drawn again."""
        if place >= self.values["place"]:
            self._places.add(place)
            while self.values["place"] in self._places:
                self._places.discard(self.values["place"])
                self.values["place"] += 1

    def _begun(self, fact: facts.Begun) -> None:
        self.values |= {"life": fact.life, "config": fact.config}

    def _submitted(self, fact: facts.Submitted) -> None:
        rows = [(arrival, _packed(prompt)) for arrival, prompt in zip(fact.arrivals, fact.prompts, strict=True)]
        # one that is named already was written a second time, as its segment was to go, or stands without its prompt
        self._database.executemany(
            "INSERT INTO queued VALUES (?, ?) ON CONFLICT (arrival) DO UPDATE SET prompt = excluded.prompt", rows
        )
        self.values["next_arrival"] = max([self.values["next_arrival"], *(a + 1 for a in fact.arrivals)])

    def _let_go(self, fact: facts.LetGo) -> None:
        self._database.executemany("DELETE FROM queued WHERE arrival = ?", [(each,) for each in fact.arrivals])
        for place in fact.places:
            self._pass(place)
        self._cancel(fact.names)

    def _cancel(self, names: Iterable[str]) -> None:
        self._database.executemany("INSERT OR IGNORE INTO cancelled VALUES (?)", [(name,) for name in names])
        self._database.execute(
            "DELETE FROM cancelled WHERE rowid <= (SELECT max(rowid) FROM cancelled) - ?", (CANCELLED_KEPT_MOST,)
        )

    def _prompts_ended(self, _fact: facts.PromptsEnded) -> None:
        self.values["prompts_ended"] = True

    def _admitted(self, fact: facts.Admitted) -> None:
        size = len(fact.rows)
        row = (fact.number, fact.group_id, size, OPEN, 0, facts.encoded(fact))
        self._database.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE SET fact = excluded.fact", row
        )
        values = self.values
        values["next_number"] = max(values["next_number"], fact.number + size)
        values["groups_named"] = max(values["groups_named"], int(fact.group_id.removeprefix("g")) + 1)
        if fact.place >= 0:
            self._pass(fact.place)
        else:
            self._database.execute("DELETE FROM queued WHERE arrival = ?", (fact.arrival,))

    def _leased(self, fact: facts.Leased) -> None:
        self.values["taken"] += 1
        row = (fact.step, self.values["taken"], fact.number)
        self._database.execute("UPDATE groups SET step = ?, taken = ? WHERE number = ?", row)

    def _dropped(self, fact: facts.Dropped) -> None:
        self._forget([fact.number])
        self._database.execute("INSERT OR REPLACE INTO dropped VALUES (?, ?)", (fact.number, fact.line))
        self._database.execute(
            "DELETE FROM dropped WHERE number NOT IN (SELECT number FROM dropped ORDER BY number DESC LIMIT ?)",
            (DROPPED_KEPT_MOST,),
        )
        self._cancel(fact.names)

    def _forget(self, numbers: list[int]) -> None:
        self._database.executemany("DELETE FROM groups WHERE number = ?", [(number,) for number in numbers])

    def _committed(self, fact: facts.Committed) -> None:
        taken = self._database.execute("SELECT number FROM groups WHERE step = ?", (fact.step,)).fetchall()
        self._forget([number for (number,) in taken])
        self._database.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?)", (fact.step, fact.at, fact.digest))
        self._database.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, NULL)", (fact.step + 1, fact.digest))
        self.values |= {
            "newest": fact.step + 1,
            "commit_step": fact.step,
            "commit_digest": fact.digest,
            "counters": fact.counters,
            "learnt": fact.learnt,
        }

    def _republished(self, fact: facts.Republished) -> None:
        self._database.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, NULL)", (fact.version, fact.digest))
        self.values |= {"republished": fact.version, "republished_digest": fact.digest}

    def _rejected(self, fact: facts.Rejected) -> None:
        why = _packed([fact.version, fact.reason, fact.worker_ids, fact.canary_difference])
        self._database.execute("UPDATE versions SET rejected = ? WHERE version = ?", (why, fact.version))

    def _retired(self, fact: facts.Retired) -> None:
        if not fact.keeps:
            self._database.execute("DELETE FROM versions WHERE version = ?", (fact.version,))
        self.values["retired"] = max(self.values["retired"], fact.version + 1)

    def _attached(self, fact: facts.Attached) -> None:
        self.values |= {"trainer_epoch": fact.trainer_epoch, "groups_per_step": fact.groups_per_step}

    def _worker_began(self, fact: facts.WorkerBegan) -> None:
        self.values["worker_epoch"] = max(self.values["worker_epoch"], fact.epoch)

    def _host_stands(self, fact: facts.HostStands) -> None:
        hosts = {name: stands for name, stands in self.values["hosts"].items() if name != fact.name}
        if fact.marks is not None:
            hosts[fact.name] = [fact.epoch, fact.marks]
        self.values |= {"hosts": hosts, "host_epoch": max(self.values["host_epoch"], fact.epoch)}

    def _window_stands(self, fact: facts.WindowStands) -> None:
        self.values |= {
            "window_size": fact.size,
            "left_behind": fact.left_behind,
            "short_step": fact.short_step,
        }

    def _renumbered(self, fact: facts.Renumbered) -> None:
        """The group is open again, under the new number, with nothing generated."""
        read = "SELECT size, fact FROM groups WHERE number = ?"
        size, body = self._database.execute(read, (fact.number,)).fetchone() or (0, None)
        if body is not None:
            admitted = facts.decoded(body, SCHEMA_VERSION)
            assert isinstance(admitted, facts.Admitted)
            body = facts.encoded(replace(admitted, number=fact.new_number))
        row = (fact.new_number, OPEN, body, fact.number)
        self._database.execute("UPDATE groups SET number = ?, step = ?, taken = 0, fact = ? WHERE number = ?", row)
        self.values["next_number"] = max(self.values["next_number"], fact.new_number + size)

    def _standing(self, fact: facts.Standing) -> None:
        """A later segment's beginning: what it does not name has ended in a segment that is gone."""
        database = self._database
        self.values |= fact.values
        self._places = set(fact.places)
        known = {number for (number,) in database.execute("SELECT number FROM groups")}
        self._forget(list(known - {number for number, *_ in fact.groups}))
        database.executemany(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, NULL)"
            " ON CONFLICT (number) DO UPDATE SET step = excluded.step, taken = excluded.taken",
            fact.groups,
        )
        queued = {arrival for (arrival,) in database.execute("SELECT arrival FROM queued")}
        database.executemany("DELETE FROM queued WHERE arrival = ?", [(each,) for each in queued - set(fact.arrivals)])
        database.executemany("INSERT OR IGNORE INTO queued VALUES (?, NULL)", [(each,) for each in fact.arrivals])
        database.execute("DELETE FROM versions")
        database.executemany("INSERT INTO versions VALUES (?, ?, ?)", fact.versions)
        if fact.dropped is not None:
            database.execute("DELETE FROM dropped")
            database.executemany("INSERT INTO dropped VALUES (?, ?)", fact.dropped)
        if fact.cancelled is not None:
            database.execute("DELETE FROM cancelled")
            database.executemany("INSERT INTO cancelled VALUES (?)", [(name,) for name in fact.cancelled])

    # --------------------------------------------------------------------------------------------------------- reading

    def standing(self, ends: list[list[int]]) -> facts.Standing:
        """All that is small, as the first record of a new segment. ``ends``: of those before it."""
        read = self._database.execute
        return facts.Standing(
            {name: value for name, value in self.values.items() if name not in _OWN},
            [list(row) for row in read("SELECT number, group_id, size, step, taken FROM groups ORDER BY number")],
            [arrival for (arrival,) in read("SELECT arrival FROM queued ORDER BY arrival")],
            sorted(self._places),
            [list(row) for row in read("SELECT version, digest, rejected FROM versions ORDER BY version")],
            [list(row) for row in read("SELECT number, line FROM dropped ORDER BY number")],
            self.cancelled(),
            ends,
        )

    def live_numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Of the live groups their numbers and sizes, ascending; and the arrivals that are queued."""
        rows = self._database.execute("SELECT number, size FROM groups ORDER BY number").fetchall()
        queued = [arrival for (arrival,) in self._database.execute("SELECT arrival FROM queued ORDER BY arrival")]
        return [number for number, _ in rows], [size for _, size in rows], queued

    def lacking(self) -> tuple[list[str], list[int]]:
        """Groups, by their ids, and arrivals of which the prompt is not known: what told it is lost."""
        groups = self._database.execute("SELECT group_id FROM groups WHERE fact IS NULL ORDER BY number")
        queued = self._database.execute("SELECT arrival FROM queued WHERE prompt IS NULL ORDER BY arrival")
        return [name for (name,) in groups], [arrival for (arrival,) in queued]

    def asked(self, owners: Iterable[int]) -> list[Fact]:
        """What was asked for, of these groups by their numbers, and below 0 of queued prompts by their arrivals."""
        found: list[Fact] = []
        for owner in sorted(owners):
            if owner >= 0:
                rows = self._database.execute("SELECT fact FROM groups WHERE number = ?", (owner,))
                found += [facts.decoded(body, SCHEMA_VERSION) for (body,) in rows if body is not None]
            else:
                rows = self._database.execute("SELECT prompt FROM queued WHERE arrival = ?", (-owner,))
                found += [facts.Submitted([-owner], [_unpacked(prompt)]) for (prompt,) in rows if prompt is not None]
        return found

    def groups(self) -> list[LiveGroup]:
        """The live groups, by their numbers."""
        found = []
        read = self._database.execute("SELECT number, step, taken, fact FROM groups ORDER BY number")
        for number, step, taken, body in read:
            fact = facts.decoded(body, SCHEMA_VERSION)
            assert isinstance(fact, facts.Admitted)
            found.append(
                LiveGroup(
                    number,
                    fact.group_id,
                    facts.prompt_of(fact.prompt),
                    fact.version,
                    fact.deadline,
                    fact.window_versions,
                    fact.at,
                    tuple(fact.rows),
                    fact.place,
                    fact.arrival,
                    step,
                    taken,
                )
            )
        return found

    def queued(self) -> list[tuple[int, Prompt]]:
        """The prompts that are queued, each with its arrival."""
        rows = self._database.execute("SELECT arrival, prompt FROM queued ORDER BY arrival")
        return [(arrival, facts.prompt_of(_unpacked(prompt))) for arrival, prompt in rows]

    def places(self) -> set[int]:
        """Of the source, behind ``values["place"]``: those that need not be drawn again."""
        return set(self._places)

    def rejected(self) -> list[facts.Rejected]:
        rows = self._database.execute("SELECT rejected FROM versions WHERE rejected IS NOT NULL ORDER BY version")
        return [facts.Rejected(*_unpacked(why)) for (why,) in rows]

    def versions(self) -> dict[int, bytes]:
        """The versions that were published and not retired, each with the digest that it came under."""
        return dict(self._database.execute("SELECT version, digest FROM versions ORDER BY version").fetchall())

    def dropped(self) -> list[str]:
        """The lines of the groups that were cancelled last."""
        return [line for (line,) in self._database.execute("SELECT line FROM dropped ORDER BY number")]

    def cancelled(self) -> list[str]:
        """What was cancelled last, in that order."""
        return [name for (name,) in self._database.execute("SELECT name FROM cancelled ORDER BY rowid")]


_APPLY: Final[dict[type, Any]] = {
    facts.Begun: Ledger._begun,
    facts.Submitted: Ledger._submitted,
    facts.LetGo: Ledger._let_go,
    facts.PromptsEnded: Ledger._prompts_ended,
    facts.Admitted: Ledger._admitted,
    facts.Leased: Ledger._leased,
    facts.Dropped: Ledger._dropped,
    facts.Committed: Ledger._committed,
    facts.Republished: Ledger._republished,
    facts.Rejected: Ledger._rejected,
    facts.Retired: Ledger._retired,
    facts.Attached: Ledger._attached,
    facts.WorkerBegan: Ledger._worker_began,
    facts.WindowStands: Ledger._window_stands,
    facts.Renumbered: Ledger._renumbered,
    facts.Standing: Ledger._standing,
    facts.HostStands: Ledger._host_stands,
}


def disk_fault(error: sqlite3.Error) -> OSError | None:
    """What SQLite was told by the system, if it was: no room, no permission; None: the file itself is at fault."""
    number = _ERRNO.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)  # without what SQLite adds to it
    return None if number is None else OSError(number, f"{os.strerror(number)}: the ledger, {error}")


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors=_TEXT_ERRORS)
    return packed


def _unpacked(value: bytes) -> Any:
    return msgpack.unpackb(value, strict_map_key=False, unicode_errors=_TEXT_ERRORS)
