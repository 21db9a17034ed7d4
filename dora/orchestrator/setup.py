"""Prepares a service's prerequisites: model, run folder, record."""

import asyncio
import contextlib
import hashlib
import logging
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dora.config import Config, validated
from dora.data.engine_args import check_known, check_kv_dtype, installed_arguments
from dora.data.extras import install
from dora.data.record_content import RecordContent
from dora.data.run_record import LINES_FILES, VERSIONS_FOLDER, Recorder, unwritable
from dora.data.types import RoutingShape
from dora.errors import InvalidValue
from dora.host.launchers import launcher_named
from dora.host.proof import proof_file
from dora.kvtier.server import remove_left
from dora.kvtransfer.transports.registry import check_transports
from dora.models import check_parallel, context_tokens, default_cache, made_model, resolve_model, routing
from dora.models.drafts import check_draft, draft_folder
from dora.orchestrator.version_memory import weight_versions
from dora.system.environment import DOWNLOADS, child_environment
from dora.system.files import nearest_existing, try_folder
from dora.system.ownership import hold, hold_new, is_abandoned, is_held, owner_of
from dora.system.private import check_owner, is_own_folder, private_folder
from dora.weights.host_store import bound_of
from dora.weights.load_time import load_limit_s
from dora.weights.reference import Reference
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

WEIGHTS_FOLDER: Final = "weights"  # in a run folder
SNAPSHOTS_FOLDER: Final = "kv"
RUN_FOLDER: Final = "service.run_folder"
CONTEXT_UNSAID_TOKENS: Final = 2048
LOCK_FILE: Final = "dora.lock"  # in a run folder that the user named; held while its service runs
MADE_LOCK_FILE: Final = "made.lock"  # in a run folder that a service made for itself
MADE_PREFIX: Final = "dora-"
# prefix of run folders of services with a state folder: no other service removes them
STATE_PREFIX: Final = "dorastate-"
FILES_MAX: Final = 1 << 16


def open_many_files() -> None:
    """Raises the limit of open files, at most to ``FILES_MAX``, because each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(FILES_MAX, hard) if hard != resource.RLIM_INFINITY else FILES_MAX
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def cache_of(config: Config) -> Path:
    return Path(config.cache) if config.cache else default_cache()


async def prepared_model(config: Config, progress: Callable[[str], None], umask: int = -1) -> Path:
    """Returns the model's folder. A process of its own makes a named model, because the service loads no torch.

    Users may share its cache, so that process has this ``umask``; -1 means this process's.
    """
    cache = cache_of(config)
    if (made := made_model(config.model, cache)) is None:
        argv = [sys.executable, "-m", "dora.models", config.model, str(cache)]
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=child_environment(DOWNLOADS, {"TQDM_DISABLE": "1"}),  # lines for people, no progress bars
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            umask=umask,
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
    """Returns the configuration with ``workers.max_model_len_tokens``, by default the model's own.

    It is at most ``workers.kv_tokens``, in whole blocks, because one request has to fit into a worker's KV-cache. It is
    ``CONTEXT_UNSAID_TOKENS`` if the model states no limit. Raises InvalidValue for a longer context than the model has,
    for ranks that do not divide the model, and if ``rollout.max_tokens`` leaves no room for a prompt.
    """
    if config.workers.count and config.workers.engine == "vllm":
        check_parallel(model, config.workers.tensor_parallel, config.workers.pipeline_parallel)
        if folder := draft_folder(config.workers.speculation):
            on_gpus = config.workers.device.startswith("cuda")  # whose memory ``device_sizes`` compares
            check_draft(folder, model, 0 if on_gpus else config.workers.count)
    most = context_tokens(model)
    context_limit = config.workers.max_model_len_tokens
    if not context_limit:
        workers = config.workers
        block_tokens = max(1, workers.block_tokens)
        kv_tokens = workers.kv_tokens // block_tokens * block_tokens
        tree = config.model_dump()
        context = most or CONTEXT_UNSAID_TOKENS
        tree["workers"]["max_model_len_tokens"] = min(context, kv_tokens) if kv_tokens else context
        return validated(tree)
    if config.workers.count and config.workers.engine == "vllm" and most is not None and context_limit > most:
        raise InvalidValue(
            "workers.max_model_len_tokens", context_limit, f"at most {most}, the context of {config.model}"
        )
    return config


def with_load_time(config: Config, reference: Reference) -> Config:
    """Returns the configuration with a ``workers.load_timeout_s`` that the model's size allows (``load_limit_s``)."""
    limit_s = load_limit_s(reference.content_bytes, config.workers.load_timeout_s)
    return config.model_copy(update={"workers": config.workers.model_copy(update={"load_timeout_s": limit_s})})


