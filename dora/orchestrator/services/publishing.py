"""Publishes a version's weights: files are uploaded, checked, stored, made durable and recorded.

    upload ──▶ store (checked, one rename) ──▶ record (state folder, then the run record) ──▶ event to the core

A version becomes visible only once it is durable: if a step fails, the version counts as not published.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from dora.config import Config
from dora.data.run_record import CommittedStep
from dora.errors import InvalidValue, LimitExceeded, is_full
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.recording.storage import PERSISTED, RUN_FOLDER, Storage
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.versions import Versions
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.system.awake import awake_s
from dora.weights.files import WeightFile
from dora.weights.host_store import size_here
from dora.weights.store import WeightStore
from dora.weights.upload import Upload

log = logging.getLogger("dora.service")

ROOM_WAIT_S: Final = 20.0  # longest wait for room in the store if no version is about to leave
ROOM_LOOK_S: Final = 0.1
_BLAKE3_BYTES: Final = 32

Request: TypeAlias = pb.CommitStepRequest | pb.RepublishVersionRequest


@dataclass(eq=False, repr=False)
class Publishing:
    """Handles one version at a time, except for uploads."""

    _config: Config
    _core: Core
    _store: WeightStore
    _versions: Versions
    _storage: Storage
    _recorder: RecordQueue
    _hosts: Hosts

    @contextlib.asynccontextmanager
    async def upload(self, header: pb.WeightFileHeader) -> AsyncIterator[Upload]:
        """Opens one incoming file, in a thread. Raises like ``WeightStore.upload``."""
        opened = functools.partial(
            self._store.upload,
            header.trainer_epoch,
            header.version,
            header.file_name,
            header.file_bytes,
            (header.base_version, header.base_blake3) if header.base_blake3 else None,
            header.piece_bytes,
        )
        with (
            self._storage.writing(RUN_FOLDER, f"weights: {header.file_name[:80]}", header.file_bytes),
            await _opened(opened) as upload,
        ):
            yield upload

    async def discard(self, trainer_epoch: int) -> None:
        """Deletes the uploads of an earlier trainer."""
        with self._storage.tidying(RUN_FOLDER):
            await asyncio.to_thread(self._store.discard, trainer_epoch)

    async def store(self, request: Request, *, anew: bool) -> Path:
        """Checks a version's announced and uploaded files, and moves them into the store. Returns its folder."""
        canary = convert.canary_from_wire(request.canary)
        longest = self._config.workers.context_tokens
        if canary is not None and not 2 <= len(canary.token_ids) <= longest:
            allowed = f"2 to {longest} tokens, which the workers' engines can score"
            raise InvalidValue("canary.token_ids", f"{len(canary.token_ids)} tokens", allowed)
        await self._room(request.version)
        announced = (request.trainer_epoch, request.version, _announced(request), canary)
        state, version = self._core.state, request.version
        is_same = version in state.unavailable and version in state.proven  # responses may have been sampled under it
        name = self._hosts.name_of(version) if is_same else ""
        with self._storage.writing(RUN_FOLDER, f"weights: version {version}"):
            publish = functools.partial(self._store.publish, *announced, anew=anew, name=name)
            return await asyncio.to_thread(publish)

    async def _room(self, version: int) -> None:
        """Waits until the store has room: a version that has left the window stays while a worker loads it, and a load
        that does not end is replaced after ``workers.load_timeout_s``.

        Raises LimitExceeded if the store stays full.
        """
        began_s, is_told = awake_s(), False
        what = f"weights: version {version}"
        while True:
            try:
                with self._storage.writing(RUN_FOLDER, what):
                    await asyncio.to_thread(self._store.check_room, what, 0)
                return
            except LimitExceeded as error:
                state = self._core.state
                is_leaving = state.retired < state.window.oldest_kept or bool(self._store.leaving())
                most_s = ROOM_WAIT_S + is_leaving * self._config.workers.load_timeout_s
                if awake_s() - began_s >= most_s:
                    raise
                if not is_told:
                    log.warning("a commit waits at most %g s for room in the store: %s", most_s, error)
                    is_told = True
            await asyncio.sleep(ROOM_LOOK_S)

    async def record(self, request: Request, folder: Path, identity: bytes, step: CommittedStep | None = None) -> None:
        """Makes a version's record durable before it becomes visible, and its weights if the service can carry on after
        a crash. ``step`` is None if the version is published again. Raises ServiceUnavailable if that fails now: the
        version then counts as not published, so that other weights may follow.
        """
        try:
            await self._keep(request.version, folder)
            if step is None:
                await self._recorder.republished(request.version, folder, identity)
            else:
                await self._recorder.committed(step, folder, identity)
        except ServiceUnavailable:
            with self._storage.tidying(RUN_FOLDER):
                await asyncio.to_thread(self._store.take_back, request.trainer_epoch, request.version)
            raise

    async def _keep(self, version: int, folder: Path) -> None:
        """Makes the weights of a version durable. Raises ServiceUnavailable."""
        if self._versions.kept is None:
            return
        try:
            await asyncio.to_thread(self._versions.kept.keep, version, folder)
        except OSError as error:
            self._storage.failed(PERSISTED, error, _bytes_of(folder) if is_full(error) else 0)
            why = f"the write failed: the service's state folder cannot be written ({error.strerror})"
            raise ServiceUnavailable(f"{why}; the call may be repeated", PERSISTED, error.strerror) from error
        self._storage.works(PERSISTED)

    async def withdraw(self, version: int) -> None:
        """Removes a stored and recorded version that was not committed, because the next commit may bring others."""
        await asyncio.to_thread(self._store.withdraw, version)
        if self._versions.kept is not None:
            await asyncio.to_thread(self._versions.kept.drop, version)
        self._recorder.withdrawn(version)

    async def release(self, version: int) -> None:
        """Removes the stored weights of a version that was retired meanwhile."""
        with self._storage.tidying(RUN_FOLDER):
            await asyncio.to_thread(self._store.retire, version)
        await self._versions.drop_kept(version)
        log.info("version %d has left the window while it was being republished", version)


async def _opened(opened: Callable[[], Upload]) -> Upload:
    """Opens an upload in a thread. If the caller disconnects meanwhile, its file is released."""
    opening = asyncio.ensure_future(asyncio.to_thread(opened))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_upload)
        raise


def _close_upload(opening: asyncio.Future[Upload]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        with opening.result():
            pass


def _bytes_of(folder: Path) -> int:
    return sum(map(size_here, folder.iterdir()))


def _announced(request: Request) -> list[WeightFile]:
    for file in request.files:
        if len(file.blake3) != _BLAKE3_BYTES:
            raise InvalidValue(f"{file.name[:80]}: blake3", f"{len(file.blake3)} bytes", f"{_BLAKE3_BYTES} bytes")
    return [WeightFile(file.name, file.file_bytes, file.blake3) for file in request.files]
