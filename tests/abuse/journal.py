"""Logs that were cut or damaged: ``python -m tests.abuse.journal --count 1000000``. Ends with 1 where a bar is not met.

Services are recorded once, with what stood after each fact. Then a segment of one is cut at some byte, or bits of it
are flipped: the log of a service that was stopped, or that ended without its last checkpoint. What a start makes of it
is right if it stands where the service stood at some moment, that is not before what was acknowledged last or else it
is said; if the tokens that it has are those that were generated; and if a group that a step had taken is whole, or
named as lost. To refuse the start, with the reason, is right too. One loss nobody can see: the last segment cut between
two writes.
"""

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal.durable import OPEN
from dora.journal.finding import Found, find
from dora.journal.log import LOG_FOLDER
from tests.unit.journal.incarnations import GROUP_SIZE, SMALL, Incarnation, Known, opened

RECORDED = 6
FLIPS_MAX = 3
ENDS = ("stopped", "killed")

Stands = tuple[Any, ...]  # step and place in the source, and the step of each group


@dataclass
class Recorded:
    """A folder that a service has left, and all that it knew at any moment."""

    folder: Path
    stood: list[Stands] = field(default_factory=list)  # after each fact
    acknowledged: int = 0  # of these, how many before the last write
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of every request that there was
    last_write: int = 0  # where it begins in the last segment, without the checkpoint of the end
    end: int = 0  # where this checkpoint begins

    @property
    def segments(self) -> list[Path]:
        return sorted((self.folder / LOG_FOLDER).iterdir())


def stands(known: Known) -> Stands:
    return known.newest, known.position, tuple(sorted(known.steps.items()))


async def recorded(folder: Path, seed: int) -> Recorded:
    """A service of some steps in two lives; every second one keeps all of its log."""
    chosen = random.Random(seed)
    made = Recorded(folder)
    known = Known()
    sizes = replace(SMALL, compacts=bool(seed % 2), segment_bytes=4000)
    for incarnation in range(2):
        _, log = opened(folder, sizes)
        told = Incarnation(
            lambda record, log=log: tell(record, log.append, known, made), known, 100 * seed + incarnation
        )
        for _ in range(chosen.randint(2, 4)):
            told.step(groups=chosen.randint(1, 3), reports=chosen.randint(1, 4))
            await log.settled()
        told.admit()
        told.report()
        await log.settled()
        made.acknowledged = len(made.stood)
        told.report(ends=True)
        told.take()
        await log.close()
    segment = made.segments[-1]
    read = frames.opened(segment)
    assert read is not None
    made.end = list(frames.records(read))[-1][0]
    before = replace(read, holes=[])
    list(frames.records(before, before.position(made.end)))
    made.last_write = before.last_write
    return made


def tell(record: records.LogRecord, append: Any, known: Known, made: Recorded) -> None:
    """The life keeps count after it has told; so what stood before is noted then."""
    made.stood.append(stands(known))
    for number, tokens in known.tokens.items():
        made.tokens[number] = list(tokens)
    append(record)


@dataclass
class Outcome:
    trials: int = 0
    refused: int = 0
    carried_on: int = 0
    wrong: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)


def trial(made: Recorded, scratch: Path, seed: int, outcome: Outcome) -> None:
    """One start on one damaged copy."""
    chosen = random.Random(seed)
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / LOG_FOLDER).mkdir(parents=True)
    for path in made.segments:
        (scratch / LOG_FOLDER / path.name).symlink_to(path)
    ends = chosen.choice(ENDS)
    last = made.segments[-1]
    whole = last.read_bytes()[: made.end if ends == "killed" else None]
    (scratch / LOG_FOLDER / last.name).unlink()
    (scratch / LOG_FOLDER / last.name).write_bytes(whole)
    hurt = made.segments[-1] if chosen.random() < 0.5 else chosen.choice(made.segments)
    content = bytearray(whole if hurt == last else hurt.read_bytes())
    is_cut = chosen.random() < 0.5
    if is_cut:
        at = chosen.randint(made.last_write if chosen.random() < 0.3 and hurt == made.segments[-1] else 0, len(content))
        del content[at:]
    else:
        ats = [chosen.randrange(len(content)) for _ in range(chosen.randint(1, FLIPS_MAX))]
        for at in ats:
            content[at] ^= 1 << chosen.randrange(8)
        at = min(ats)
    target = scratch / LOG_FOLDER / hurt.name
    target.unlink()
    target.write_bytes(content)
    name = f"seed {seed}: {'cut' if is_cut else 'flips'} from byte {at} of {hurt.name}, {ends}"
    outcome.trials += 1
    outcome.ways[f"{'cut' if is_cut else 'flips'}, {ends}"] += 1
    try:
        found = find(scratch)
    except InvalidValue:
        outcome.refused += 1
        return
    except Exception as error:
        outcome.crashes.append(f"{name}: {error!r}")
        return
    outcome.carried_on += 1
    in_last_write = hurt == made.segments[-1] and at >= made.last_write
    unseen = is_cut and hurt == made.segments[-1]
    wrong = fault_of(made, found, in_last_write, bool(found.said) or unseen)
    if wrong:
        outcome.wrong.append(f"{name}: {wrong} ({'; '.join(found.said)})")