def required_routing(config: Config, model: Path) -> RoutingShape | None:
    """Returns the shape of reported routed experts, or None if none are. Raises InvalidValue for a dense model."""
    return routing(model) if config.workers.router_replay else None


def check_engine(config: Config) -> None:
    """Raises InvalidValue if the workers' engine is not installed, one of its arguments, a transport or the launcher is
    unknown, or the pool could not write to its disk.
    """
    if config.workers.count and config.workers.engine == "vllm" and find_spec("vllm") is None:
        allowed = f"an engine that is installed, or fake. vLLM comes with {install('cpu')}, or with [cuda]"
        raise InvalidValue("workers.engine", config.workers.engine, allowed)
    check_known(config.workers.engine_args, installed_arguments())
    check_kv_dtype(config.workers.kv_dtype)
    if config.workers.weights_from == "trainer" and not proof_file("images").is_file():
        allowed = "file, until `dora doctor --device cuda --stage images` has proven the other way here"
        raise InvalidValue("workers.weights_from", "trainer", allowed)
    check_transports(config.kv.transports)
    launcher_named(config.workers.launcher)
    if config.kv.pool_mb and config.kv.spill_mb:
        folder = Path(config.kv.spill_folder)
        with writable("kv.spill_folder", folder):
            try_folder(folder)


@contextlib.contextmanager
def run_folder_of(config: Config, secret: str = "") -> Iterator[Path]:
    """Makes the service's shared memory for weights, KV snapshots and logs, and removes it at the end if it is new.

    Leftovers of killed services are removed first: their folders in shared memory, and versions and snapshots in a
    named folder (logs stay). Raises InvalidValue if a running service or another user has the folder.
    """
    if config.service.run_folder:
        with _taken_over(Path(config.service.run_folder), keeps=bool(config.service.state)) as folder:
            yield folder
        return
    if config.service.state:
        with _taken_over(made_for_state(config, secret), keeps=True) as folder:
            yield folder
            shutil.rmtree(folder, ignore_errors=True)  # an error must not end the service
        return
    parent = shared_memory()
    for left in parent.glob(f"{MADE_PREFIX}*"):
        if is_own_folder(left) and is_abandoned(left / MADE_LOCK_FILE):
            log.warning("%s was removed: its service had been killed", left)
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


def made_for_state(config: Config, secret: str) -> Path:
    """Returns the run folder of a service with a state folder, if none is named. Each incarnation has the same one. The
    ``secret`` makes its name one that other users cannot guess.
    """
    place = f"{secret}/{os.getuid()}/{Path(config.service.state).resolve()}"
    name = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
    return shared_memory() / f"{STATE_PREFIX}{name}"


def shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """Guards a start's writes into a folder that a setting names. Raises InvalidValue if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(field, str(folder), f"a folder with room to write in ({error.strerror})") from error


def store_of(run_folder: Path, model: Path, config: Config, kept: int = 0) -> WeightStore:
    """Makes the weight store with version 0, and the folder for snapshots beside it. The store keeps the reference
    version, unless that is 0, the model itself, and has room for ``kept`` versions of an earlier incarnation.
    """
    with writable(RUN_FOLDER, run_folder):
        (run_folder / SNAPSHOTS_FOLDER).mkdir(exist_ok=True)
        store = WeightStore(run_folder / WEIGHTS_FOLDER, model, config.rollout.reference_version or None)
    store.bound_bytes = bound_of(store.reference, weight_versions(config, kept))
    if warning := lacking_room(run_folder, store.bound_bytes):
        log.warning("%s", warning)
    return store


def lacking_room(run_folder: Path, bound_bytes: int) -> str:
    """Returns a warning, or '' if the file system has room for the window's versions. The folder need not exist."""
    room = os.statvfs(nearest_existing(run_folder))
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes >= bound_bytes:
        return ""
    versions = f"the versions of the window may take {bound_bytes:,}"
    return f"{run_folder} has room for {free_bytes:,} bytes; {versions}: a commit may be refused"


@contextlib.contextmanager
def _taken_over(folder: Path, keeps: bool) -> Iterator[Path]:
    """Takes over a folder that the user named, in which no service may be running.

    If ``keeps``, versions and snapshots stay, for a service that carries on.
    """
    lock = folder / LOCK_FILE
    try:
        private_folder(folder, RUN_FOLDER)
        ours = _is_ours(folder)
        held = hold(lock)
    except OSError as error:
        raise _unusable(folder, error) from error
    if held is None:
        raise _in_use(RUN_FOLDER, folder)
    try:
        _check_left(folder, ours)
        for left in (folder / WEIGHTS_FOLDER, folder / SNAPSHOTS_FOLDER) if not keeps else ():
            shutil.rmtree(left, ignore_errors=True)
        remove_left(folder)
        yield folder
    finally:
        held.close()


