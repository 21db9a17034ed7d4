"""Changes to a snapshot's head: damage, or a valid seal on a head that is not the expected one."""

import random
from collections.abc import Callable
from dataclasses import replace
from struct import Struct
from typing import Any, Final

import msgpack
from blake3 import blake3

from dora.kvtransfer.codec import MAGIC, head_of, round_of
from dora.kvtransfer.snapshot import SCHEMA, KvSnapshot

PREAMBLE: Final = Struct("<8sII")  # magic, schema, manifest bytes
SEAL_AT: Final = PREAMBLE.size
MANIFEST_AT: Final = SEAL_AT + 32
ODD: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x", "x" * 5000,
    b"", b"\0", b"\xff" * 4, b"\xff" * 8, b"\0" * 1024, [], [[]], [0], ["a", "b"], {}, {"a": 1}, [1] * 5000, -0.0,
)  # fmt: skip


def differing(head: bytes, changed: bytes) -> str:
    """Returns the fields in which two heads differ, as far as it helps to find the change."""
    try:
        manifests = zip(_manifests(head), _manifests(changed), strict=True)
    except ValueError:
        return "its parts"
    found = [
        (name, one.get(name), other.get(name))
        for one, other in manifests
        for name in {*one, *other}
        if one.get(name, "none") != other.get(name, "none")
    ]
    return f"{found!r:.300}"


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


def _resealed_bits(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    """Damage outside the manifest, under a seal that fits."""
    opening, closing = _parts(head)
    raw = bytearray(opening)
    raw[chance.randrange(SEAL_AT)] ^= 1 << chance.randrange(8)
    raw[SEAL_AT:MANIFEST_AT] = blake3(raw[:SEAL_AT]).update(raw[MANIFEST_AT:]).digest()
    (manifest,) = _manifests(closing)
    return bytes(raw) + _sealed({**manifest, "opening": bytes(raw[SEAL_AT:MANIFEST_AT])}), body


def _body_cut(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    return head, body[: chance.randrange(len(body))]


def _body_grown(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    count = chance.choice((1, other.layout.layers[0][1], other.layout.block_bytes, len(body)))
    return head, body + chance.randbytes(count)


# Snapshots that are whole, and not what is expected here.


def _remade(change: Callable[[random.Random, dict[str, Any], dict[str, Any]], object]) -> "Change":
    """The manifests of opening and closing changed by ``change``, under seals that fit."""

    def changed(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
        opening, closing = _manifests(head)
        change(chance, opening, closing)
        raw = _sealed(opening)
        if "opening" in closing and isinstance(closing["opening"], bytes):
            closing["opening"] = raw[SEAL_AT:MANIFEST_AT]
        return raw + _sealed(closing), body

    return changed


def _of_layout(chance: random.Random, opening: dict[str, Any], _closing: dict[str, Any]) -> None:
    layout = opening["layout"]
    name = chance.choice(["fingerprint", "backend", "dtype", "block_tokens", "layers", "windows", "tp_rank", "tp_size"])
    layers = layout["layers"]
    layout[name] = {
        "fingerprint": chance.randbytes(32).hex(),
        "backend": "cuda/flash",
        "dtype": "bfloat16",
        "block_tokens": layout["block_tokens"] * 2,
        "layers": chance.choice(
            [layers[::-1], layers[:-1], [*layers, layers[0]], [[name, size + 1] for name, size in layers]]
        ),
        "windows": chance.choice(
            [layout["windows"][::-1], [-1, -1], [0, 8]] if layout["windows"] else [[-1, 0], [0, -1]]
        ),
        "tp_rank": 1,
        "tp_size": 2,
    }[name]


def _of_counts(chance: random.Random, opening: dict[str, Any], closing: dict[str, Any]) -> None:
    counts = ["kv_tokens", "rng_draws", "state_tokens"]
    name = chance.choice([*counts, "rounds", "output_token_ids", "prompt_token_ids", "logprobs"])
    if name in counts:
        closing[name] += chance.choice((-1, 1, 16, -16))
    elif name == "rounds":
        count = sum(closing[name])
        closing[name] = chance.choice(([count + 1], [count - 1], [count, 1], [count, -1, 1], [0, count], []))
    else:
        manifest = opening if name == "prompt_token_ids" else chance.choice((opening, closing))
        width = 8 if name == "logprobs" else 4
        cut = chance.choice((width, 1)) if len(manifest[name]) > width else 1
        manifest[name] = (
            manifest[name][cut:] if manifest[name] and chance.random() < 0.5 else manifest[name] + bytes(cut)
        )


def _of_another(chance: random.Random, opening: dict[str, Any], _closing: dict[str, Any]) -> None:
    name = chance.choice(["version", "request_id", "token"])
    if name == "version":
        opening["version"] = chance.choice((0, 2, 17, -1, 1 << 40))
    elif name == "request_id":
        opening["request_id"] = chance.choice(("", "r999", opening["request_id"] + "\0"))
    else:  # of another vocabulary
        opening["prompt_token_ids"] = b"\xff\xff\xff\x7f" + opening["prompt_token_ids"][4:]


def _of_types(chance: random.Random, opening: dict[str, Any], closing: dict[str, Any]) -> None:
    """Any field as a thing that it cannot be."""
    place = chance.choice([opening, opening["layout"], opening["sampling"], closing])
    name = chance.choice(list(place))
    before = place.pop(name)
    if chance.random() < 0.8:
        allowed = (type(before), int, bool, float) if isinstance(before, int | float) else (type(before),)
        place[name] = chance.choice([value for value in ODD if not isinstance(value, allowed)])


def _no_manifest(chance: random.Random, head: bytes, body: bytes, _other: KvSnapshot) -> Parcel:
    deep = b"\x91" * chance.choice((10, 600, 5000)) + b"\xc0"
    content = chance.choice((b"\xc1", deep, b"\xdf\xff\xff\xff\xff", msgpack.packb(chance.choice(ODD)), b""))
    opening, closing = _parts(head)
    return (_packed(content) + closing if chance.random() < 0.5 else opening + _packed(content)), body


def _other_parts(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    """A part of another head in the place of one, or one too many, or too few."""
    ours, theirs = _parts(head), _parts(head_of(other))
    parts = [(theirs[0], ours[1]), (ours[0], theirs[1]), (ours[1], ours[0]), ours[:1], ours[1:], (*ours, theirs[1])]
    return b"".join(chance.choice(parts)), body


def _of_other_request(chance: random.Random, head: bytes, body: bytes, other: KvSnapshot) -> Parcel:
    """All of another request's snapshot: a locator that was mixed up."""
    renamed = replace(other, request=replace(other.request, request_id=f"{other.request.request_id}+"))
    return head_of(renamed), b"".join(round_of(renamed))


def _parts(head: bytes) -> tuple[bytes, bytes]:
    """Opening and closing."""
    end = MANIFEST_AT + PREAMBLE.unpack_from(head)[2]
    return head[:end], head[end:]


def _manifests(head: bytes) -> list[dict[str, Any]]:
    """Returns the manifests of a head's parts."""
    found = []
    while head:
        part, head = _parts(head)
        found.append(dict(msgpack.unpackb(part[MANIFEST_AT:])))
    return found


def _sealed(manifest: dict[str, Any]) -> bytes:
    return _packed(msgpack.packb(manifest))


def _packed(content: bytes) -> bytes:
    """A part of a head with this content."""
    preamble = PREAMBLE.pack(MAGIC, SCHEMA, len(content))
    return preamble + blake3(preamble).update(content).digest() + content


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
    "other parts": _other_parts,
    "another snapshot": _of_other_request,
}
