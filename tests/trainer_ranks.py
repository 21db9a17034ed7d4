"""Ranks of a trainer as processes, forked from one that has loaded torch and transformers: a rank starts at once."""

import contextlib
import itertools
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["transformers.models.qwen3.modeling_qwen3", "dora.trainers.grpo", "tests.trainer_ranks"]
)
_NUMBERS = itertools.count()


@dataclass
class Rank:
    """One rank's process, and what it has written."""

    process: Any
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def start_ranks(count: int, folder: Path, work: Callable[..., object], *arguments: Any) -> list[Rank]:
    """Runs ``work(*arguments)``, a module's function, on ``count`` ranks, with the variables that torchrun sets.

    What it returns is the exit code, 0 for None. Output goes to files in ``folder``, which is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = _port()
    ranks = []
    for rank in range(count):
        output = folder / f"rank-{rank}.log"
        process = _PROCESSES.Process(target=_run, args=(rank, count, port, str(output), work, arguments), daemon=True)
        process.start()
        ranks.append(Rank(process, output))
    return ranks


def _port() -> int:
    """A free port below those that the kernel gives to connections, so none takes it before rank 0 listens."""
    first, last = 20_000, 32_000
    for number in range(last - first):
        port = first + (64 * os.getpid() + next(_NUMBERS) + number) % (last - first)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {first} to {last} is free")


def ended(ranks: list[Rank], timeout_s: float = 240.0) -> list[int]:
    """The exit codes, once all have ended. Fails with what they wrote where one does not end."""
    for rank in ranks:
        rank.process.join(timeout_s)
    texts = "\n".join(rank.text() for rank in ranks)
    alive = [index for index, rank in enumerate(ranks) if rank.process.is_alive()]
    for rank in ranks:
        rank.process.kill()
    assert not alive, f"ranks {alive} did not end:\n{texts}"
    return [rank.process.exitcode for rank in ranks]


def _run(
    rank: int, count: int, port: int, output: str, work: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, OMP_NUM_THREADS="1")
    with Path(output).open("w", buffering=1) as stream, contextlib.redirect_stdout(stream):
        os.dup2(stream.fileno(), 2)
        sys.stderr = stream
        import torch

        torch.set_num_threads(1)
        try:
            code = work(*arguments)
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.exit(code or 0)
