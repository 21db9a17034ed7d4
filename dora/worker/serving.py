"""A worker as a member of a service: its engine under one service, and under the next one if it outlives that."""

import threading
from pathlib import Path

from dora.kvtransfer.plane import DataPlane
from dora.rpc import dora_pb2 as pb
from dora.session.link import Link
from dora.session.linked import Address, LinkedMember
from dora.worker.engine import RolloutEngine
from dora.worker.loop import EngineLoop, of_store


class WorkerMember(LinkedMember):
    """Generates on without a service."""

    def __init__(self, address: Address, engine: RolloutEngine, stop: threading.Event) -> None:
        super().__init__(address, engine.capability, engine.capability.fingerprint, stop)
        self._engine = engine
        self._loop: EngineLoop | None = None

    def held(self) -> pb.WorkerHello:
        return pb.WorkerHello() if self._loop is None else self._loop.held()

    def loop_of(self, link: Link, welcome: pb.Welcome, plane: DataPlane) -> EngineLoop:
        versions = of_store(Path(welcome.weights_folder), self._address.name)
        if self._loop is None:
            self._loop = EngineLoop(self._engine, link, welcome, plane, versions=versions)
        else:
            self._loop.come_back(link, welcome, plane, versions)
        return self._loop

    def step_alone(self) -> bool:
        return self._loop is not None and self._loop.step_alone()