def check_run_folder(config: Config, secret: str = "") -> Path:
    """Returns the folder in which ``run_folder_of`` would have its folder or that folder itself; changes nothing.

    Raises InvalidValue in the cases in which ``run_folder_of`` would.
    """
    named = Path(config.service.run_folder) if config.service.run_folder else None
    folder = named or (made_for_state(config, secret) if config.service.state else None)
    if folder is None:
        with writable(RUN_FOLDER, shared_memory()):
            try_folder(shared_memory())
        return shared_memory()
    check_owner(folder, RUN_FOLDER)
    try:
        try_folder(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if is_held(folder / LOCK_FILE):
        raise _in_use(RUN_FOLDER, folder)
    _check_left(folder, _is_ours(folder))
    return folder


def _is_ours(folder: Path) -> bool:
    return (folder / LOCK_FILE).exists() or (folder / WEIGHTS_FOLDER / "proof").is_file()


def _check_left(folder: Path, ours: bool) -> None:
    for left in (folder / WEIGHTS_FOLDER, folder / SNAPSHOTS_FOLDER):
        if left.exists() and not ours:
            allowed = f"a folder used by services alone: no service has made {left}"
            raise InvalidValue(RUN_FOLDER, str(folder), allowed)


def _unusable(folder: Path, error: OSError) -> InvalidValue:
    return InvalidValue(RUN_FOLDER, str(folder), f"a folder to write in ({error.strerror})")


def _in_use(field: str, folder: Path) -> InvalidValue:
    return InvalidValue(field, str(folder), "a folder that no running service has", why=_used_by(folder))


def _used_by(folder: Path) -> str:
    return f"is in use by {owner_of(folder / LOCK_FILE)}"


async def recorder_of(
    config: Config,
    store: WeightStore,
    stack: contextlib.AsyncExitStack,
    carries_on: bool,
    bound: Callable[[Recorder | None], Awaitable[Recorder | None]] | None = None,
) -> Recorder | None:
    """Opens the run record unless another service has it. With ``carries_on``, an earlier incarnation may have made it.

    ``bound`` checks that the record belongs to the service's state, before anything is written to it.
    """
    recorder, folder = None, Path(config.record)
    with contextlib.ExitStack() as opened:
        if config.record:
            check_owner(folder, "record")
            _hold_record(config, opened)
            folder = folder if carries_on else _new_record(config)
            recorder = await asyncio.to_thread(Recorder, folder, config.workers.numerics, config.record_weights)
            opened.callback(recorder.close)
        if bound is not None:
            recorder = await bound(recorder)
            if recorder is not None:
                opened.callback(recorder.close)
        if recorder is None:
            return None
        with writable("record", folder):
            if not carries_on:
                await asyncio.to_thread(recorder.carry_on, -1, ())  # a start that failed early has stored its model
            versions = store.versions()
            for version in (each for each in versions if recorder.keeps(each) or each == max(versions)):
                await asyncio.to_thread(recorder.keep_version, version, store.folder(version))
        stack.push(opened.pop_all())
    return recorder


def _hold_record(config: Config, stack: contextlib.ExitStack) -> None:
    folder = Path(config.record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() in _own_folders(config):
            return
        held = hold(folder / LOCK_FILE)
    except OSError as error:
        raise unwritable(folder, error) from error
    if held is None:
        raise _in_use("record", folder)
    stack.callback(held.close)


def _own_folders(config: Config) -> list[Path]:
    return [Path(named).resolve() for named in (config.service.run_folder, config.service.state) if named]


def check_record(config: Config, carries_on: bool) -> RecordContent | None:
    """Returns the record's content; changes nothing. With ``carries_on``, an earlier incarnation may have begun it.

    Raises InvalidValue if the record cannot be written, or belongs to a running service or an earlier run.
    """
    folder = Path(config.record)
    if not config.record:
        return None
    check_owner(folder, "record")
    try:
        try_folder(folder)
        if (folder / VERSIONS_FOLDER).exists():
            try_folder(folder / VERSIONS_FOLDER)
    except OSError as error:
        raise unwritable(folder, error) from error
    if folder.resolve() not in _own_folders(config) and is_held(folder / LOCK_FILE):
        raise _in_use("record", folder)
    return RecordContent(folder if carries_on else _new_record(config))


def _new_record(config: Config) -> Path:
    folder = Path(config.record)
    lines = any(file.exists() and file.stat().st_size for file in (folder / name for name in LINES_FILES))
    # each service counts ids and versions from the beginning
    if lines or any(kept.name != "0" for kept in (folder / VERSIONS_FOLDER).glob("[0-9]*")):
        raise InvalidValue("record", config.record, "a folder without an earlier record")
    return folder
