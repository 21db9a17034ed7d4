"""The room of heads: a snapshot's head changed on its way, or made by somebody who can seal one and gets it wrong.

The body stays as it is, or has another length: its bytes are under the checksums of chunks, the matter of other rooms.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgpack
from blake3 import blake3

from dora.errors import NotFound
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.snapshot import KvSnapshot
from dora.rpc import dora_pb2 as pb
from tests.abuse.kv.mill import RESPONSES, an_engine, request_of, untouched
from tests.abuse.kv.room import Room
from tests.contract.driver import Driver, Response
from tests.contract.workers import Worker

CONTROL_EVERY: Final = 200
SEAL_AT: Final = 16
MANIFEST_AT: Final = 48
ODD: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x", "x" * 5000,
    b"", b"\0", b"\xff" * 4, b"\xff" * 8, b"\0" * 1024, [], [[]], [0], ["a", "b"], {}, {"a": 1}, [1] * 5000, -0.0,
)  # fmt: skip


class Given:
    """A data plane that has one snapshot: what ``take`` gives is what a test has put there."""

    def __init__(self) -> None:
        self.parcel: tuple[bytes, bytes] | None = None

    def take(self, key: str) -> KvSnapshot:
        if self.parcel is None:
            raise NotFound("locator", key, "a snapshot that has arrived")
        parcel, self.parcel = self.parcel, None
        return snapshot_of(*parcel)

    def forget(self, _ticket: str) -> None:
        self.parcel = None


def stormed(model: Path, count: int, seed: int) -> Room:
    room, chance, began_s = Room("heads"), random.Random(seed), time.monotonic()
    expected, snapshots = untouched(model), exported(model)
    plane = Given()
    target = Worker(None, model, engine=an_engine(model))
    target.loop._plane = plane  # type: ignore[assignment]
    assert target.obey(load_version=pb.LoadVersion(version=1, folder=str(model))).ok
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
            room.accept(f"{what}: {_differing(head, parcel[0])}")
            target.obey(remove_request=pb.RemoveRequest(request_id=snapshot.request.request_id))
        else:
            room.refuse(what)
        plane.forget("")
        load = target.engine.load()
        room.blocks_leaked += load.running + load.waiting + load.kv_used_tokens
    room.took_s = time.monotonic() - began_s
    return room


def _differing(head: bytes, changed: bytes) -> str:
    """Where two heads begin to differ, as far as it helps to find the change."""
    at = next((at for at, (a, b) in enumerate(zip(head, changed, strict=False)) if a != b), 0)
    manifest = next((at for at in range(MANIFEST_AT, len(head)) if head[at : at + 1] != changed[at : at + 1]), at)
    return f"at {manifest}: {head[manifest - 12 : manifest + 12]!r} became {changed[manifest - 12 : manifest + 12]!r}"


def exported(model: Path) -> list[KvSnapshot]:
    """One of each request, at another token each."""
    driver = Driver(an_engine(model))
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


# Damage.


Parcel = tuple[bytes, bytes]


def _bits(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    raw = bytearray(head)
    for place in chance.sample(range(8 * len(raw)), chance.randint(1, 8)):
        raw[place // 8] ^= 1 << place % 8
    return bytes(raw), body


def _bytes(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    at = chance.randrange(len(head))
    count = chance.choice((1, 4, 64, 4096))
    return head[:at] + chance.choice((chance.randbytes(count), bytes(count))) + head[at + count :], body


def _cut(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    return head[: chance.randrange(len(head))], body


def _grown(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    at = chance.randrange(len(head) + 1)
    return head[:at] + chance.choice((b"\0", head[:at], chance.randbytes(9))) + head[at:], body


def _resealed_bits(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    """Damage outside the manifest, under a seal that fits."""
    raw = bytearray(head)
    raw[chance.randrange(SEAL_AT)] ^= 1 << chance.randrange(8)
    return _sealed(bytes(raw[:SEAL_AT]), head[MANIFEST_AT:]), body


def _body_cut(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    return head, body[: chance.randrange(len(body))]


def _body_grown(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    count = chance.choice((1, other.layout.layers[0][1], other.layout.block_bytes, len(body)))
    return head, body + chance.randbytes(count)


# Snapshots that are whole, and not what is expected here.


def _remade(change: Callable[[random.Random, dict[str, Any]], object]) -> "Change":
    """The manifest changed by ``change``, under a seal that fits."""

    def changed(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
        manifest = msgpack.unpackb(head[MANIFEST_AT:])
        change(chance, manifest)
        return _sealed(head[:SEAL_AT], msgpack.packb(manifest)), body

    return changed


def _of_layout(chance: random.Random, manifest: dict[str, Any]) -> None:
    layout = manifest["layout"]
    name = chance.choice(["fingerprint", "backend", "dtype", "block_tokens", "layers", "tp_rank", "tp_size"])
    layers = layout["layers"]
    layout[name] = {
        "fingerprint": chance.randbytes(32).hex(),
        "backend": "cuda/flash",
        "dtype": "bfloat16",
        "block_tokens": layout["block_tokens"] * 2,
        "layers": chance.choice(
            [layers[::-1], layers[:-1], [*layers, layers[0]], [[name, size + 1] for name, size in layers]]
        ),
        "tp_rank": 1,
        "tp_size": 2,
    }[name]


def _of_counts(chance: random.Random, manifest: dict[str, Any]) -> None:
    name = chance.choice(["kv_tokens", "rng_draws", "rounds", "output_token_ids", "prompt_token_ids", "logprobs"])
    if name in ("kv_tokens", "rng_draws"):
        manifest[name] += chance.choice((-1, 1, 16, -16))
    elif name == "rounds":
        count = sum(manifest[name])
        manifest[name] = chance.choice(([count + 1], [count - 1], [count, 1], [count, -1, 1], [0, count], []))
    else:
        width = 8 if name == "logprobs" else 4
        cut = chance.choice((width, 1)) if len(manifest[name]) > width else 1
        manifest[name] = chance.choice((manifest[name][cut:], manifest[name] + bytes(cut)))


def _of_another(chance: random.Random, manifest: dict[str, Any]) -> None:
    name = chance.choice(["version", "request_id", "token"])
    if name == "version":
        manifest["version"] = chance.choice((0, 2, 17, -1, 1 << 40))
    elif name == "request_id":
        manifest["request_id"] = chance.choice(("", "r999", manifest["request_id"] + "\0"))
    else:  # of another vocabulary
        manifest["prompt_token_ids"] = b"\xff\xff\xff\x7f" + manifest["prompt_token_ids"][4:]


def _of_types(chance: random.Random, manifest: dict[str, Any]) -> None:
    """Any field as a thing that it cannot be."""
    place = chance.choice([manifest, manifest["layout"], manifest["sampling"]])
    name = chance.choice(list(place))
    before = place[name]
    if chance.random() < 0.2:
        del place[name]
    elif chance.random() < 0.1:
        place[f"{name}_"] = before
        if place is manifest:  # a field more than there are says nothing
            del place[name]
    else:
        allowed = (type(before), int, bool, float) if isinstance(before, int | float) else (type(before),)
        place[name] = chance.choice([value for value in ODD if not isinstance(value, allowed)])


def _no_manifest(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    deep = b"\x91" * chance.choice((10, 600, 5000)) + b"\xc0"
    content = chance.choice((b"\xc1", deep, b"\xdf\xff\xff\xff\xff", msgpack.packb(chance.choice(ODD)), b""))
    return _sealed(head[:SEAL_AT], content), body


def _of_other_request(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    """All of another request's snapshot: a locator that was mixed up."""
    renamed = replace(other, request=replace(other.request, request_id=f"{other.request.request_id}+"))
    return head_of(renamed), b"".join(round_of(renamed))


def _sealed(preamble: bytes, manifest: bytes) -> bytes:
    return preamble + blake3(preamble).update(manifest).digest() + manifest


Change = Callable[[random.Random, bytes, bytes, KvSnapshot], Parcel]
CHANGES: Final[dict[str, Change]] = {
    "bits": _bits,
    "bytes": _bytes,
    "cut": _cut,
    "grown": _grown,
    "preamble": _resealed_bits,
    "body cut": _body_cut,
    "body grown": _body_grown,
    "another layout": _remade(_of_layout),
    "other counts": _remade(_of_counts),
    "another version or request": _remade(_of_another),
    "other types": _remade(_of_types),
    "no manifest": _no_manifest,
    "another snapshot": _of_other_request,
}
