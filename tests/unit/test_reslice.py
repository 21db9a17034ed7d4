"""KV heads cut and joined between shards: no byte is lost, moved elsewhere, or made up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.checksum import Seal, digest_with
from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.layout import blocks_for, check_consistent, check_layout
from dora.kvtransfer.reslice import resharded, resliced, shard_name
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot, Pieces
from tests.refusals import data_words, refused

HEAD_BYTES = 12
BLOCK_TOKENS = 4
LAYERS = ("layers.0.attn", "layers.1.attn")
COUNTS = st.sampled_from([1, 2, 4, 8])  # of shards; 8 heads are divided by each


def whole(heads: int = 8, tokens: int = 11, seed: int = 0) -> KvSnapshot:
    """A snapshot in one shard, each layer in one piece of random bytes."""
    size = heads * HEAD_BYTES
    layout = KvLayout(
        "f", "cpu", "float32", BLOCK_TOKENS, tuple((name, size) for name in LAYERS), interiors=((heads, ()),) * 2
    )
    random = np.random.default_rng(seed)
    count = blocks_for(tokens, BLOCK_TOKENS)
    blocks = {name: [random.integers(0, 256, (count, size), np.uint8)] for name in LAYERS}
    request = RequestSpec("r", 1, tuple(range(tokens)), SamplingParams(temperature=0.0), (5,), (-1.0,))
    return KvSnapshot(layout, request, tokens, 0, blocks)


def sharded(snapshot: KvSnapshot, shards: int) -> KvSnapshot:
    """Returns the snapshot that ranks of so many shards have, made head by head."""
    layout = resharded(snapshot.layout, shards)
    blocks: dict[str, Pieces] = {}
    for name in LAYERS:
        (piece,) = snapshot.blocks[name]
        heads = piece.reshape(len(piece), -1, HEAD_BYTES)
        for shard, part in enumerate(np.split(heads, shards, axis=1)):
            blocks[shard_name(name, shard, shards)] = [np.ascontiguousarray(part).reshape(len(piece), -1)]
    return replace(snapshot, layout=layout, blocks=blocks)


def in_pieces(snapshot: KvSnapshot, cuts: list[int]) -> KvSnapshot:
    """The same, each layer in as many pieces as a copy in rounds leaves."""
    return replace(
        snapshot,
        blocks={
            name: [part for part in np.split(pieces[0], sorted(set(cuts))) if len(part)]
            for name, pieces in snapshot.blocks.items()
        },
    )


def bytes_of(snapshot: KvSnapshot) -> dict[str, bytes]:
    return {name: np.concatenate(list(pieces)).tobytes() for name, pieces in snapshot.blocks.items()}


@given(found=COUNTS, wanted=COUNTS, cuts=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 99))
def test_any_shards_are_made_of_any_others_and_back(found: int, wanted: int, cuts: list[int], seed: int) -> None:
    original = whole(seed=seed)
    made = resliced(in_pieces(sharded(original, found), cuts), wanted)
    assert bytes_of(made) == bytes_of(sharded(original, wanted))
    assert made.layout == sharded(original, wanted).layout
    check_consistent(made)
    back = resliced(made, found)
    assert bytes_of(back) == bytes_of(sharded(original, found))
    assert back.layout == sharded(original, found).layout


Shard = tuple[str, int]  # its name, and bytes: of a block in a layout, or all that it has in a body


def changed(shards: list[Shard], what: str, first: int, second: int) -> list[Shard]:
    """Two different shards are chosen; the first of them is not as it was."""
    made = list(shards)
    if what == "missing":
        del made[first]
    elif what == "doubled":
        made.insert(second, made[first])
    elif what == "swapped":
        made[first], made[second] = made[second], made[first]
    elif what == "another's":
        made[first] = made[second]
    else:
        name, size = made[first]
        made[first] = name, size * 2 if what == "longer" else size // 2
    return made


CHANGED = st.sampled_from(["missing", "doubled", "swapped", "another's", "longer", "shorter"])
PLACES = st.permutations(range(4)).map(lambda places: places[:2])


@given(ours=COUNTS, shards=st.sampled_from([2, 4]), what=CHANGED, places=PLACES)
def test_a_head_of_other_shards_than_its_layout_has_fits_no_engine(
    ours: int, shards: int, what: str, places: list[int]
) -> None:
    """Its table of shards, in the order of the body, is the locator of each; none is written before it is checked."""
    expected, sent = resharded(whole().layout, ours), resharded(whole().layout, shards)
    check_layout(sent, expected)
    layers = changed(list(sent.layers), what, *places)
    extra = len(layers) - len(sent.layers)
    interiors = (*sent.interiors, *sent.interiors[:extra])[: len(layers)]
    with pytest.raises(SnapshotRefused) as caught:
        check_layout(replace(sent, layers=tuple(layers), interiors=interiors), expected)
    assert caught.value.field in ("layout.shards", "layout.layers", "layout.interiors")


@given(shards=st.sampled_from([2, 4]), what=CHANGED, places=PLACES, chunk_bytes=st.integers(1, 4096), data=st.data())
def test_shards_travel_rank_by_rank_and_one_that_is_not_as_it_was_voids_all(
    shards: int, what: str, places: list[int], chunk_bytes: int, data: st.DataObject
) -> None:
    """In one body, under the sums of its chunks: whatever has become of a shard, length or sums say so."""
    sent = sharded(whole(seed=data.draw(st.integers(0, 9))), shards)
    head, body = head_of(sent), b"".join(round_of(sent))
    assert bytes_of(snapshot_of(head, body)) == bytes_of(sent)
    digest = digest_with("xxh3", b"")
    chunks = (body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes))
    seal = Seal("xxh3", chunk_bytes, tuple(digest([chunk]) for chunk in chunks))
    assert not seal.damaged(memoryview(body), b"")
    held = bytes_of(sent)
    parts = changed([(name, len(held[name])) for name, _ in sent.layout.layers], what, *places)
    made = b"".join((held[name] * 2)[:size] for name, size in parts)
    assert seal.damaged(memoryview(made), b"")
    if len(made) != len(body):
        with refused(SnapshotRefused, field="body bytes", value=len(made)):
            snapshot_of(head, made)


def test_layouts_that_differ_in_shards_alone_agree() -> None:
    ours = whole().layout
    for shards in (1, 2, 8):
        check_layout(resharded(ours, shards), ours)
        check_layout(ours, resharded(ours, shards))


def test_what_cannot_be_cut_between_heads_is_refused_with_the_reason() -> None:
    packed = replace(whole().layout, interiors=())
    with refused(LayoutMisfit, names=("1", "2")):
        resharded(packed, 2)
    for shards in (3, 16):
        with refused(LayoutMisfit, names=("layers.0.attn", "8")):
            resharded(whole().layout, shards)
    odd = replace(whole().layout, layers=tuple((name, 97) for name in LAYERS))
    with refused(LayoutMisfit, field="layout.shards", value=1, names=(LAYERS[0], 2)):
        resharded(odd, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"shards": 0},
        {"shards": 2},
        {"shards": 1 << 40},
        {"interiors": ((8, ()),)},
        {"windows": (0, 8, 8)},
        {"shards": 2, "layers": (("a@0", 8), ("a@1", 16))},
        {"shards": 2, "layers": (("a@0", 8), ("a@1", 8)), "windows": (0, 8)},
        {"shards": 2, "layers": (("a@0", 8), ("a@1", 8)), "interiors": ((1, ()), (2, ()))},
        {"shards": 2, "layers": (("a@0", 8), ("a@1", 8), ("b@0", 8), ("a@2", 8)), "interiors": ((1, ()),) * 4},
        {"shards": 2, "layers": (("@0", 8), ("a@1", 8))},
        {"shards": 2, "layers": (("a@1", 8), ("a@0", 8))},
    ],
)
def test_a_layout_whose_shards_are_not_there_is_refused(change: dict[str, object]) -> None:
    layout = replace(whole().layout, **change)
    with refused(SnapshotRefused, names=data_words("layout.shards")):
        resharded(layout, 4)
