"""Measures the journal's cost, and the time of a restart: ``python -m perf.journal --json``.

``journal_vs_raw_fsync``: bytes per second of the log, against a loop that writes the same records with one write and
one fdatasync a batch of the same size. ``restart_s``: to find a log with so many requests in flight and to make book
and core of it; the bar is one second more than twice the time of reading the log's bytes.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dora.config import validated
from dora.core import Machine
from dora.data.types import Prompt
from dora.journal import frames, records
from dora.journal.finding import find
from dora.journal.log import FLUSH_BYTES, LOG_FOLDER, Log
from dora.orchestrator.recovery import resume
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.system.memory import collecting_rarely

GROUP_SIZE = 16
WORKER_REQUESTS = 128
PROMPT_TOKENS = 200


def admitted(requests: int) -> Iterator[records.Admitted]:
    """Groups of so many requests, of prompts of ``PROMPT_TOKENS``."""
    for group in range(requests // GROUP_SIZE):
        prompt = Prompt(f"p{group}", "sum", tuple(range(PROMPT_TOKENS)), "a prompt's text", GROUP_SIZE)
        number = group * GROUP_SIZE
        rows = list(range(number, number + GROUP_SIZE))
        yield records.Admitted(number, f"g{group}", records.prompt_values(prompt), 0, 3, 4, 1.0, rows, group, 0)


def reports(requests: int, tokens: int, each: int) -> Iterator[records.Tokens]:
    """Reports of workers of ``WORKER_REQUESTS``, of ``each`` tokens a request, up to ``tokens`` of each."""
    random = np.random.default_rng(0)
    for first in range(0, tokens, each):
        for begin in range(0, requests, WORKER_REQUESTS):
            numbers = np.arange(begin, min(requests, begin + WORKER_REQUESTS))
            counts = np.full(len(numbers), each)
            ids = random.integers(0, 150_000, each * len(numbers), np.int32)
            stays = [[index, f"w{begin}", 0, "new"] for index in range(len(numbers))] if not first else []
            yield records.Tokens(2.0, numbers, np.full(len(numbers), first), counts, counts[:0], ids, ids / 1e6, stays)


async def told(folder: Path, given: Sequence[records.LogRecord]) -> float:
    """Seconds until the log has all of it on disk."""
    found = find(folder)
    log = Log(folder / LOG_FOLDER, found.durable, number=0, position=0, compaction=found.compaction)
    began_s = time.perf_counter()
    for record in given:
        log.append(record)
    await log.settled()
    took_s = time.perf_counter() - began_s
    await log.close()
    return took_s


def raw(path: Path, bodies: Sequence[bytes]) -> float:
    """Seconds for the same records in a bare loop of appends and syncs."""
    began_s = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batch: list[bytes] = []
    held = 0
    for number, body in enumerate(bodies):
        batch.append(body)
        held += len(body)
        if held >= FLUSH_BYTES or number == len(bodies) - 1:
            os.write(descriptor, b"".join(batch))
            os.fdatasync(descriptor)
            batch, held = [], 0
    os.close(descriptor)
    return time.perf_counter() - began_s


def restarted(folder: Path) -> tuple[float, float, dict[str, float]]:
    """Seconds of reading the log's bytes alone; of a restart; and of its parts those of a core."""
    began_s = time.perf_counter()
    for path in sorted((folder / LOG_FOLDER).iterdir()):
        path.read_bytes()
    read_s = time.perf_counter() - began_s
    config = validated({"window": {"size": 4, "groups_per_step": 2048}, "rollout": {"group_size": GROUP_SIZE}})
    parts: dict[str, float] = {}
    began_s, last_s = time.perf_counter(), time.process_time()
    began_cpu_s = last_s

    def part(name: str) -> None:
        nonlocal last_s
        parts[name], last_s = time.process_time() - last_s, time.process_time()

    found = find(folder)
    part("find")
    buffer = ResponseBuffer(config.rollout, None, config.window.least)
    resume.restore_buffer(buffer, found.groups, found.requests, found.durable.next_number)
    part("book")
    event = resume.restored(buffer, found, found.groups, config.window, time.time(), incarnation=2)
    part("event")
    Machine(config).handle(event, 0.0)
    part("core")
    took_s = time.perf_counter() - began_s
    parts["all"] = time.process_time() - began_cpu_s
    return read_s, took_s, parts


def measured(folder: Path, requests: int, tokens: int, each: int) -> dict[str, object]:
    given = [records.Attached(1, 2048), *admitted(requests), *reports(requests, tokens, each)]
    bodies = [records.encoded(record) for record in given]
    total_bytes = sum(frames.HEAD_BYTES + len(body) for body in bodies)
    raw(folder / "warm", bodies)
    raw_s = min(raw(folder / f"raw{index}", bodies) for index in range(2))
    log_s = asyncio.run(told(folder / "state", given))
    with collecting_rarely():  # as a service does from its start on
        read_s, restart_s, parts = restarted(folder / "state")
    return {
        "log_bytes": total_bytes,
        "requests": requests,
        "journal_vs_raw_fsync": raw_s / log_s,
        "raw_s": raw_s,
        "log_s": log_s,
        "read_s": read_s,
        "restart_s": restart_s,
        "restart_bar_s": 1.0 + 2 * read_s,
        "restart_cpu_s": parts,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.journal", description=__doc__)
    parser.add_argument("--requests", type=int, default=131_072, help="in flight")
    parser.add_argument("--tokens", type=int, default=240, help="of each")
    parser.add_argument("--each", type=int, default=40, help="tokens of a request in a report")
    parser.add_argument("--folder", help="on the disk that is meant; default: the system's for temporary files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        found = measured(Path(scratch), options.requests, options.tokens, options.each)
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
