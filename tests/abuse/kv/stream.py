"""The room of streams: between two workers sits somebody who changes one frame of each handoff."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from dora.kvtransfer.wire import Kind
from tests.abuse.kv.middle import Middle, Passing, Plan, Way
from tests.abuse.kv.mill import MEMORY_BYTES, Mill, Verdict, two_ends
from tests.abuse.kv.room import Room

CONTROL_SHARE: Final = 0.02
FRAMES: Final[tuple[tuple[Way, Kind], ...]] = (
    ("there", Kind.GREETING),
    ("back", Kind.CHALLENGE),
    ("there", Kind.PROOF),
    ("back", Kind.WELCOME),
    ("there", Kind.ATTACH),
    ("back", Kind.ATTACHED),
    ("there", Kind.OPEN),
    ("back", Kind.OPENED),
    ("there", Kind.CHUNK),
    ("there", Kind.CHUNK),
    ("there", Kind.CHUNK),
    ("there", Kind.COMMIT),
    ("there", Kind.COMMIT),
    ("back", Kind.ARRIVED),
)
ONCE_MORE_IS_TOO_LATE: Final = (Kind.COMMIT, Kind.ARRIVED)  # all was there before


def stormed(folder: Path, model: Path, count: int, seed: int, hosts: tuple[str, str] = ("", "")) -> Room:
    """``hosts``: two names make it two hosts, with the checksums of those."""
    room, chance = Room("streams" if hosts[0] == hosts[1] else "streams of two hosts"), random.Random(seed)
    began_s = time.monotonic()
    with ExitStack() as stack:
        ends = stack.enter_context(two_ends(folder, ("tcp",), hosts))
        middles = {end.address: Middle(end.address) for end in ends}
        for middle in middles.values():
            stack.callback(middle.close)
        mill = Mill(ends, model, chance, lambda end: middles[end.address].address)
        while room.goes_on(count):
            what, plan = _planned(chance) if chance.random() > CONTROL_SHARE else ("", None)
            name = mill.any_request()
            middle = middles[mill.target_of(name).address]
            middle.plan(plan)
            verdict = mill.move(name)
            middle.plan(None)
            held = sum(sum(end.plane.held_bytes()) for end in ends)
            room.held_most_bytes = max(room.held_most_bytes, held)
            if plan is not None and plan.done and not plan.strays:
                if verdict is Verdict.MOVED:
                    room.accept(f"{what} (mutation {room.mutations})")
                elif verdict is Verdict.REFUSED:
                    room.refuse(what)
            elif verdict is Verdict.MOVED and plan is None:
                room.controls += 1
        account = mill.finish()
    room.compared, room.wrong, room.reprefilled = account.compared, account.wrong, account.reprefilled
    room.blocks_leaked, room.took_s = account.blocks_leaked, time.monotonic() - began_s
    assert room.held_most_bytes <= 4 * MEMORY_BYTES, "both planes, both ways"
    return room


def _planned(chance: random.Random) -> tuple[str, Plan]:
    way, kind = chance.choice(FRAMES)
    names = [name for name in CHANGES if not (name == "doubled" and kind in ONCE_MORE_IS_TOO_LATE)]
    name = chance.choice(names)
    change = CHANGES[name]

    def changed(frame: Passing, earlier: list[Passing]) -> list[bytes]:
        given = change(chance, frame, earlier)
        is_whole = bool(given) and given[0].startswith(frame.raw)  # what comes after it comes too late
        return _bits(chance, frame, earlier) if is_whole and name not in ("moved", "doubled") else given

    skip = chance.choice((0, 0, 0, 1, 2, 5)) if kind in (Kind.OPEN, Kind.CHUNK, Kind.COMMIT, Kind.ARRIVED) else 0
    return f"{kind.name} {name}", Plan(way, kind, changed, skip, name == "cut", name == "moved")


def _bits(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    """One to eight of the preamble, the tag, the head or the body."""
    raw = bytearray(frame.raw)
    regions = [(0, 20), (20, frame.head_at), (frame.head_at, frame.body_at), (frame.body_at, len(raw))]
    begin, end = chance.choice([region for region in regions if region[0] < region[1]])
    for place in chance.sample(range(8 * begin, 8 * end), min(chance.randint(1, 8), 8 * (end - begin))):
        raw[place // 8] ^= 1 << place % 8
    return [bytes(raw)]


def _bytes(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    begin = chance.randrange(len(frame.raw))
    end = min(len(frame.raw), begin + chance.choice((1, 2, 4, 16, 64)))
    return [frame.raw[:begin] + chance.randbytes(end - begin) + frame.raw[end:]]


def _cut(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    return [frame.raw[: chance.randrange(len(frame.raw))]]


def _left_out(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    begin = chance.randrange(len(frame.raw))
    return [frame.raw[:begin] + frame.raw[begin + chance.choice((1, 4, 16, 64)) :]]


def _put_in(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    at = chance.randrange(len(frame.raw))
    return [frame.raw[:at] + chance.choice((chance.randbytes(7), frame.raw[at : at + 16])) + frame.raw[at:]]


def _earlier(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    """A frame of this kind that has passed before, of this connection or of another one."""
    return [chance.choice(earlier).raw] if earlier else [frame.raw]


def _spliced(chance: random.Random, frame: Passing, earlier: list[Passing]) -> list[bytes]:
    """This head, and the body of an earlier frame which is as long."""
    bodies = [each.raw[each.body_at :] for each in earlier]
    fitting = [body for body in bodies if body and len(body) == len(frame.raw) - frame.body_at]
    return [frame.raw[: frame.body_at] + chance.choice(fitting)] if fitting else [frame.raw]


CHANGES: Final[dict[str, Callable[[random.Random, Passing, list[Passing]], list[bytes]]]] = {
    "bits": _bits,
    "bytes": _bytes,
    "cut": _cut,
    "left out": _left_out,
    "put in": _put_in,
    "dropped": lambda _chance, _frame, _earlier: [],
    "doubled": lambda _chance, frame, _earlier: [frame.raw, frame.raw],
    "moved": lambda _chance, frame, _earlier: [frame.raw],
    "replayed": _earlier,
    "spliced": _spliced,
}
