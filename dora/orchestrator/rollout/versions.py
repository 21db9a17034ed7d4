"""The stored weights of versions: deleted once no step and no evaluation can need them."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from dora.config import RolloutConfig
from dora.core import commands as do
from dora.journal import records
from dora.journal.versions import PersistedVersions
from dora.orchestrator.recording.storage import PERSISTED, RUN_FOLDER, Storage
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.orders import HostVersions
from dora.system.log_lines import about
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")


@dataclass(eq=False, repr=False)
class Versions:
    """Carries out the core's commands to versions. A restart needs those ``kept``, or none without a state folder."""

    _core: Core
    _store: WeightStore
    kept: PersistedVersions | None
    _storage: Storage
    _journal: Journal
    _hosts: HostVersions
    _rollout: RolloutConfig

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            do.PinVersion: lambda command: self._forget(command.version),  # evaluations do not outlive the service
            do.RetireVersion: self._retire,
            do.FallBack: self._fall_back,
        }

    def _fall_back(self, command: do.FallBack) -> None:
        said = "step %d: the engines' mismatch is %.3g nats a token or more, above workers.mismatch_max"
        told = f"{said}; version %d and later ones are in full precision"
        log.warning(told, command.step, command.mismatch, command.version, extra=about(step=command.step))

    def _forget(self, version: int) -> None:
        self._journal.note(records.Retired(version, version == self._rollout.reference_version))
        self._core.spawn(self.drop_kept(version))

    def _retire(self, command: do.RetireVersion) -> None:
        self._forget(command.version)
        with self._storage.tidying(RUN_FOLDER):
            gone = self._store.set_aside(command.version)
            if gone is not None:
                self._core.spawn(self._free(gone))
        self._hosts.retired(command.version)

    async def _free(self, gone: Path) -> None:
        with self._storage.tidying(RUN_FOLDER):
            await asyncio.to_thread(self._store.free, gone)

    async def drop_kept(self, version: int) -> None:
        """Deletes a version's stored weights once no client can be told that they are needed."""
        if self.kept is None or version == self._rollout.reference_version:
            return
        await self._journal.settled()
        with self._storage.tidying(PERSISTED):
            await asyncio.to_thread(self.kept.drop, version)
