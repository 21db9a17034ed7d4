"""What a service needs before it can begin, as configured: model, run folder, record, event log."""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dora.config import Config, validated
from dora.errors import InvalidValue
from dora.kvtier.server import remove_left
from dora.models import check_parallel, context_tokens, default_cache, made_model, resolve_model
from dora.orchestrator.eventlog import EventLogWriter, new_log
from dora.outfile import try_folder
from dora.ownership import hold, hold_new, is_abandoned
from dora.record import LINES_FILES, VERSIONS_FOLDER, Recorder, unwritable
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

WEIGHTS_FOLDER: Final = "weights"  # of a run folder
SNAPSHOTS_FOLDER: Final = "kv"
RUN_FOLDER: Final = "service.run_folder"
CONTEXT_UNSAID_TOKENS: Final = 2048
LOCK_FILE: Final = "dora.lock"  # of a run folder that was named; held while its service lives
MADE_LOCK_FILE: Final = "made.lock"  # of one that a service has made for itself
MADE_PREFIX: Final = "dora-"
FILES_MOST: Final = 1 << 16


def open_many_files() -> None:
    """As many as this process may ask for, up to ``FILES_MOST``: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(FILES_MOST, hard) if hard != resource.RLIM_INFINITY else FILES_MOST
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cache_of(config: Config) -> Path:
    """Where prepared models are kept, and what is read of tokenizers."""
    return Path(config.cache) if config.cache else default_cache()


async def prepared_model(config: Config, progress: Callable[[str], None]) -> Path:
    """The model's folder. A named model is made by a process of its own: the service itself loads no torch."""
    cache = cache_of(config)
    if (made := made_model(config.model, cache)) is None:
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
    return made or resolve_model(config.model, cache)


def with_context(config: Config, model: Path) -> Config:
    """The configuration with ``workers.max_model_len_tokens``, which by default is the model's own.

    It is at most ``workers.kv_tokens``, whole blocks: one request has to fit into a worker's KV-cache, whatever the
    model was made for. A model that does not say what it was made for has ``CONTEXT_UNSAID_TOKENS``. Raises
    InvalidValue where engines are asked for longer contexts than the model has, or for more ranks than divide it: they
    would not start; or where ``rollout.max_tokens`` leaves no room for a prompt.
    """
    if config.workers.count and config.workers.engine == "vllm":
        check_parallel(model, config.workers.tensor_parallel, config.workers.pipeline_parallel)
    most = context_tokens(model)
    asked = config.workers.max_model_len_tokens
    if not asked:
        workers = config.workers
        kv_tokens = workers.kv_tokens // workers.block_tokens * workers.block_tokens
        tree = config.model_dump()
        tree["workers"]["max_model_len_tokens"] = min(most or CONTEXT_UNSAID_TOKENS, kv_tokens)
        return validated(tree)
    if config.workers.count and config.workers.engine == "vllm" and most is not None and asked > most:
        raise InvalidValue("workers.max_model_len_tokens", asked, f"at most {most}, which is what {config.model} takes")
    return config


def check_engine(config: Config) -> None:
    """Raises InvalidValue where the workers' engine is not installed: each of them would say so in its log, and end."""
    if config.workers.count and config.workers.engine == "vllm" and find_spec("vllm") is None:
        allowed = "an engine that is installed: pip install 'dora-rollout[cpu]', or [cuda], brings vLLM; or fake"
        raise InvalidValue("workers.engine", config.workers.engine, allowed)


