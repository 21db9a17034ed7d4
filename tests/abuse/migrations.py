"""Randomly timed handoffs: ``python -m tests.abuse.migrations --count 10000``. Ends with 1 if a token is wrong."""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.models.tiny import make_tiny
from tests.abuse.kv.mill import two_ends
from tests.abuse.kv.timed import Timed
from tests.contract.planes import HERE

WORLD_HANDOFFS: Final = 500  # of one pair of workers, before the next seed's


@dataclass
class Lane:
    """The results of handoffs over one transport. ``ends``: handoffs, by the signal and phase that ended them."""

    transport: str
    handoffs: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    compared: int = 0  # responses
    wrong: list[str] = field(default_factory=list)
    reprefilled: int = 0
    blocks_leaked: int = 0
    took_s: float = 0.0

    @property
    def moved(self) -> int:
        return self.ends.get("moved", 0)

    def failures(self) -> list[str]:
        leaked = [f"{self.transport}: {self.blocks_leaked} blocks leaked"] if self.blocks_leaked else []
        return [*(f"{self.transport}: {what}" for what in self.wrong[:20]), *leaked]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.migrations", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="requests moved, over all transports")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logging.getLogger("dora.worker").setLevel(logging.CRITICAL)  # each handoff that fails is a line
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny("dense", Path(scratch) / "tiny")
        each = -(-options.count // len(HERE))
        lanes = [driven(Path(scratch), model, name, each, options.seed, _tell) for name in HERE]
    failures = [failure for lane in lanes for failure in lane.failures()]
    report: dict[str, Any] = {
        "handoffs": sum(lane.handoffs for lane in lanes),
        "moved": sum(lane.moved for lane in lanes),
        "wrong_responses": sum(len(lane.wrong) for lane in lanes),
        "blocks_leaked": sum(lane.blocks_leaked for lane in lanes),
        "failures": failures,
        "lanes": [asdict(lane) for lane in lanes],
    }
    told = [f"{name:<18}{value:>8}" for name, value in report.items() if isinstance(value, int)]
    print(json.dumps(report, indent=2) if options.json else "\n".join([*told, *failures]))
    return bool(failures)


def driven(
    scratch: Path, model: Path, transport: str, count: int, seed: int, tell: Callable[[Lane], None] = lambda _lane: None
) -> Lane:
    """Handoffs until so many requests have moved, in worlds of ``WORLD_HANDOFFS``, each with a seed of its own."""
    lane, began_s = Lane(transport), time.monotonic()
    while lane.moved < count:
        folder = scratch / f"{transport}{lane.handoffs}"
        folder.mkdir()
        end = lane.handoffs + min(WORLD_HANDOFFS, 2 * (count - lane.moved))
        with two_ends(folder, (transport,)) as ends:
            world = Timed(ends, model, random.Random(f"{seed} {transport} {lane.handoffs}"))
            while lane.handoffs < end:
                lane.handoffs += world.begin()
                world.turn()
            account = world.finish()
        for what, times in world.outcomes.items():
            lane.ends[what] = lane.ends.get(what, 0) + times
        lane.compared += account.compared
        lane.wrong += account.wrong
        lane.reprefilled += account.reprefilled
        lane.blocks_leaked += account.blocks_leaked
    lane.took_s = time.monotonic() - began_s
    tell(lane)
    return lane


def _tell(lane: Lane) -> None:
    print(
        f"{lane.transport:<6}{lane.handoffs:>7} handoffs, {lane.compared} responses compared, {len(lane.wrong)} wrong, "
        f"{lane.blocks_leaked} blocks leaked, {lane.took_s:.0f} s: "
        + ", ".join(f"{what} {times}" for what, times in sorted(lane.ends.items())),
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
