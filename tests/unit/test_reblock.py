"""Blocks of another size, and layers with a window: exactly the same bytes of each token, or a refusal."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import LayoutMisfit
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.layout import block_counts, blocks_for, body_bytes_most, check_layout, first_block
from dora.kvtransfer.reblock import reblocked
from dora.kvtransfer.reslice import resharded
from dora.kvtransfer.snapshot import Interior, KvLayout, KvSnapshot
from tests.refusals import refused

LATENT: Interior = (1, ((1, 18),))  # MLA: one row a token
PACKED: Interior = (2, ((4, 2), (1, 8)))  # vLLM's CPU attention: of each of two heads (size, tokens), (tokens, size)
HEADS: Interior = (3, ((1, 12),))  # heads outside, tokens inside
TOKENS: Interior = (1, ((2, 6), (1, 5)))
INTERIORS = st.sampled_from([LATENT, PACKED, HEADS, TOKENS])


def layout_with(block_tokens: int, interiors: Sequence[Interior], windows: Sequence[int] = ()) -> KvLayout:
    layers = tuple(
        (f"layer.{number}", block_tokens * times * sum(outer * inner for outer, inner in strips))
        for number, (times, strips) in enumerate(interiors)
    )
    return KvLayout("f", "cpu", "float32", block_tokens, layers, windows=tuple(windows), interiors=tuple(interiors))


def in_blocks(tokens: np.ndarray, interior: Interior, block_tokens: int, first: int) -> np.ndarray:
    """``tokens``: (tokens, bytes of one); its blocks from ``first`` on, filled one value after the other."""
    times, strips = interior
    count = blocks_for(len(tokens), block_tokens)
    blocks = np.zeros((count, block_tokens * tokens.shape[1]), np.uint8)
    for position, row in enumerate(tokens):
        block, slot = divmod(position, block_tokens)
        at = taken = 0
        for _ in range(times):
            for outer, inner in strips:
                for line in range(outer):
                    start = at + (line * block_tokens + slot) * inner
                    blocks[block, start : start + inner] = row[taken : taken + inner]
                    taken += inner
                at += outer * block_tokens * inner
    return blocks[first:]


def snapshot_in(layout: KvLayout, kv_tokens: int, seed: int) -> KvSnapshot:
    """The same KV for the same seed, whatever the size of a block."""
    request = RequestSpec("r", 1, (1,) * kv_tokens, SamplingParams(temperature=0.0), (2,), (-1.0,))
    generator = np.random.default_rng(seed)
    blocks = {}
    for (name, size), interior in zip(layout.layers, layout.interiors, strict=True):
        tokens = generator.integers(1, 256, (kv_tokens, size // layout.block_tokens), np.uint8)
        window = layout.windowed.get(name, 0)
        tokens[: max(0, kv_tokens + 1 - window) if window else 0] = 0  # nobody reads these
        first = first_block(kv_tokens, layout.block_tokens, window)
        blocks[name] = [in_blocks(tokens, interior, layout.block_tokens, first)]
    return KvSnapshot(layout, request, kv_tokens, 0, blocks)


@given(
    interiors=st.lists(INTERIORS, min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    kv_tokens=st.integers(1, 150),
    window=st.just(0) | st.integers(2, 60),
    seed=st.integers(0, 99),
)
def test_every_token_is_where_the_other_size_has_it(
    interiors: list[Interior], sizes: tuple[int, int], kv_tokens: int, window: int, seed: int
) -> None:
    windows = [window, *[0] * (len(interiors) - 1)] if window else []
    given_layout, wanted = (layout_with(size, interiors, windows) for size in sizes)
    found = reblocked(snapshot_in(given_layout, kv_tokens, seed), wanted)
    expected = snapshot_in(wanted, kv_tokens, seed)
    assert found.layout == wanted
    for name, pieces in expected.blocks.items():
        np.testing.assert_array_equal(np.concatenate(found.blocks[name]), pieces[0])
    head_of(found)  # it is consistent


@given(kv_tokens=st.integers(1, 200), block_tokens=st.integers(1, 40), window=st.integers(2, 80), data=st.data())
def test_a_window_travels_in_the_last_round_alone(
    kv_tokens: int, block_tokens: int, window: int, data: st.DataObject
) -> None:
    layout = layout_with(block_tokens, [LATENT, PACKED], [0, window])
    snapshot = snapshot_in(layout, kv_tokens, 1)
    count = blocks_for(kv_tokens, block_tokens)
    ends = sorted(data.draw(st.sets(st.integers(1, count), max_size=5)) | {count})
    rounds = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    bodies = [b"".join(round_of(snapshot, end - size, end)) for size, end in zip(rounds, ends, strict=True)]
    assert [len(body) for body in bodies[:-1]] == [size * layout.layers[0][1] for size in rounds[:-1]]
    found = snapshot_of(head_of(snapshot, rounds), *bodies)
    for name, (piece,) in snapshot.blocks.items():
        np.testing.assert_array_equal(np.concatenate(found.blocks[name]), piece)
    kept = block_counts(layout, kv_tokens, count)[1]
    assert kept * block_tokens <= window + 2 * block_tokens, "what is read, and no more"


def test_layers_that_all_have_a_window_move_in_one_round() -> None:
    layout = layout_with(4, [LATENT, HEADS], [9, 9])
    snapshot = snapshot_in(layout, 50, 1)
    body = b"".join(round_of(snapshot))
    assert len(body) == 3 * layout.block_bytes  # tokens 42 to 50
    assert snapshot_of(head_of(snapshot), body).kv_tokens == 50


@given(
    shards=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.just(0) | st.integers(2, 60),
    seed=st.integers(0, 99),
)
def test_shards_and_sizes_are_made_together(
    shards: tuple[int, int], sizes: tuple[int, int], window: int, seed: int
) -> None:
    interiors: list[Interior] = [(4, PACKED[1]), (8, HEADS[1])]
    given_layout, wanted = (layout_with(size, interiors, [window, 0] if window else ()) for size in sizes)
    sent, expected = (
        reblocked(snapshot_in(layout, 70, seed), resharded(layout, count))
        for layout, count in zip((given_layout, wanted), shards, strict=True)
    )
    found = reblocked(sent, expected.layout)
    assert found.layout == expected.layout and found.layout.shards == shards[1]
    for name, pieces in expected.blocks.items():
        np.testing.assert_array_equal(np.concatenate(found.blocks[name]), np.concatenate(pieces))
    read = snapshot_of(head_of(found), b"".join(round_of(found)))
    assert reblocked(read, wanted).layout == wanted


def test_what_cannot_be_made_exactly_is_refused_with_the_field() -> None:
    ours = layout_with(8, [PACKED, LATENT])
    theirs = layout_with(4, [PACKED, LATENT])
    check_layout(theirs, ours)
    packed = replace(theirs, interiors=tuple((times, ()) for times, _ in theirs.interiors))
    short = replace(theirs, layers=(theirs.layers[0], ("layer.1", 71)))
    for found, expected, field in (
        (replace(theirs, interiors=()), replace(ours, interiors=()), "block_tokens"),
        (packed, replace(ours, interiors=packed.interiors), "block_tokens"),
        (packed, replace(packed, shards=2), "shards"),
        (replace(theirs, interiors=(HEADS, LATENT)), ours, "block_tokens"),
        (replace(theirs, windows=(0, 16)), ours, "windows"),
        (replace(theirs, backend="cuda/flash"), ours, "backend"),
        (replace(theirs, dtype="bfloat16"), ours, "dtype"),
        (replace(theirs, layers=(*theirs.layers[:1], ("layer.9", theirs.layers[1][1]))), ours, "block_tokens"),
        (short, ours, "block_tokens"),
        (layout_with(2048, [PACKED, LATENT]), ours, "block_tokens"),
    ):
        with refused(LayoutMisfit, names=(field,)):
            check_layout(found, expected)


@given(tokens=st.integers(1, 5000), ours=st.integers(1, 64), theirs=st.integers(1, 1024))
def test_a_reservation_has_room_for_blocks_of_any_size_that_fits(tokens: int, ours: int, theirs: int) -> None:
    wanted, found = layout_with(ours, [PACKED, LATENT]), layout_with(theirs, [PACKED, LATENT])
    assert body_bytes_most(wanted, tokens) >= blocks_for(tokens, theirs) * found.block_bytes
