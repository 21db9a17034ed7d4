"""Checkpoints on request: the state on disk, and the newest version under a name."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from dora.config import Config
from dora.errors import MISSING, Conflict
from dora.orchestrator.recovery import named
from dora.orchestrator.recovery.incarnation import Incarnation
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.journal import Journal
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.weights.store import WeightStore

NO_STATE = "This service has no state folder, so there is nothing to checkpoint. Start it with `--state DIR`."


@dataclass(eq=False, repr=False)
class Checkpoints:
    """Makes checkpoints of a service with a state folder."""

    _config: Config
    _core: Core
    _feed: PromptFeed
    _journal: Journal
    _store: WeightStore
    _incarnation: Incarnation

    async def make(self, name: str) -> pb.CheckpointReply:
        """Makes the state durable, and keeps the newest version under ``name`` unless that is empty.

        Raises Conflict without a state folder, InvalidValue, and ServiceUnavailable if it cannot be written.
        """
        if self._journal.log is None:
            raise Conflict("checkpoint", MISSING, "of a service started with --state DIR", said=NO_STATE)
        folder = self._config.service.state
        kept, version = await self._kept(Path(folder), name) if name else ("", 0)
        size, state = await self._journal.log.checkpoint(), self._core.state
        return pb.CheckpointReply(
            folder=folder,
            incarnation=self._incarnation.number,
            step=state.window.newest,
            groups=len(state.group_row),
            groups_leased=len(state.leased),
            prompts_queued=len(self._feed),
            log_bytes=size.log_bytes,
            live_bytes=size.live_bytes,
            segments=size.segments,
            kept=kept,
            kept_version=version,
        )

    async def _kept(self, folder: Path, name: str) -> tuple[str, int]:
        newest = self._core.state.window.newest
        named.check_name(folder, name)
        facts = {"version": newest, "kept_at": time.time()}
        try:
            source = named.source_of(folder, self._store.folder(newest), newest)
            return str(await asyncio.to_thread(named.keep, folder, name, source, facts)), newest
        except OSError as error:
            raise ServiceUnavailable(f"the checkpoint cannot be written ({error.strerror}); repeat it") from error