@contextlib.contextmanager
def run_folder_of(config: Config) -> Iterator[Path]:
    """Shared memory of this service: weights, KV snapshots, logs. Removed at the end if we made it.

    What services left that were killed is removed first: their folders in shared memory, and in a folder that was
    named the versions and snapshots (the logs stay). Raises InvalidValue where a living service has the folder.
    """
    if config.service.run_folder:
        with _taken_over(Path(config.service.run_folder)) as folder:
            yield folder
        return
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{MADE_PREFIX}*"):
        if is_abandoned(left / MADE_LOCK_FILE):
            log.warning("%s is removed: its service was killed", left)
            remove_left(left)
            shutil.rmtree(left, ignore_errors=True)
    with writable(RUN_FOLDER, parent):
        folder = Path(tempfile.mkdtemp(prefix=MADE_PREFIX, dir=parent))
    try:
        with writable(RUN_FOLDER, folder):
            held = hold_new(folder / MADE_LOCK_FILE)
        try:
            yield folder
        finally:
            os.close(held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """What the start of a service writes into a folder that a setting names. Raises InvalidValue where it cannot."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(field, str(folder), f"a folder with room to write in ({error.strerror})") from error


def store_of(run_folder: Path, model: Path) -> WeightStore:
    """The store, with version 0 in it, and beside it the folder for snapshots."""
    with writable(RUN_FOLDER, run_folder):
        (run_folder / SNAPSHOTS_FOLDER).mkdir(exist_ok=True)
        return WeightStore(run_folder / WEIGHTS_FOLDER, model)


@contextlib.contextmanager
def _taken_over(folder: Path) -> Iterator[Path]:
    """A folder that the user named: a service before this one may have ended there in any way, but not live there."""
    lock = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = _is_ours(folder)
        held = hold(lock)
    except OSError as error:
        raise _unusable(folder, error) from error
    if held is None:
        raise _in_use(folder)
    try:
        _check_left(folder, ours)
        for left in (folder / WEIGHTS_FOLDER, folder / SNAPSHOTS_FOLDER):
            shutil.rmtree(left, ignore_errors=True)
        remove_left(folder)
        yield folder
    finally:
        os.close(held)


def check_run_folder(config: Config) -> None:
    """Raises InvalidValue where ``run_folder_of`` would; nothing is taken over, and nothing is left."""
    folder = Path(config.service.run_folder)
    if not config.service.run_folder:
        return
    try:
        try_folder(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if (folder / LOCK_FILE).exists() and not is_abandoned(folder / LOCK_FILE):
        raise _in_use(folder)
    _check_left(folder, _is_ours(folder))


def _is_ours(folder: Path) -> bool:
    """Whether a service has been in it."""
    return (folder / LOCK_FILE).exists() or (folder / WEIGHTS_FOLDER / "proof").is_file()


def _check_left(folder: Path, ours: bool) -> None:
    for left in (folder / WEIGHTS_FOLDER, folder / SNAPSHOTS_FOLDER):
        if left.exists() and not ours:
            allowed = f"a folder for services alone: no service has made {left}"
            raise InvalidValue(RUN_FOLDER, str(folder), allowed)


def _unusable(folder: Path, error: OSError) -> InvalidValue:
    return InvalidValue(RUN_FOLDER, str(folder), f"a folder to write in ({error.strerror})")


def _in_use(folder: Path) -> InvalidValue:
    return InvalidValue(RUN_FOLDER, str(folder), "a folder that no running service has")


async def recorder_of(config: Config, store: WeightStore, stack: contextlib.AsyncExitStack) -> Recorder | None:
    if not config.record:
        return None
    folder = _new_record(config)
    recorder = await asyncio.to_thread(Recorder, folder)
    stack.callback(recorder.close)
    with writable("record", folder):
        await asyncio.to_thread(recorder.keep_version, 0, store.folder(0))
    return recorder


def check_record(config: Config) -> None:
    """Raises InvalidValue where ``recorder_of`` would; nothing is left."""
    if config.record:
        try:
            try_folder(_new_record(config))
        except OSError as error:
            raise unwritable(Path(config.record), error) from error


def _new_record(config: Config) -> Path:
    folder = Path(config.record)
    left = [*(folder / name for name in LINES_FILES), *(folder / VERSIONS_FOLDER).glob("[0-9]*")]
    if any(each.exists() for each in left):  # ids and versions begin anew with each service
        raise InvalidValue("record", config.record, "a folder without an earlier record")
    return folder


def event_log_of(config: Config, stack: contextlib.AsyncExitStack) -> EventLogWriter | None:
    """The log, closed after the runtime has handled its last event."""
    if not config.service.event_log:
        return None
    return stack.enter_context(EventLogWriter(Path(config.service.event_log), config, now_s=time.monotonic()))


def check_event_log(config: Config) -> None:
    """Raises InvalidValue where ``event_log_of`` would; nothing is left."""
    if config.service.event_log:
        file = Path(config.service.event_log)
        new_log(file).close()
        file.unlink()
