"""Kills every process that has a part in a publish, at each of its moments: ``python -m tests.e2e.publish_kills``.

A service, two hosts that have joined, a worker on each, and a trainer are processes that end at a moment which the
trainer arms, one a version (``mortal.py``, ``publisher.py``). They are started again. In the end all steps were
trained, and every logprob is what its version's weights, as they were recorded, give. Ends with 1 where one is not.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.data.types import RequestSpec
from dora.models.tiny import make_tiny
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing
from dora.ops.verify.invariants import violations
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import Response, farthest, run
from tests.e2e.mortal import ITSELF
from tests.e2e.restarts import Killed, settings_of

GROUPS: Final = 3
WINDOW: Final = 2
HOSTS: Final = ("local", "h1", "h2")
OF_WORKERS: Final = ("load", "loaded")
MOMENTS: Final = (
    *(f"trainer.{when}" for when in ("upload", "before", "copy", "committed")),
    *(f"service.{when}" for when in ("upload", "publish", "published", "chain", "load")),
    *(f"h1.{when}" for when in ("manifest", "chunk", "seal", "sealed")),
    *(f"h2.{when}" for when in ("chunk", "sealed")),
    *(f"{worker}.{when}" for worker in ("w0", "h1-w0") for when in OF_WORKERS),
)
SETTINGS: Final = {
    "workers.count": 1,
    "workers.reattach_timeout_s": 0.5,
    "workers.restarts": 100,
    "workers.environment": ["MORTAL"],  # the folder of the moments
    "rollout.max_tokens": 60,
    "rollout.ignore_eos": True,
}


class Played:
    """A process that is started again whenever it was killed at a moment."""

    def __init__(self, folder: Path, name: str, argv: Sequence[str], token: str) -> None:
        self.log = folder / f"{name}.log"
        self._argv, self._token = argv, token
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Until it ends by itself. Raises AssertionError where it fails."""
        while True:
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *ITSELF,
                    *self._argv,
                    env={**os.environ, "DORA_TOKEN": self._token},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            code = await self._process.wait()
            if code != -signal.SIGKILL:
                assert not code, self.log.read_text()[-4000:]
                return

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def killed(model: Path, folder: Path, moments: Sequence[str]) -> dict[str, Any]:
    """Runs a service through each of these moments. Raises AssertionError if a promise is broken."""
    record = folder / "record"
    settings = settings_of(model, folder, window__size=WINDOW, record=str(record)) | SETTINGS
    with moments_in(folder / "moments"):
        service = Killed(folder, settings, (sys.executable, *ITSELF))
        await service.start()
        argv = ["-m", "tests.e2e.publisher", service.address, str(model), str(GROUPS), ",".join(HOSTS), *moments]
        trainer = Played(folder, "trainer", argv, service.token)
        join = ["-m", "dora", "host", "--join", service.address, "--workers", "1"]
        options = {name: ["--name", name, "--folder", str(folder / name)] for name in HOSTS[1:]}  # what it has is kept
        hosts = [Played(folder, name, [*join, *options[name]], service.token) for name in options]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(service.stop)
            for each in (trainer, *hosts):
                stack.push_async_callback(each.end)
            kept = [asyncio.create_task(service.keep()), *(asyncio.create_task(host.run()) for host in hosts)]
            training = asyncio.create_task(trainer.run())
            for task in (*kept, training):
                stack.callback(task.cancel)
            await asyncio.wait([training, *kept], return_when=asyncio.FIRST_COMPLETED)
            for task in kept:
                if task.done():
                    task.result()
            assert training.done(), "a host has left"
            training.result()
    return checked(record, model, moments)


@contextmanager
def moments_in(folder: Path) -> Iterator[None]:
    folder.mkdir()
    before = os.environ.get("MORTAL")
    os.environ["MORTAL"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("MORTAL")
        if before is not None:
            os.environ["MORTAL"] = before


def checked(record: Path, model: Path, moments: Sequence[str]) -> dict[str, Any]:
    trajectories = read_trajectories(record / TRAJECTORIES_FILE)
    steps, lacking = missing(record, trajectories)
    wrong = [*violations(trajectories, WINDOW), *lacking]
    assert not wrong, wrong[:10]
    assert steps >= sum(not moment.startswith("trainer.") for moment in moments)
    versions = sorted({each.behaviour_version for each in trajectories})
    apart = max(difference(record, model, version, trajectories) for version in versions)
    assert apart == 0.0, "a logprob is not that of its version's weights"
    return {"moments": len(moments), "steps": steps, "versions": len(versions), "trajectories": len(trajectories)}


def difference(record: Path, model: Path, version: int, trajectories: Sequence[Any]) -> float:
    """The largest of a logprob of this version from what its weights give in one go."""
    engine = FakeEngine(slots=8, kv_tokens=16384, max_model_len_tokens=2048, model=model)
    engine.load_weights(version, record / VERSIONS_FOLDER / str(version) if version else model, None)
    mine = [each for each in trajectories if each.behaviour_version == version]
    requests = [
        RequestSpec(each.trajectory_id, version, tuple(each.prompt_token_ids.tolist()), each.sampling) for each in mine
    ]
    found = {each.trajectory_id: Response(each.response_token_ids.tolist(), each.logprobs.tolist()) for each in mine}
    return farthest(found, run(engine, requests))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.publish_kills", description=__doc__)
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny("dense", Path(scratch) / "tiny")
        print(json.dumps(asyncio.run(killed(model, Path(scratch), MOMENTS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
