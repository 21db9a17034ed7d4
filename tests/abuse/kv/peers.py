"""The room of peers: a worker that holds the run's secret, and sends what no worker of this build would send.

It has a snapshot of a request that the target expects, and gets one thing wrong: who it is, what it sends, how much, in
which order, or when. Whatever it says, the target takes in nothing and keeps nothing.
"""

import random
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dora.errors import TransferFailed
from dora.kvtransfer.peer import greet
from dora.kvtransfer.snapshot import KvSnapshot
from dora.kvtransfer.wire import Kind, Stream
from dora.rpc import dora_pb2 as pb
from tests.abuse.kv.heads import CONTROL_EVERY, exported
from tests.abuse.kv.lies import LIES, SOURCE_EPOCH, Script, honest
from tests.abuse.kv.mill import MEMORY_BYTES, TIMEOUT_S, an_engine, untouched
from tests.abuse.kv.room import Room
from tests.contract.driver import Response
from tests.contract.planes import End, a_plane, until
from tests.contract.workers import Worker


def stormed(folder: Path, model: Path, count: int, seed: int) -> Room:
    room, chance, began_s = Room("peers"), random.Random(seed), time.monotonic()
    expected, snapshots = untouched(model), exported(model)
    with a_plane(folder, 2, ("tcp",), timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES) as end:
        target = Worker(end, model, engine=an_engine(model))
        assert target.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        while room.goes_on(count):
            snapshot = chance.choice(snapshots)
            is_control = room.mutations // CONTROL_EVERY >= room.controls
            what = "" if is_control else chance.choice(list(LIES))
            script = honest(chance, snapshot, end)
            if what:
                LIES[what](chance, script, chance.choice(snapshots))
            _tried(room, target, snapshot, script, what, expected)
            room.held_most_bytes = max(room.held_most_bytes, sum(end.plane.held_bytes()))
        load = target.engine.load()
        room.blocks_leaked = load.running + load.waiting + load.kv_used_tokens + target.engine.reserved
        try:
            until(lambda: sum(end.plane.held_bytes()) == 0)
        except AssertionError:
            room.blocks_leaked += 1
    room.took_s = time.monotonic() - began_s
    assert room.held_most_bytes <= 2 * MEMORY_BYTES
    return room


def _tried(
    room: Room, target: Worker, snapshot: KvSnapshot, script: Script, what: str, expected: list[Response]
) -> None:
    name = snapshot.request.request_id
    reserve = pb.ReserveSlot(request_id=name, version=1, kv_tokens=64, source_epoch=SOURCE_EPOCH)
    assert target.obey(reserve_slot=reserve).ok
    assert target.end is not None
    _say(target.end, script)
    target.tokens[name] = list(snapshot.request.output_token_ids)
    target.logprobs[name] = list(snapshot.request.logprobs)
    target.ends.pop(name, None)
    outcome = target.obey(copy_in=pb.CopyIn(request_id=name, version=1, locator=script.told or script.key))
    if outcome.ok and not what:
        found = expected[int(name[1:])]
        room.controls += 1
        room.compared += 1
        if (target.finish(name), target.logprobs[name]) != (found.token_ids, found.logprobs):
            room.wrong.append(f"{name}: its tokens are not those of an unmoved request")
    elif outcome.ok:
        room.accept(f"{what} (mutation {room.mutations})")
    elif what:
        room.refuse(what)
    else:
        room.wrong.append(f"{name} was refused as it is: {outcome.error}")
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id=name)).ok


def _say(target: End, script: Script) -> None:
    """Says all of it, and hears the other end out."""
    host, _, port = target.address.rpartition(":")
    stream = Stream(socket.create_connection((host, int(port))), 20.0)
    peer = replace(target.peer, epoch=script.wanted_epoch)
    with suppress(TransferFailed):
        greet(stream, script.identity, peer, script.secret)
        for kind, head, body in script.said:
            stream.send(kind, head, [memoryview(body)] if body else [])
        if script.raw:
            stream._socket.sendall(script.raw)
    with suppress(OSError):
        stream._socket.shutdown(socket.SHUT_WR)
    with suppress(TransferFailed):
        while not script.ends_early:
            frame = stream.receive()
            if frame.kind is Kind.ARRIVED:
                script.arrived.add(frame.head["key"])
    stream.close()
