"""Simulated workers: they decode, obey and answer in the order of their stream, and are unlucky with a given chance."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass
class SimRequest:
    tokens: int
    version: int
    frozen: bool = False


@dataclass
class SimWorker:
    worker_id: str
    epoch: int
    version: int = -1
    requests: dict[str, SimRequest] = field(default_factory=dict)
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)

    def decode(self, world: "World") -> None:
        tokens, finished = {}, {}
        for request_id, request in sorted(self.requests.items()):
            if request.frozen:
                continue
            assert request.version == self.version, f"{request_id} decodes under {self.version}"
            request.tokens = min(world.lengths[request_id], request.tokens + world.random.randrange(1, 9))
            tokens[request_id] = request.tokens
            if request.tokens == world.lengths[request_id]:
                finished[request_id] = "stop"
        for request_id in finished:
            del self.requests[request_id]
        if tokens:
            used = sum(request.tokens for request in self.requests.values())
            self.outbox.append(on.Progress(self.worker_id, self.epoch, self.version, tokens, finished, 0, used))

    def obey(self, world: "World", command: do.WorkerCommand) -> None:
        outcome = self._outcome(world, command, world.random.random() < world.faults)
        self.outbox.append(on.CommandDone(self.worker_id, self.epoch, command.command_id, **outcome))

    def _outcome(self, world: "World", command: do.WorkerCommand, unlucky: bool) -> dict:
        match command:
            case do.LoadVersion(version=version):
                assert not self.requests, "weights replaced under live requests"
                assert version not in world.retired, f"version {version} was retired before its load"
                self.version = -1 if unlucky else version
                return {"ok": not unlucky}
            case do.StartRequest(request_id=request_id):
                return self._start(world, command, request_id, unlucky)
            case do.RemoveRequest(request_id=request_id) | do.CancelReservation(request_id=request_id):
                self.requests.pop(request_id, None)
            case do.ReserveSlot(version=version):
                return {"ok": version == self.version and not unlucky}
            case do.CopyOut(request_id=request_id):
                return self._copy_out(world, command.command_id, request_id, unlucky)
            case do.CopyIn(request_id=request_id, version=version, locator=locator):
                # an undone handoff has deleted its snapshot: then the target finds none
                snapshot_id, tokens, snapshot_version = world.snapshots.get(locator, ("", 0, -1))
                good = snapshot_id == request_id and snapshot_version == version == self.version and not unlucky
                if good:
                    self.requests[request_id] = SimRequest(tokens, version)
                return {"ok": good}
            case do.Thaw(request_id=request_id):
                if request_id in self.requests:
                    self.requests[request_id].frozen = False
        return {"ok": True}

    def _start(self, world: "World", command: do.StartRequest, request_id: str, unlucky: bool) -> dict:
        assert command.version == self.version, f"{request_id} of {command.version} started under {self.version}"
        assert request_id not in self.requests, f"{request_id} was started twice"
        if unlucky and world.random.random() < 0.2:
            return {"ok": False, "error": "unlucky", "error_kind": world.random.choice(("invalid", "refused"))}
        self.requests[request_id] = SimRequest(world.book[request_id], command.version)
        return {"ok": True}

    def _copy_out(self, world: "World", command_id: int, request_id: str, unlucky: bool) -> dict:
        request = self.requests.get(request_id)
        if request is None:
            return {"ok": False, "error_kind": "unknown_request"}
        if unlucky:
            request.frozen = True  # frozen first, found not to be movable then
            return {"ok": False, "error_kind": world.random.choice(("not_movable", "refused"))}
        request.frozen = True
        locator = f"snapshot-{command_id}-{request_id}"
        world.snapshots[locator] = (request_id, request.tokens, request.version)
        return {"ok": True, "locator": locator, "tokens": request.tokens}
