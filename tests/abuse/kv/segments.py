"""The room of segments: a hand that writes to the shared memory by which two workers of one host exchange KV.

It writes when a frame passes that says what has just been written there, so it is always in time: before the target has
made its checksum. What is changed after that is as any other memory of the target, and no transport's matter.
"""

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from dora.kvtransfer.transports.segments import MARK_AT, MARK_BYTES, STATE_BYTES
from dora.kvtransfer.wire import Kind
from tests.abuse.kv.middle import Middle, Passing, Plan
from tests.abuse.kv.mill import MEMORY_BYTES, Mill, Verdict, two_ends
from tests.abuse.kv.room import Room

CONTROL_SHARE: Final = 0.02


class Hand:
    """Finds the segment that a frame is about."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self._segments: dict[str, Path] = {}  # by key
        self._aside: list[tuple[Path, Path]] = []  # segments in whose place something else was put

    def plan(self, what: str) -> Plan:
        kind = Kind.OPEN if what in AT_OPENING else Kind.CHUNK
        skip = self._chance.choice((0, 0, 1, 2)) if kind is Kind.CHUNK else self._chance.choice((0, 0, 1))
        return Plan("there", kind, lambda frame, _earlier: self._changed(what, frame), skip)

    def sees(self, frame: Passing) -> None:
        """Every frame that passes, before any plan."""
        if frame.kind is Kind.OPEN:
            self._segments = {frame.head["key"]: self._folder / frame.head["segment"]}

    def goes(self) -> None:
        """Puts back what it has put aside: a target that had mapped it before goes on with it."""
        for aside, file in self._aside:
            if file.is_dir():
                file.rmdir()
            aside.rename(file)
        self._aside.clear()

    def _changed(self, what: str, frame: Passing) -> list[bytes]:
        change = AT_OPENING.get(what) or AT_CHUNKS[what]
        file = self._segments[frame.head["key"]]
        if what in IN_ITS_PLACE:
            aside = file.with_suffix(".aside")
            file.rename(aside)
            self._aside.append((aside, file))
            change(self._chance, aside, {"file": file})
        else:
            change(self._chance, file, frame.head)
        return [frame.raw]


def stormed(folder: Path, model: Path, count: int, seed: int) -> Room:
    room, chance, began_s = Room("segments"), random.Random(seed), time.monotonic()
    with ExitStack() as stack:
        ends = stack.enter_context(two_ends(folder, ("shm",)))
        hand = Hand(folder, chance)
        middles = {end.address: Middle(end.address, hand.sees) for end in ends}
        for middle in middles.values():
            stack.callback(middle.close)
        mill = Mill(ends, model, chance, lambda end: middles[end.address].address)
        while room.goes_on(count):
            what = chance.choice([*AT_OPENING, *AT_CHUNKS]) if chance.random() > CONTROL_SHARE else ""
            plan = hand.plan(what) if what else None
            name = mill.any_request()
            middle = middles[mill.target_of(name).address]
            middle.plan(plan)
            verdict = mill.move(name)
            middle.plan(None)
            hand.goes()
            room.held_most_bytes = max(room.held_most_bytes, sum(sum(end.plane.held_bytes()) for end in ends))
            if plan is not None and plan.done and not plan.strays:
                if verdict is Verdict.REFUSED:
                    room.refuse(what)
                elif verdict is Verdict.MOVED and what in MAY_PASS:
                    room.without_effect += 1  # the responses tell whether that is so
                elif verdict is Verdict.MOVED:
                    room.accept(f"{what} (mutation {room.mutations})")
            elif verdict is Verdict.MOVED and plan is None:
                room.controls += 1
        account = mill.finish()
    room.compared, room.wrong, room.reprefilled = account.compared, account.wrong, account.reprefilled
    room.blocks_leaked, room.took_s = account.blocks_leaked, time.monotonic() - began_s
    assert room.held_most_bytes <= 4 * MEMORY_BYTES, "both planes, both ways"
    return room


def _write(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def _read(file: Path, at: int, count: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(count)


# When its target has mapped it and a chunk is there.


def _bits(chance: random.Random, file: Path, head: dict[str, Any]) -> None:
    content = bytearray(_read(file, STATE_BYTES + head["at"], head["size"]))
    for place in chance.sample(range(8 * len(content)), chance.randint(1, 8)):
        content[place // 8] ^= 1 << place % 8
    _write(file, STATE_BYTES + head["at"], bytes(content))


def _turned(_chance: random.Random, file: Path, head: dict[str, Any]) -> None:
    """All bits."""
    content = _read(file, STATE_BYTES + head["at"], head["size"])
    _write(file, STATE_BYTES + head["at"], bytes(255 - byte for byte in content))


def _rotated(_chance: random.Random, file: Path, head: dict[str, Any]) -> None:
    """The same bytes, at other places."""
    content = _read(file, STATE_BYTES + head["at"], head["size"])
    for by in range(1, len(content)):
        if content[by:] + content[:by] != content:
            _write(file, STATE_BYTES + head["at"], content[by:] + content[:by])
            return
    _turned(_chance, file, head)


def _state(chance: random.Random, file: Path, _head: dict[str, Any]) -> None:
    """Changes the places of a segment that say that it is returned, and to whom it belongs."""
    _write(file, chance.choice((0, MARK_AT, chance.randrange(STATE_BYTES))), chance.randbytes(chance.randint(1, 16)))


# Before its target has mapped it. Nothing is made shorter: who has a page mapped that is gone dies of it.


def _mark(chance: random.Random, file: Path, _head: dict[str, Any]) -> None:
    place = MARK_AT + chance.randrange(MARK_BYTES)
    _write(file, place, bytes([_read(file, place, 1)[0] ^ 1 << chance.randrange(8)]))


def _copy(_chance: random.Random, aside: Path, head: dict[str, Any]) -> None:
    """The same mark, and other KV."""
    content = aside.read_bytes()
    head["file"].write_bytes(content[:STATE_BYTES] + bytes(255 - byte for byte in content[STATE_BYTES:]))


def _random(chance: random.Random, _aside: Path, head: dict[str, Any]) -> None:
    head["file"].write_bytes(chance.randbytes(1 << 17))


def _short(chance: random.Random, aside: Path, head: dict[str, Any]) -> None:
    head["file"].write_bytes(_read(aside, 0, chance.randrange(STATE_BYTES)))


Change = Callable[[random.Random, Path, dict[str, Any]], None]
AT_CHUNKS: Final[dict[str, Change]] = {"bits": _bits, "turned": _turned, "rotated": _rotated, "state": _state}
# In the segment's place; the source goes on with what it has mapped.
IN_ITS_PLACE: Final[dict[str, Change]] = {
    "nothing": lambda _chance, _aside, _head: None,
    "a copy": _copy,
    "random bytes": _random,
    "a short file": _short,
    "an empty file": lambda _chance, _aside, head: head["file"].touch(),
    "a folder": lambda _chance, _aside, head: head["file"].mkdir(),
    "a pipe": lambda _chance, _aside, head: os.mkfifo(head["file"]),
    "a link": lambda _chance, _aside, head: head["file"].symlink_to("/dev/zero"),
}
AT_OPENING: Final[dict[str, Change]] = {"mark": _mark, **IN_ITS_PLACE}
MAY_PASS: Final = ("state", *IN_ITS_PLACE)  # where the target has the segment mapped since an earlier snapshot
