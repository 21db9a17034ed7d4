"""What a service needs before it can begin, as configured: model, run folder, record."""

import asyncio
import contextlib
import hashlib
import logging
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dora.config import Config, validated
from dora.data.run_record import LINES_FILES, VERSIONS_FOLDER, Recorder, unwritable
from dora.data.types import RoutingShape
from dora.errors import InvalidValue
from dora.kvtier.server import remove_left
from dora.models import check_parallel, context_tokens, default_cache, made_model, resolve_model, routing
from dora.system.files import try_folder
from dora.system.ownership import hold, hold_new, is_abandoned
from dora.weights.host_store import bound_of
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

WEIGHTS_FOLDER: Final = "weights"  # of a run folder
SNAPSHOTS_FOLDER: Final = "kv"
RUN_FOLDER: Final = "service.run_folder"
CONTEXT_UNSAID_TOKENS: Final = 2048
LOCK_FILE: Final = "dora.lock"  # of a run folder that was named; held while its service lives
MADE_LOCK_FILE: Final = "made.lock"  # of one that a service has made for itself
MADE_PREFIX: Final = "dora-"
STATE_PREFIX: Final = "dorastate-"  # of one that a service with a state folder has made: no other one removes it
FILES_MAX: Final = 1 << 16


def open_many_files() -> None:
    """As many as this process may ask for, up to ``FILES_MAX``: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(FILES_MAX, hard) if hard != resource.RLIM_INFINITY else FILES_MAX
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


def routing_wanted(config: Config, model: Path) -> RoutingShape | None:
    """What workers report of their routers; None: nothing. Raises InvalidValue for a model that has none."""
    return routing(model) if config.workers.router_replay else None


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
        with _taken_over(Path(config.service.run_folder), keeps=bool(config.service.state)) as folder:
            yield folder
        return
    if config.service.state:
        with _taken_over(made_for_state(config), keeps=True) as folder:
            yield folder
            shutil.rmtree(folder, ignore_errors=True)  # not where an error ends the service
        return
    parent = _memory()
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


def made_for_state(config: Config) -> Path:
    """The run folder of a service that carries on, where none is named: each of its lives has the same."""
    name = hashlib.blake2b(f"{os.getuid()}/{Path(config.service.state).resolve()}".encode(), digest_size=6).hexdigest()
    return _memory() / f"{STATE_PREFIX}{name}"


def _memory() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """What the start of a service writes into a folder that a setting names. Raises InvalidValue where it cannot."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(field, str(folder), f"a folder with room to write in ({error.strerror})") from error


def store_of(run_folder: Path, model: Path, config: Config) -> WeightStore:
    """The store, with version 0 in it, and beside it the folder for snapshots. It keeps the reference version, unless
    that is 0, which is the model itself."""
    with writable(RUN_FOLDER, run_folder):
        (run_folder / SNAPSHOTS_FOLDER).mkdir(exist_ok=True)
        store = WeightStore(run_folder / WEIGHTS_FOLDER, model, config.rollout.reference_version or None)
    store.bound_bytes = bound_of(store.reference, weight_versions(config))
    room = os.statvfs(run_folder)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < store.bound_bytes:
        log.warning(
            "%s has room for %s bytes; the versions of the window may take %s: a commit may be refused",
            run_folder,
            f"{free_bytes:,}",
            f"{store.bound_bytes:,}",
        )
    return store


def weight_versions(config: Config) -> int:
    """How many versions a host's weight store may hold: those of the window, the next one, and the reference."""
    kept = 1 if config.rollout.reference_version else 0
    return config.service.weight_versions or config.window.most + 1 + kept


@contextlib.contextmanager
def _taken_over(folder: Path, keeps: bool) -> Iterator[Path]:
    """A folder that the user named: a service before this one may have ended there in any way, but not live there.

    ``keeps``: its versions and snapshots stay, for a service that carries on.
    """
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
        for left in (folder / WEIGHTS_FOLDER, folder / SNAPSHOTS_FOLDER) if not keeps else ():
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


async def recorder_of(
    config: Config, store: WeightStore, stack: contextlib.AsyncExitStack, carries_on: bool
) -> Recorder | None:
    """``carries_on``: an earlier life of this service may have begun the record."""
    if not config.record:
        return None
    folder = Path(config.record) if carries_on else _new_record(config)
    recorder = await asyncio.to_thread(Recorder, folder, config.workers.quantisation)
    stack.callback(recorder.close)
    with writable("record", folder):
        if not carries_on:
            await asyncio.to_thread(recorder.carry_on, -1, ())  # a start that came to nothing has kept its model
        for version in store.versions():
            await asyncio.to_thread(recorder.keep_version, version, store.folder(version))
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
    lines = any(file.exists() and file.stat().st_size for file in (folder / name for name in LINES_FILES))
    # ids and versions begin anew with each service
    if lines or any(kept.name != "0" for kept in (folder / VERSIONS_FOLDER).glob("[0-9]*")):
        raise InvalidValue("record", config.record, "a folder without an earlier record")
    return folder