def fault_of(made: Recorded, found: Found, in_last_write: bool, said: bool) -> str:
    """Returns the fault that was found; empty: none. ``said``: something may be lost."""
    durable, requests = found.durable, found.requests
    now = durable.newest, durable.next_position, tuple((group.number, group.step) for group in found.groups)
    if now not in made.stood:
        return f"the service never stood at {now}"
    if in_last_write and now not in made.stood[made.acknowledged - 1 :]:
        return f"it stands at {now}, before what was acknowledged"
    if not said and now != made.stood[-1]:
        return f"nothing is said, and it stands at {now}"
    for index, group in enumerate(found.groups):
        if index in requests.damaged:
            if not said:
                return f"{group.group_id} is lost, and nothing is said"
            continue
        for place, number in enumerate(range(group.number, group.number + GROUP_SIZE), start=GROUP_SIZE * index):
            begin, count = int(requests.begins[place]), int(requests.counts[place])
            tokens = requests.tokens["token_id"][begin : begin + count].tolist()
            true = made.tokens[number]
            whole = tokens == true and place in requests.verdicts
            if tokens != true[: len(tokens)] or (place in requests.verdicts and tokens != true):
                return f"request {number} has other tokens than were generated"
            if group.step != OPEN and not whole:
                return f"{group.group_id}, which step {group.step} has, is not whole"
            if not said and tokens != true:
                return f"tokens of request {number} are lost, and nothing is said"
    return ""


def stormed(count: int, seed: int, told: bool = False) -> Outcome:
    outcome, began_s = Outcome(), time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        scratch = Path(name)
        all_made = []
        for index in range(RECORDED):
            made = asyncio.run(recorded(scratch / f"recorded{index}", seed + index))
            made.stood.append(last_of(made))
            all_made.append(made)
        for number in range(count):
            trial(all_made[number % RECORDED], scratch / "trial", seed + number, outcome)
            if told and number % 20_000 == 19_999:
                speed = outcome.trials / (time.monotonic() - began_s)
                print(f"{outcome.trials:,} starts, {speed:.0f}/s, {len(outcome.wrong)} wrong", file=sys.stderr)
    return outcome


def last_of(made: Recorded) -> Stands:
    """Returns the final state, from the undamaged folder."""
    copy = made.folder.with_name("copy")
    shutil.copytree(made.folder, copy)
    found = find(copy)
    assert not found.said
    for index, group in enumerate(found.groups):
        for place, number in enumerate(range(group.number, group.number + GROUP_SIZE), start=GROUP_SIZE * index):
            begin, tokens = int(found.requests.begins[place]), int(found.requests.counts[place])
            made.tokens[number] = found.requests.tokens["token_id"][begin : begin + tokens].tolist()
    shutil.rmtree(copy)
    return (
        found.durable.newest,
        found.durable.next_position,
        tuple((group.number, group.step) for group in found.groups),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.journal", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="damaged logs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    outcome = stormed(options.count, options.seed, told=True)
    shown = {
        "starts": outcome.trials,
        "refused": outcome.refused,
        "carried_on": outcome.carried_on,
        "crashes": len(outcome.crashes),
        "wrong": len(outcome.wrong),
        "ways": dict(outcome.ways),
        "first": [*outcome.crashes[:5], *outcome.wrong[:5]],
    }
    print(json.dumps(shown, indent=2))
    return bool(outcome.crashes or outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
