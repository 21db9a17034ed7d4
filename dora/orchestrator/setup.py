"""What a service needs before it can begin, as configured: model, run folder, record, event log."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dora.config import Config
from dora.errors import InvalidValue
from dora.models import context_tokens, default_cache, resolve_model
from dora.orchestrator.eventlog import EventLogWriter
from dora.record import TRAJECTORIES_FILE, Recorder
from dora.weights.store import WeightStore


def cache_of(config: Config) -> Path:
    """Where prepared models are kept, and what is read of tokenizers."""
    return Path(config.cache) if config.cache else default_cache()


async def prepared_model(config: Config, progress: Callable[[str], None]) -> Path:
    """The model's folder. A named model is made by a process of its own: the service itself loads no torch."""
    cache = cache_of(config)
    if not (Path(config.model) / "config.json").is_file():
        argv = [sys.executable, "-m", "dora.models", config.model, str(cache)]
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**os.environ, "TQDM_DISABLE": "1"},  # lines for people, not bars
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        last = "it says nothing"
        async for line in process.stderr:
            last = line.decode(errors="replace").strip() or last
            progress(last)
        if await process.wait():
            raise InvalidValue("--model", config.model, f"a model that can be prepared ({last})")
    return resolve_model(config.model, cache)


def check_context(config: Config, model: Path) -> None:
    """Raises InvalidValue where engines would be asked for longer contexts than the model has: they would not start."""
    most = context_tokens(model)
    asked = config.workers.max_model_len_tokens
    if config.workers.count and config.workers.engine == "vllm" and most is not None and asked > most:
        raise InvalidValue("workers.max_model_len_tokens", asked, f"at most {most}, which is what {config.model} takes")


@contextlib.contextmanager
def run_folder_of(config: Config) -> Iterator[Path]:
    """Shared memory of this service: weights, KV snapshots, logs. Removed at the end if we made it."""
    if config.service.run_folder:
        folder = Path(config.service.run_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidValue("service.run_folder", str(folder), f"a folder to write in ({error.strerror})") from error
        yield folder
        return
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dora-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def recorder_of(config: Config, store: WeightStore, stack: contextlib.AsyncExitStack) -> Recorder | None:
    if not config.record:
        return None
    folder = Path(config.record)
    if (folder / TRAJECTORIES_FILE).exists():  # ids begin anew with each service
        raise InvalidValue("record", config.record, "a folder without an earlier record")
    recorder = await asyncio.to_thread(Recorder, folder)
    stack.callback(recorder.close)
    await asyncio.to_thread(recorder.keep_version, 0, store.folder(0))
    return recorder


def event_log_of(config: Config, stack: contextlib.AsyncExitStack) -> EventLogWriter | None:
    """The log, closed after the runtime has handled its last event."""
    if not config.service.event_log:
        return None
    return stack.enter_context(EventLogWriter(Path(config.service.event_log), config, now_s=time.monotonic()))
