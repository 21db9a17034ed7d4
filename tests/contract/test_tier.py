"""The shared KV tier, against LMCache's own server: what is found, what never is, and what happens without it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dora.kvtier import server
from dora.kvtier.chunks import salt_of
from dora.kvtier.tier import TIMEOUT_S, Tier
from dora.kvtier.wire import TierConnection, key_of, registration
from tests.contract.tiers import (
    SHAPE,
    WAIT_S,
    TierProcess,
    bodies,
    find,
    found_bodies,
    keep,
    needs_lmcache,
    opened,
    passage,
    serving,
)

pytestmark = needs_lmcache

TOKENS = list(range(100, 230))  # four chunks, and a rest


SIZE_MB = 16


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    with serving(tmp_path_factory.mktemp("tier"), size_mb=SIZE_MB) as process:
        yield process


@pytest.fixture
def tier_process(started: TierProcess) -> TierProcess:
    """The server, which the test may kill."""
    if started.process is None:
        started.start()
    return started


@pytest.fixture
def one(tier_process: TierProcess) -> Iterator[Tier]:
    with opened(tier_process.endpoint) as tier:
        yield tier


@pytest.fixture
def other(tier_process: TierProcess) -> Iterator[Tier]:
    with opened(tier_process.endpoint) as tier:
        yield tier


def test_what_one_worker_keeps_another_finds_byte_by_byte(one: Tier, other: Tier) -> None:
    kept = bodies(1, 4)
    keep(one, passage("a", TOKENS), kept)
    search = find(other, passage("b", TOKENS))
    assert (search.held, search.end) == (4, 4)
    assert np.array_equal(found_bodies(search), kept)
    assert np.array_equal(found_bodies(find(other, passage("c", TOKENS), first=2)), kept[2:])
    assert one.load.kept_tokens == 128 and other.load.kept_tokens == 0


def test_only_the_beginning_that_two_requests_share_is_found(one: Tier, other: Tier) -> None:
    kept = bodies(2, 4)
    begins, ends = [*range(64)], [*range(300, 364)]
    keep(one, passage("a", begins + ends), kept)
    shared = find(other, passage("b", begins + ends[::-1]))
    assert shared.held == 2 and np.array_equal(found_bodies(shared), kept[:2])
    assert find(other, passage("c", ends + begins)).chunks is None
    assert find(other, passage("d", begins + ends[::-1]), first=2).chunks is None


def test_kv_of_another_version_or_another_model_is_never_found(tier_process: TierProcess, one: Tier) -> None:
    tokens = [7] * 64
    keep(one, passage("a", tokens, version=17), bodies(3, 2))
    assert find(one, passage("b", tokens, version=17)).held == 2
    for version in (0, 1, 16, 18, 171):
        assert find(one, passage(f"b{version}", tokens, version)).held == 0
    changed = replace(SHAPE, fingerprint="of another model")
    with opened(tier_process.endpoint, changed) as stranger:
        assert find(stranger, passage("c", tokens, 17, changed)).held == 0


def test_an_engine_whose_chunks_have_another_size_uses_no_tier(
    tier_process: TierProcess, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(tier_process.endpoint, replace(SHAPE, block_tokens=64, chunk_tokens=64), 1 << 20)
    assert not tier.up.wait(2 * TIMEOUT_S) and find(tier, passage("a", TOKENS)).held is None
    tier.close()
    assert "its chunks have 32 tokens, this engine's 64" in caplog.text


def test_what_is_there_is_not_kept_again(one: Tier, other: Tier) -> None:
    tokens = [8] * 96
    keep(one, passage("a", tokens[:64]), bodies(4, 2))
    keep(other, passage("b", tokens), bodies(5, 3))
    assert (one.load.kept_tokens, other.load.kept_tokens) == (64, 32)
    assert np.array_equal(found_bodies(find(one, passage("c", tokens)))[:2], bodies(4, 2))


def test_a_chunk_whose_writer_died_before_it_was_written_is_not_taken(tier_process: TierProcess, one: Tier) -> None:
    """LMCache shows such a chunk to readers as soon as it forgets the writer."""
    tokens = [9] * 64
    connection = TierConnection(tier_process.endpoint, WAIT_S)
    connection.call("register_kv_cache_engine_driven_context", registration(5, SHAPE.name, 32, SHAPE.sealed_bytes))
    prepared = connection.call("prepare_store", key_of(SHAPE.name, salt_of(1), tokens, 0, 64, "dead"), 5)
    assert len(prepared["context"]["slots"]) == 2
    connection.call("unregister_kv_cache_engine_driven_context", 5)
    connection.close()
    search = find(one, passage("a", tokens))
    assert search.held == 2, "LMCache does show it"
    assert search.chunks is None and one.load.damaged_chunks == 1


def test_a_chunk_that_was_damaged_ends_what_is_found(one: Tier, other: Tier) -> None:
    tokens = [10] * 96
    kept = bodies(6, 3)
    keep(one, passage("a", tokens), kept)
    wanted = passage("b", tokens)
    damaged = replace(wanted, digests=[*wanted.digests[:1], b"\0" * 16, *wanted.digests[2:]])
    assert np.array_equal(found_bodies(find(other, damaged)), kept[:1])
    assert other.load.damaged_chunks == 1


def test_nobody_but_this_user_can_reach_the_server(tier_process: TierProcess) -> None:
    assert tier_process.process is not None
    listening = psutil.Process(tier_process.process.pid).net_connections("inet")
    assert [each for each in listening if each.status == psutil.CONN_LISTEN] == []
    assert server.socket_of(tier_process.folder).stat().st_mode & 0o077 == 0
    connection = TierConnection(tier_process.endpoint, TIMEOUT_S)
    assert connection.call("ping", 1) is True
    connection.close()


def test_a_server_that_does_not_know_the_worker_any_more_gets_to_know_it(tier_process: TierProcess, one: Tier) -> None:
    """It was replaced, or has forgotten a worker that stood still. It does not say so: it gives no answer."""
    tokens = [11] * 64
    connection = TierConnection(tier_process.endpoint, WAIT_S)
    connection.call("unregister_kv_cache_engine_driven_context", one.instance)
    connection.close()
    keep(one, passage("a", tokens), bodies(7, 2))
    assert one.up.wait(WAIT_S) and (one.opened, one.load.losses, one.load.kept_tokens) == (2, 1, 0)
    keep(one, passage("b", tokens), bodies(7, 2))
    assert np.array_equal(found_bodies(find(one, passage("c", tokens))), bodies(7, 2))


def test_a_server_that_stands_still_holds_nobody_up(tier_process: TierProcess, one: Tier) -> None:
    with tier_process.stopped():
        began_s = time.monotonic()
        assert find(one, passage("a", TOKENS)).held is None
        assert time.monotonic() - began_s < 2 * TIMEOUT_S
        assert find(one, passage("b", TOKENS)).held is None and one.room(1) is None, "it is not asked again"
    assert one.up.wait(WAIT_S)
    assert find(one, passage("c", TOKENS)).held is not None


def test_a_full_tier_forgets_what_was_used_least_recently(tier_process: TierProcess) -> None:
    """The chunks of versions that nobody asks for any more."""
    shape = replace(SHAPE, layers=(("layer", 512 << 10),))
    with opened(tier_process.endpoint, shape) as tier:
        for version in range(20):
            wanted = passage(f"v{version}", [version + 1] * 128, version, shape)
            before, ends_s = tier.load.kept_tokens, time.monotonic() + WAIT_S
            while tier.load.kept_tokens < before + 128:  # it makes room beside, and takes nothing until there is some
                assert time.monotonic() < ends_s
                keep(tier, wanted, bodies(version, 4, shape))
            tier.end(wanted.session)
        assert find(tier, passage("oldest", [1] * 128, 0, shape)).held == 0
        newest = find(tier, passage("newest", [20] * 128, 19, shape))
        assert np.array_equal(found_bodies(newest), bodies(19, 4, shape))


def test_a_server_that_is_killed_is_a_tier_in_which_nothing_is_found(tier_process: TierProcess, one: Tier) -> None:
    keep(one, passage("a", TOKENS), bodies(1, 4))
    tier_process.kill()
    began_s = time.monotonic()
    assert find(one, passage("b", TOKENS)).held is None
    assert time.monotonic() - began_s < 2 * TIMEOUT_S
    assert not one.up.is_set() and one.load.losses == 1
    assert one.room(1) is None and find(one, passage("c", TOKENS)).held is None
    tier_process.start()
    assert one.up.wait(WAIT_S) and one.opened == 2
    assert find(one, passage("d", TOKENS)).held == 0, "it is a new server"
    keep(one, passage("e", TOKENS), bodies(1, 4))
    assert find(one, passage("f", TOKENS)).held == 4


def test_a_server_that_is_asked_to_end_leaves_nothing_behind(tier_process: TierProcess) -> None:
    segment = Path("/dev/shm", server.SEGMENT_PREFIX + server.segment_of(tier_process.folder))
    assert segment.exists()
    assert tier_process.stop() == 0
    assert not segment.exists()
