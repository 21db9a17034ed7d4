"""The messages of a peer with a snapshot to send, and the errors that it may make."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dora.kvtransfer.checksum import digest_with
from dora.kvtransfer.codec import head_of, round_of
from dora.kvtransfer.peer import Identity
from dora.kvtransfer.snapshot import KvSnapshot
from dora.kvtransfer.wire import Kind
from tests.abuse.kv.changed_heads import ODD
from tests.contract.planes import SECRET, End

CHUNK_BYTES: Final = 600
SOURCE_EPOCH: Final = 9

Said = tuple[Kind, dict[str, Any], bytes]


@dataclass
class Script:
    """A peer's messages after its greeting."""

    key: str
    said: list[Said]
    identity: Identity
    secret: bytes = SECRET
    wanted_epoch: int = 2
    raw: bytes = b""  # at the end
    ends_early: bool = False  # without a word
    told: str = ""  # the key that the target is told; empty: the script's
    ticket: str = ""
    arrived: set[str] = field(default_factory=set)


def honest(chance: random.Random, snapshot: KvSnapshot, target: End) -> Script:
    identity = Identity("w9", SOURCE_EPOCH, target.identity.fingerprint, target.identity.host)
    key = f"{SOURCE_EPOCH}-{chance.randbytes(16).hex()}.kv"
    return Script(key, _said(key, snapshot.request.request_id, snapshot), identity)


def _said(key: str, ticket: str, snapshot: KvSnapshot) -> list[Said]:
    body, head = b"".join(round_of(snapshot)), head_of(snapshot)
    digest = digest_with("xxh3", SECRET)
    chunks = [(at, body[at : at + CHUNK_BYTES]) for at in range(0, len(body), CHUNK_BYTES)]
    sums = [digest([chunk]) for _, chunk in chunks]
    commit = {"key": key, "sum": digest([*sums, head]), "chunks": len(sums)}
    opening = {"key": key, "ticket": ticket, "transport": "tcp", "size": len(body), "after": "", "goes_on": False}
    return [
        (Kind.ATTACH, {"transport": "tcp"}, b""),
        (Kind.OPEN, opening, b""),
        *((Kind.CHUNK, {"key": key, "at": at, "size": len(chunk)}, chunk) for at, chunk in chunks),
        (Kind.COMMIT, commit, b"".join(sums) + head),
    ]


# What it gets wrong.


