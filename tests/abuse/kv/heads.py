"""The room of heads: a snapshot's head changed on its way, or made by somebody who can seal one and gets it wrong.

The body stays as it is, or has another length: its bytes are under the checksums of chunks, the matter of other rooms.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora.errors import NotFound
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.plane import ArrivedSnapshot
from dora.kvtransfer.snapshot import KvSnapshot
from dora.rpc import dora_pb2 as pb
from dora.worker.fake.engine import FakeEngine
from tests.abuse.kv.changed_heads import CHANGES, differing
from tests.abuse.kv.mill import RESPONSES, an_engine, request_of, untouched
from tests.abuse.kv.room import Room
from tests.contract.driver import Driver, Response
from tests.contract.workers import Worker

CONTROL_EVERY: Final = 200


class Given:
    """A data plane that has one snapshot: what ``take_all`` gives is what a test has put there."""

    def __init__(self) -> None:
        self.parcel: tuple[bytes, bytes] | None = None

    def take_all(self, key: str) -> ArrivedSnapshot:
        if self.parcel is None:
            raise NotFound("locator", key, "a snapshot that has arrived")
        parcel, self.parcel = self.parcel, None
        return ArrivedSnapshot(snapshot_of(*parcel), parcel[0], [])

    def forget(self, _ticket: str) -> None:
        self.parcel = None


def stormed(model: Path, count: int, seed: int, engines: Callable[[Path], FakeEngine] = an_engine) -> Room:
    room, chance, began_s = Room("heads"), random.Random(seed), time.monotonic()
    expected, snapshots = untouched(model, engines), exported(model, engines)
    plane = Given()
    target = Worker(None, model, engine=engines(model))
    target.loop.endpoint._plane = plane  # type: ignore[assignment]
    assert target.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    while room.goes_on(count):
        snapshot = chance.choice(snapshots)
        head, body = head_of(snapshot), b"".join(round_of(snapshot))
        if room.mutations // CONTROL_EVERY >= room.controls:
            plane.parcel = head, body
            _control(room, target, snapshot, expected)
            continue
        what = chance.choice(list(CHANGES))
        parcel = CHANGES[what](chance, head, body, chance.choice(snapshots))
        if parcel == (head, body):
            continue
        plane.parcel = parcel
        if _copied_in(target, snapshot).ok:
            room.accept(f"{what}: {differing(head, parcel[0])}")
            target.obey(remove_request=pb.RemoveRequest(request_id=snapshot.request.request_id))
        else:
            room.refuse(what)
        plane.forget("")
        load = target.engine.load()
        room.blocks_leaked += load.running + load.waiting + load.kv_used_tokens
    room.took_s = time.monotonic() - began_s
    return room


def exported(model: Path, engines: Callable[[Path], FakeEngine] = an_engine) -> list[KvSnapshot]:
    """One of each request, at another token each."""
    driver = Driver(engines(model))
    driver.engine.load_weights(1, model, None)
    found = []
    for index in range(RESPONSES):
        driver.add(request_of(index))
        driver.step(1 + index % 30)
        if driver.responses[f"r{index}"].finish_reason is None:
            found.append(driver.take_out(f"r{index}"))
    return found


def _copied_in(target: Worker, snapshot: KvSnapshot) -> pb.WorkerOutcome:
    """The target is told to take in this snapshot, whatever its plane has."""
    request = snapshot.request
    target.tokens[request.request_id] = list(request.output_token_ids)
    target.logprobs[request.request_id] = list(request.logprobs)
    target.ends.pop(request.request_id, None)
    return target.obey(copy_in=pb.CopyIn(request_id=request.request_id, version=1, locator="k"))


def _control(room: Room, target: Worker, snapshot: KvSnapshot, expected: list[Response]) -> None:
    name = snapshot.request.request_id
    if not _copied_in(target, snapshot).ok:
        room.wrong.append(f"{name} was refused as it is")
        return
    found = expected[int(name[1:])]
    room.controls += 1
    room.compared += 1
    if (target.finish(name), target.logprobs[name]) != (found.token_ids, found.logprobs):
        room.wrong.append(f"{name}: its tokens are not those of an unmoved request")
