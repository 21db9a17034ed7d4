"""Mutated KV snapshots: none is taken in, no token is wrong, and nothing of them is kept.

A part of what ``python -m tests.abuse.kv`` tries.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dora.models.tiny import make_tiny
from dora.worker.fake.engine import FakeEngine
from tests.abuse.kv import changed_heads, heads, lies, mill, peers, segments, stream
from tests.abuse.kv.room import Room
from tests.sweeps import counts_of

SEED = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("kv") / "model")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Logs of refusals name an exception; its object is not kept, as it holds the whole message."""
    caplog.set_level(logging.CRITICAL, "dora.worker")


def is_fine(room: Room, kinds: int) -> None:
    assert room.failures() == []
    assert len(room.refused) >= kinds, "each kind of mutation was tried"
    assert room.controls and room.compared


@pytest.mark.parametrize("engines", [mill.an_engine, mill.an_engine_with_state], ids=["blocks", "state"])
@pytest.mark.parametrize("count", counts_of(150, 1500))
def test_no_changed_head_is_taken_in(model: Path, count: int, engines: Callable[[Path], FakeEngine]) -> None:
    is_fine(heads.stormed(model, count, SEED, engines), len(changed_heads.CHANGES))


@pytest.mark.parametrize("count", counts_of(150, 500))
def test_no_peer_that_gets_something_wrong_is_believed(model: Path, tmp_path: Path, count: int) -> None:
    is_fine(peers.stormed(tmp_path, model, count, SEED), len(lies.LIES))


@pytest.mark.parametrize("hosts", [pytest.param(("", ""), marks=pytest.mark.full), ("a", "b")])
def test_nobody_in_the_middle_changes_a_snapshot(model: Path, tmp_path: Path, hosts: tuple[str, str]) -> None:
    is_fine(stream.stormed(tmp_path, model, 150, SEED, hosts), 40)


def test_no_hand_on_shared_memory_changes_a_snapshot(model: Path, tmp_path: Path) -> None:
    is_fine(segments.stormed(tmp_path, model, 150, SEED), len(segments.AT_OPENING))


# That each room can fail.


@pytest.mark.full
def test_without_tags_of_frames_the_room_of_streams_finds_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.kvtransfer.wire.hmac", SimpleNamespace(compare_digest=lambda _found, _expected: True))
    assert stream.stormed(tmp_path, model, 300, SEED).accepted


def test_without_checksums_of_chunks_the_room_of_segments_finds_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.kvtransfer.incoming.digest_with", lambda _name, _key: lambda _parts: bytes(16))
    monkeypatch.setattr("dora.kvtransfer.outgoing.digest_with", lambda _name, _key: lambda _parts: bytes(16))
    room = segments.stormed(tmp_path, model, 60, SEED)
    assert room.accepted and room.wrong
