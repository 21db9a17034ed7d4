"""An agent that joins again: what its folder has kept is no reason to refuse it, and what may pass does not end it."""

import asyncio
import shutil
from pathlib import Path

import pytest

from dora.errors import LimitExceeded
from dora.host import agent
from dora.host.agent import AgentOptions, _Agent
from dora.host.folder import MODEL, WEIGHTS
from dora.host.placement import Placement
from dora.journal.durable import Durable
from dora.rpc import dora_pb2 as pb
from dora.weights.store import WeightStore
from tests.contract.relays import publish
from tests.refusals import refused
from tests.service import configured
from tests.unit.test_expected_hosts import DIGEST, Incarnation


@pytest.mark.parametrize("has_model", [False, True])
async def test_a_host_needs_no_room_for_what_its_folder_has_kept(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_model: bool
) -> None:
    folder, config = tmp_path / "host", configured(tiny_dense, workers__engine="fake", window__size=2)
    shutil.copytree(tiny_dense, folder / MODEL)
    store = WeightStore(folder / WEIGHTS, tiny_dense)
    for version in (1, 2):
        publish(store, version)
    options = AgentOptions("127.0.0.1:1", "", "h1", 1, model=str(tiny_dense) if has_model else "")
    model_bytes = store.reference.content_bytes
    joining = _Agent(options, Placement(), DIGEST if has_model else "", folder, asyncio.Event(), lambda _: None)
    life = Incarnation(tmp_path, config, Durable())

    def free(free_bytes: int) -> pb.HostHello:
        monkeypatch.setattr(agent, "capacity_to_wire", lambda _: pb.HostCapacity(store_free_bytes=free_bytes))
        return joining._hello()

    with refused(LimitExceeded, names=("store_free_bytes",)):
        life.hosts.join(free(3 * model_bytes // 2), DIGEST)
    life.hosts.join(free(2 * model_bytes), DIGEST)  # for an evaluation's version, and the one that is on its way in


class Refused(_Agent):
    """An agent that the service refuses for want of memory, in some of its attempts to join."""

    pause_s = 0.0

    def __init__(self, *attempts: str) -> None:
        super().__init__(AgentOptions("127.0.0.1:1", "", "h1"), "cpu", "", Path(), asyncio.Event(), lambda _: None)
        self.attempts = list(attempts)

    async def run_session(self) -> str | None:
        attempt = self.attempts.pop(0)
        self.has_joined = attempt == "lost"
        if attempt == "refused":
            raise LimitExceeded("store_free_bytes", 1, "2 bytes", why="is too little")
        return None if attempt == "lost" else attempt


async def test_only_a_host_that_had_joined_waits_for_memory() -> None:
    assert await Refused("lost", "refused", "refused", "let go").stay_connected() == "let go"
    with pytest.raises(LimitExceeded):
        await Refused("refused", "let go").stay_connected()
