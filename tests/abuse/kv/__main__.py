"""Mutated snapshots: ``python -m tests.abuse.kv --count 100000``. Ends with 1 if one is accepted or a token wrong."""

import argparse
import json
import logging
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dora.models.tiny import make_tiny
from tests.abuse.kv import heads, peers, segments, stream
from tests.abuse.kv.mill import an_engine_with_state
from tests.abuse.kv.room import Room

MEMORY_MOST_BYTES: Final = 100 << 20  # above the start's
SHARES: Final = {
    "heads": 0.25,
    "heads with state": 0.25,
    "peers": 0.2,
    "streams": 0.15,
    "streams of two hosts": 0.05,
    "segments": 0.1,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.kv", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="mutated snapshots, over all rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logging.getLogger("dora.worker").setLevel(logging.CRITICAL)  # each refusal is a line
    with tempfile.TemporaryDirectory() as scratch:
        report = stormed(Path(scratch), options.count, options.seed, lambda room: print(_row(room), file=sys.stderr))
    print(json.dumps(report, indent=2) if options.json else _summary(report))
    return bool(report["failures"])


def stormed(scratch: Path, count: int, seed: int, tell: Callable[[Room], None]) -> dict[str, Any]:
    """All rooms, one after the other."""
    model = make_tiny("dense", scratch / "tiny")
    storms: dict[str, Callable[[Path, int], Room]] = {
        "heads": lambda _folder, count: heads.stormed(model, count, seed),
        "heads with state": lambda _folder, count: heads.stormed(model, count, seed, an_engine_with_state),
        "peers": lambda folder, count: peers.stormed(folder, model, count, seed),
        "streams": lambda folder, count: stream.stormed(folder, model, count, seed),
        "streams of two hosts": lambda folder, count: stream.stormed(folder, model, count, seed, ("a", "b")),
        "segments": lambda folder, count: segments.stormed(folder, model, count, seed),
    }
    before_bytes, threads = _memory_bytes(), threading.active_count()
    rooms = []
    for number, (name, storm) in enumerate(storms.items()):
        folder = scratch / f"room{number}"
        folder.mkdir()
        rooms.append(storm(folder, max(1, int(count * SHARES[name]))))
        tell(rooms[-1])
    grown_bytes = _memory_bytes() - before_bytes
    left = sorted(str(file) for number in range(len(storms)) for file in (scratch / f"room{number}").iterdir())
    failures = [failure for room in rooms for failure in room.failures()]
    if grown_bytes > MEMORY_MOST_BYTES:
        failures.append(f"memory grew by {grown_bytes >> 20} MB")
    if left or threading.active_count() > threads:
        failures.append(f"left: {left[:5]}, {threading.active_count() - threads} threads")
    return {
        "mutations": sum(room.mutations for room in rooms),
        "mutations_accepted": sum(len(room.accepted) for room in rooms),
        "wrong_responses": sum(len(room.wrong) for room in rooms),
        "blocks_leaked": sum(room.blocks_leaked for room in rooms),
        "responses_compared": sum(room.compared for room in rooms),
        "memory_grown_bytes": grown_bytes,
        "failures": failures,
        "rooms": [asdict(room) for room in rooms],
    }


def _memory_bytes() -> int:
    """The most that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _row(room: Room) -> str:
    return (
        f"{room.name:<22}{room.mutations:>8} mutations, {len(room.accepted)} accepted, {room.compared} responses "
        f"compared, {len(room.wrong)} wrong, {room.blocks_leaked} blocks leaked, {room.controls} untouched taken in, "
        f"{room.reprefilled} re-prefilled, {room.took_s:.0f} s"
    )


def _summary(report: dict[str, Any]) -> str:
    told = {name: value for name, value in report.items() if name not in ("rooms", "failures")}
    return "\n".join([*(f"{name:<22}{value:>12}" for name, value in told.items()), *report["failures"][:20]])


if __name__ == "__main__":
    sys.exit(main())
