"""A process of DORA that is killed at a moment of a publish: ``python -m tests.e2e.mortal -m MODULE ARGUMENT...``.

A moment is a file WHO.WHEN in the folder $MORTAL. Whoever comes there renames it, so that it comes once, and is killed.
WHO: service, trainer, a host or a worker, by its name.
"""

import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from dora.weights import files, manifest

SMALL: Final = 64 << 10  # bytes of a chunk: a version of the tiny model has some
ITSELF: Final = ("-m", "tests.e2e.mortal")

who = ""


def passes(when: str) -> None:
    file = Path(os.environ["MORTAL"]) / f"{who}.{when}"
    try:
        file.rename(f"{file}.passed")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: str = "", after: str = "", at: Callable[..., bool] | None = None) -> None:
    """``owner.name`` passes these moments; ``at``: only where this holds of its arguments."""
    inner = getattr(owner, name)

    def outer(*arguments: Any, **options: Any) -> Any:
        is_there = at is None or at(*arguments, **options)
        if before and is_there:
            passes(before)
        result = inner(*arguments, **options)
        if after and is_there:
            passes(after)
        return result

    setattr(owner, name, outer)


def service() -> None:
    from dora.core import commands as do
    from dora.orchestrator import starting
    from dora.orchestrator.rollout import workers
    from dora.weights.store import WeightStore
    from dora.weights.upload import Upload

    around(Upload, "append", after="upload", at=lambda upload, _: 2 * upload.received_bytes >= upload.expected_bytes)
    around(WeightStore, "publish", before="publish", after="published")
    around(workers, "worker_message", before="load", at=lambda command, *_: isinstance(command, do.LoadVersion))
    relay()
    mortal_workers(starting)


def agent() -> None:
    from dora.host import runtime
    from dora.weights.host_store import HostStore
    from dora.weights.receiving import Receiving

    around(HostStore, "receive", before="manifest")
    around(Receiving, "placed", after="chunk", at=is_half_here)
    around(HostStore, "_sealed", before="seal", after="sealed")
    relay()
    mortal_workers(runtime)


def is_half_here(receiving: Any, *_: Any) -> bool:
    return bool(2 * len(receiving.missing()) <= sum(file.chunks for file in receiving.manifest.files))


def relay() -> None:
    from dora.relay.holding import Reader

    around(Reader, "chunk", before="chain", at=lambda reader, number: 2 * number >= reader._holding.numbering.chunks)


def mortal_workers(module: Any) -> None:
    inner = module.worker_argv
    module.worker_argv = lambda *arguments: [*ITSELF, *inner(*arguments)]


def worker() -> None:
    from dora.worker.fake.engine import FakeEngine

    around(FakeEngine, "load_weights", before="load", after="loaded")


def trainer() -> None:
    from dora.client import publication, taking

    around(taking, "copy_tensor", after="copy")
    publication.WEIGHT_CHUNK_BYTES = SMALL  # type: ignore[misc]
    inner = publication._chunks

    async def chunks(*arguments: Any) -> AsyncIterator[Any]:
        sent = 0
        async for chunk in inner(*arguments):
            sent += 1
            if sent == 4:
                passes("upload")
            yield chunk

    publication._chunks = chunks


def main(argv: list[str]) -> None:
    global who
    assert argv[0] == "-m"
    module, arguments = argv[1], argv[2:]
    kind = "trainer" if module.startswith("tests.") else "worker" if module == "dora.worker" else arguments[0]
    options = {"worker": "--worker-id", "host": "--name"}
    who = arguments[arguments.index(options[kind]) + 1] if kind in options else {"serve": "service"}.get(kind, kind)
    if kind != "worker":
        for each in (files, manifest):
            each.CHUNK_BYTES = SMALL  # type: ignore[misc]
    {"serve": service, "host": agent, "worker": worker, "trainer": trainer}[kind]()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from tests.e2e import mortal  # by its name: what is patched asks this one who it is

    mortal.main(sys.argv[1:])