def _another_run(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    script.secret = chance.randbytes(32)


def _another_model(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    script.identity = replace(script.identity, fingerprint=chance.choice(("another", "\0", "x" * 300)))


def _another_peer(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    """The snapshot is expected of another epoch, or the target is another one."""
    if chance.random() < 0.5:
        epoch = chance.choice((0, 1, 2, 8, 10))
        key = script.key.replace(f"{SOURCE_EPOCH}-", f"{epoch}-") if chance.random() < 0.5 else script.key
        script.identity = replace(script.identity, epoch=epoch)
        _rename(script, key)
    else:
        script.wanted_epoch = chance.choice((0, 1, 3))


def _ticket(chance: random.Random, script: Script, other: KvSnapshot) -> None:
    _change(script, 1, ticket=chance.choice(("", "nobody", f"{script.said[1][1]['ticket']} ", "x" * 5000)))


def _replayed(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    """An earlier try's frames, when a later one is expected under a key of its own."""
    script.told = f"{SOURCE_EPOCH}-{chance.randbytes(16).hex()}.kv"


def _key(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    keys = ("", "9-", "../../x", f"{SOURCE_EPOCH}-{'g' * 32}.kv", f"1-{'0' * 32}.kv", f"{SOURCE_EPOCH}-{'0' * 32}.kv\n")
    key = chance.choice(keys)
    _rename(script, key)


def _too_much(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    size = script.said[1][1]["size"]
    what = chance.randrange(5)
    if what == 0:  # announced
        _change(script, 1, size=chance.choice((size + 1, size * 2, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1)))
    elif what == 1:  # in a chunk
        at = chance.randrange(2, len(script.said) - 1)
        kind, head, body = script.said[at]
        more = chance.choice((1, 100, 1 << 20))
        script.said[at] = (kind, {**head, "size": head["size"] + more}, body + bytes(more))
    elif what == 2:  # in a chunk, unsaid
        at = chance.randrange(2, len(script.said) - 1)
        kind, head, body = script.said[at]
        script.said[at] = (kind, head, body + bytes(chance.choice((1, 100, 1 << 20))))
    elif what == 3:  # chunks
        script.said.insert(-1, chance.choice(script.said[2:-1]))
    else:  # a head
        kind, head, body = script.said[-1]
        script.said[-1] = (kind, head, body + bytes(chance.choice((1, 16, 1 << 20))))


def _too_little(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    at = chance.randrange(1, len(script.said))
    kind, head, body = script.said[at]
    if chance.random() < 0.5 or not body:
        del script.said[at]
    else:
        script.said[at] = (kind, head, body[: chance.randrange(len(body))])


def _other_lengths(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    at = chance.randrange(1, len(script.said))
    name = chance.choice([name for name in ("size", "at", "chunks") if name in script.said[at][1]])
    value = script.said[at][1][name]
    _change(script, at, **{name: chance.choice((value + 1, value - 1, value + 16, -value - 1, value * 2 + 1))})


def _other_order(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    """Two frames change places, or two chunks' bytes do."""
    chunks = range(2, len(script.said) - 1)
    one, two = sorted(chance.sample(range(len(script.said)), 2))
    if chance.random() < 0.5 and len(chunks) > 1:
        one, two = sorted(chance.sample(chunks, 2))
        (kind, head, body), (_, other_head, other_body) = script.said[one], script.said[two]
        if len(body) == len(other_body) and body != other_body:
            script.said[one], script.said[two] = (kind, head, other_body), (kind, other_head, body)
            return
    script.said[one], script.said[two] = script.said[two], script.said[one]


def _fields(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    at = chance.randrange(len(script.said))
    kind, head, body = script.said[at]
    name = chance.choice([name for name in head if name not in ("after", "goes_on")])
    if chance.random() < 0.2:
        script.said[at] = (kind, {key: value for key, value in head.items() if key != name}, body)
    else:
        _change(script, at, **{name: chance.choice([value for value in ODD if type(value) is not type(head[name])])})


def _rounds(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    changes: list[dict[str, Any]] = [{"goes_on": True}, {"after": "nothing"}, {"after": script.key}, {"goes_on": 1}]
    _change(script, 1, **chance.choice(changes))


def _damaged(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    at = chance.randrange(2, len(script.said))
    kind, head, body = script.said[at]
    place = chance.randrange(len(body))
    script.said[at] = (kind, head, body[:place] + bytes([body[place] ^ 1 << chance.randrange(8)]) + body[place + 1 :])


def _kinds(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    at = chance.randrange(1, len(script.said))
    kind, head, body = script.said[at]
    script.said[at] = (chance.choice([other for other in Kind if other is not kind]), head, body)


def _garbage(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    del script.said[chance.randrange(1, len(script.said)) :]
    preamble = b"DKV2\x09\0\0\0" + chance.randbytes(4) + bytes(8)
    script.raw = chance.choice((b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), preamble, preamble + bytes(5000)))


def _stops(chance: random.Random, script: Script, _other: KvSnapshot) -> None:
    del script.said[chance.randrange(len(script.said)) :]
    script.ends_early = chance.random() < 0.5


def _of_another(chance: random.Random, script: Script, other: KvSnapshot) -> None:
    """A whole snapshot of another version, model or request, in place of this one's."""
    request = replace(other.request, request_id=script.said[1][1]["ticket"])
    changed = chance.choice(
        (
            replace(other, request=replace(request, version=chance.choice((0, 2, 99)))),
            replace(other, request=replace(request, request_id="another")),
            replace(other, request=request, layout=replace(other.layout, fingerprint="another model")),
            replace(other, request=request, layout=replace(other.layout, dtype="bfloat16")),
        )
    )
    script.said = _said(script.key, request.request_id, changed)


def _rename(script: Script, key: str) -> None:
    script.said = [(kind, {**head, "key": key} if "key" in head else head, body) for kind, head, body in script.said]
    script.key = key


def _change(script: Script, number: int, /, **changes: Any) -> None:
    kind, head, body = script.said[number]
    script.said[number] = (kind, {**head, **changes}, body)


LIES: Final[dict[str, Callable[[random.Random, Script, KvSnapshot], None]]] = {
    "another run": _another_run,
    "another model": _another_model,
    "another peer": _another_peer,
    "ticket": _ticket,
    "replayed": _replayed,
    "key": _key,
    "too much": _too_much,
    "too little": _too_little,
    "other lengths": _other_lengths,
    "other order": _other_order,
    "fields": _fields,
    "rounds": _rounds,
    "damaged": _damaged,
    "kinds": _kinds,
    "garbage": _garbage,
    "stops": _stops,
    "of another": _of_another,
}
