"""Lives of a service as its journal sees them: facts of groups that are admitted, generated, scored, taken, trained."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dora.data.types import Prompt
from dora.journal import records
from dora.journal.finding import Found, find
from dora.journal.log import LOG_FOLDER, Log, Sizes

SMALL = Sizes(flush_s=0.001, flush_bytes=1000, segment_bytes=6000)
GROUP_SIZE = 2


@dataclass
class Known:
    """The facts of an incarnation: tokens by number of requests, the step of groups, the positions that were drawn."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    steps: dict[int, int] = field(default_factory=dict)  # by the numbers of groups
    newest: int = 0
    position: int = 0
    next_number: int = 0


class Incarnation:
    """Tells a log what happens, and keeps count."""

    def __init__(self, tell: Callable[[records.LogRecord], object], known: Known, seed: int = 0) -> None:
        self._tell = tell
        self.known = known
        self._random = np.random.default_rng(seed)

    def admit(self) -> int:
        known = self.known
        number, known.next_number = known.next_number, known.next_number + GROUP_SIZE
        prompt = records.prompt_values(Prompt(f"p{known.position}", "sum", tuple(range(5)), "what", GROUP_SIZE))
        rows = [2 * number, 2 * number + 1]
        at, newest = 1.0 + known.position, known.newest
        self._tell(
            records.Admitted(number, f"g{known.position}", prompt, newest, newest + 1, 2, at, rows, known.position, 0)
        )
        known.position += 1
        known.steps[number] = -1
        known.tokens |= {number + index: [] for index in range(GROUP_SIZE)}
        return number

    def report(self, ends: bool = False) -> None:
        """Adds up to nine tokens to every unfinished request."""
        numbers = [number for number, tokens in self.known.tokens.items() if number not in self.known.scored]
        counts = self._random.integers(1, 10, len(numbers))
        token_ids = self._random.integers(0, 1000, int(counts.sum()))
        begins = np.cumsum(counts) - counts
        firsts = [len(self.known.tokens[number]) for number in numbers]
        segment_starts = [[index, "w0", 0, "new"] for index, first in enumerate(firsts) if not first]
        self._tell(
            records.Tokens(
                9.0,
                np.array(numbers, np.int64),
                np.array(firsts),
                counts,
                np.full(len(numbers), int(ends), np.uint8),
                token_ids,
                token_ids / 8,
                segment_starts,
            )
        )
        for number, begin, count in zip(numbers, begins.tolist(), counts.tolist(), strict=True):
            self.known.tokens[number] += token_ids[begin : begin + count].tolist()
        for number in numbers if ends else ():
            self._tell(records.Verdict(number, 9.0, 0.5, True, "", {"part": 1.0}))
            self.known.scored.add(number)

    def take(self) -> None:
        """The step takes every group that is scored."""
        for number, step in self.known.steps.items():
            if step < 0 and number in self.known.scored:
                self._tell(records.Leased(number, self.known.newest))
                self.known.steps[number] = self.known.newest

    def commit(self) -> None:
        known = self.known
        self._tell(records.Committed(known.newest, b"digest", 1.0, {"groups_trained": known.newest}, ""))
        for number in [number for number, step in known.steps.items() if step == known.newest]:
            del known.steps[number]
            for index in range(GROUP_SIZE):
                del known.tokens[number + index]
                known.scored.discard(number + index)
        known.newest += 1

    def step(self, groups: int = 3, reports: int = 4) -> None:
        for _ in range(groups):
            self.admit()
        for index in range(reports):
            self.report(ends=index == reports - 1)
        self.admit()  # of which nothing is reported before the commit
        self.take()
        self.commit()


def opened(folder: Path, sizes: Sizes = SMALL, faults: list[OSError | None] | None = None) -> tuple[Found, Log]:
    """Returns the recovered state, and the log that continues."""
    found = find(folder, sizes)
    log = Log(
        folder / LOG_FOLDER,
        found.durable,
        number=found.number,
        position=found.position,
        compaction=found.compaction,
        sizes=sizes,
        fault=(faults if faults is not None else []).append,
    )
    return found, log


async def until(condition: Callable[[], bool]) -> None:
    """The event loop turns until it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0)


def flip(path: Path, at: int) -> None:
    """One bit of a file is no longer what was written."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def check(found: Found, known: Known) -> None:
    """All that is known is found, and nothing else."""
    assert [group.number for group in found.groups] == sorted(known.steps)
    assert {group.number: group.step for group in found.groups} == known.steps
    assert (found.durable.newest, found.durable.next_position) == (known.newest, known.position)
    numbers = [group.number + index for group in found.groups for index in range(GROUP_SIZE)]
    requests = found.requests
    for position, number in enumerate(numbers):
        begin, count = int(requests.begins[position]), int(requests.counts[position])
        held = requests.tokens[begin : begin + count]
        assert held["token_id"].tolist() == known.tokens[number], number
        assert np.array_equal(held["logprob"], np.array(known.tokens[number], np.float32) / 8)
        assert (position in requests.verdicts) == (number in known.scored)
        assert bool(requests.ends[position]) == (number in known.scored)
        assert not known.tokens[number] or requests.segment_starts[position] == [("w0", 0, "new")]
