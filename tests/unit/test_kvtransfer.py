"""The snapshot's wire format and its checks."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, replace

import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.codec import MAGIC, closing_of, head_of, opening_in, opening_of, round_of, snapshot_of
from dora.kvtransfer.layout import blocks_for, check_consistent, check_layout
from dora.kvtransfer.manifest import CLOSING, OPENING
from dora.kvtransfer.snapshot import SCHEMA, KvLayout, KvSnapshot
from tests.refusals import data_words, refused

LAYOUT = KvLayout("f" * 64, "cpu/vec", "float32", 4, (("layer.0", 96), ("layer.1", 40)))
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(tuple)


@st.composite
def snapshots(draw: st.DrawFn) -> KvSnapshot:
    outputs = draw(TOKENS)
    logprobs = tuple(draw(st.lists(st.floats(-100, 0), min_size=len(outputs), max_size=len(outputs))))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7])),
        seed=draw(st.integers(0, 2**63 - 1)),
        stop_token_ids=draw(TOKENS),
        stop=tuple(draw(st.lists(st.text(max_size=9), max_size=3))),
        ignore_eos=draw(st.booleans()),
    )
    request = RequestSpec(
        draw(st.text(max_size=40)), draw(st.integers(0, 2**40)), draw(TOKENS), sampling, outputs, logprobs
    )
    kv_tokens = len(request.prompt_token_ids) + len(outputs) - 1
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = blocks_for(kv_tokens, LAYOUT.block_tokens)
    blocks = {name: [generator.integers(0, 256, (count, size), np.uint8)] for name, size in LAYOUT.layers}
    return KvSnapshot(LAYOUT, request, kv_tokens, len(outputs) if sampling.temperature else 0, blocks)


def make_snapshot() -> KvSnapshot:
    request = RequestSpec("r1", 7, (1, 2, 3), SamplingParams(seed=5), (4, 5, 6), (-0.5, -1.25, -0.1))
    blocks = {name: [np.full((2, size), 9, np.uint8)] for name, size in LAYOUT.layers}
    return KvSnapshot(LAYOUT, request, 5, 3, blocks)


def body_of(snapshot: KvSnapshot, rounds: Sequence[int]) -> bytes:
    """Rounds of so many blocks, in a row."""
    body, first = b"", 0
    for count in rounds:
        body += b"".join(round_of(snapshot, first, first + count))
        first += count
    return body


def in_pieces(snapshot: KvSnapshot, cuts: Sequence[int]) -> KvSnapshot:
    """The same snapshot, its blocks cut up at these places."""
    blocks = {name: np.split(pieces[0], sorted(cuts)) for name, pieces in snapshot.blocks.items()}
    return replace(snapshot, blocks=blocks)


@given(snapshots(), st.data())
def test_a_snapshot_survives_the_wire_in_any_rounds_and_pieces(snapshot: KvSnapshot, data: st.DataObject) -> None:
    count = blocks_for(snapshot.kv_tokens, LAYOUT.block_tokens)
    ends = sorted(data.draw(st.sets(st.integers(1, count))) | {count})
    rounds = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    cut_up = in_pieces(snapshot, data.draw(st.lists(st.integers(0, count), max_size=4)))
    found = snapshot_of(head_of(cut_up, rounds), body_of(cut_up, rounds))
    assert (found.layout, found.request) == (snapshot.layout, snapshot.request)
    assert (found.kv_tokens, found.rng_draws) == (snapshot.kv_tokens, snapshot.rng_draws)
    for name, pieces in snapshot.blocks.items():
        assert len(found.blocks[name]) == len(rounds)
        np.testing.assert_array_equal(np.concatenate(found.blocks[name]), pieces[0])


def test_nothing_is_copied_and_what_was_read_cannot_be_written() -> None:
    snapshot = make_snapshot()
    shown = round_of(snapshot)
    assert all(np.shares_memory(np.frombuffer(part, np.uint8), snapshot.blocks[name][0])
               for part, (name, _) in zip(shown, LAYOUT.layers, strict=True))  # fmt: skip
    body = np.frombuffer(b"".join(shown), np.uint8)
    for pieces in snapshot_of(head_of(snapshot), body).blocks.values():
        assert np.shares_memory(pieces[0], body) and not pieces[0].flags.writeable


@given(st.data())
def test_one_flipped_bit_anywhere_in_a_head_is_refused(data: st.DataObject) -> None:
    snapshot = make_snapshot()
    head = bytearray(head_of(snapshot))
    head[data.draw(st.integers(0, len(head) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotRefused):
        snapshot_of(head, b"".join(round_of(snapshot)))


@given(st.data())
def test_a_piece_of_a_snapshot_is_refused(data: st.DataObject) -> None:
    snapshot = make_snapshot()
    head, body = head_of(snapshot), b"".join(round_of(snapshot))
    with pytest.raises(SnapshotRefused):
        snapshot_of(head[: data.draw(st.integers(0, len(head) - 1))], body)
    piece = body[: data.draw(st.integers(0, len(body) - 1))]
    with refused(SnapshotRefused, field="body bytes", value=len(piece)):
        snapshot_of(head, piece)


def test_each_refusal_names_its_field() -> None:
    snapshot = make_snapshot()
    head, body = head_of(snapshot), b"".join(round_of(snapshot))
    for damaged, field, value in (
        (b"", "head bytes", 0),
        (b"GARBAGE!" + head[8:], "magic", b"GARBAGE!"),
        (head[:8] + struct.pack("<I", SCHEMA + 1) + head[12:], "schema", SCHEMA + 1),
        (head[:-1] + b"\1", "checksum", None),
    ):
        with refused(SnapshotRefused, field=field, value=value):
            snapshot_of(damaged, body)
    with refused(SnapshotRefused, field="body bytes", value=len(body) + 1):
        snapshot_of(head, body + b"\0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_tokens", 10**9),
        ("kv_tokens", -1),
        ("kv_tokens", "many"),
        ("rounds", []),
        ("rounds", [3, -1]),
        ("rounds", [1] * 5000),
        ("layout", {}),
        ("layout", None),
        ("layout", {**asdict(LAYOUT), "shards": "two"}),
        ("layout", {**asdict(LAYOUT), "interiors": 2}),
        ("layout", {**asdict(LAYOUT), "interiors": [["many", []]]}),
        ("sampling", {"temperature": 1.0, "stop_token_ids": []}),
        ("prompt_token_ids", b"abc"),
        ("logprobs", b""),
    ],
)
def test_a_head_with_a_right_checksum_and_wrong_content_is_refused(key: str, value: object) -> None:
    snapshot = make_snapshot()
    opening = opening_of(snapshot.layout, snapshot.request)
    parts = [msgpack.unpackb(part[48:]) for part in (opening.raw, closing_of(snapshot, opening))]
    changed = next(part for part in parts if key in part)
    changed[key] = value
    if key in parts[0]:
        parts[1]["opening"] = sealed(parts[0])[16:48]
    with pytest.raises(SnapshotRefused) as caught:
        snapshot_of(sealed(parts[0]) + sealed(parts[1]), b"".join(round_of(snapshot)))
    assert str(caught.value.field).startswith((f"head.{key}", key, f"request.{key}"))


ODD: tuple[object, ...] = (None, True, 1, 0.5, "x", b"x", [], {})


def forms(form: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """All fields of a manifest with their forms: maps, lists and what they hold."""
    yield path, form
    if isinstance(form, Mapping):
        for name, each in form.items():
            yield from forms(each, (*path, name))
    elif isinstance(form, list | tuple):
        for place, each in enumerate(form):
            yield from forms(each, (*path, place))


def fits(value: object, form: object) -> bool:
    kind = form if isinstance(form, type) else dict if isinstance(form, Mapping) else list
    return type(value) is kind or (kind is float and type(value) is int)


@pytest.mark.parametrize("part", [0, 1], ids=["opening", "closing"])
def test_a_field_of_another_type_is_refused_by_its_name(part: int) -> None:
    """A boolean is no integer, an integer no boolean, a text no list."""
    layout = replace(LAYOUT, windows=(0, 8), interiors=((1, ((1, 24),)), (1, ((1, 10),))))
    request = replace(make_snapshot().request, sampling=SamplingParams(stop=("x",), stop_token_ids=(4,)))
    snapshot = replace(make_snapshot(), layout=layout, request=request)
    opening, body = opening_of(layout, request), b"".join(round_of(snapshot))
    raw = [opening.raw, closing_of(snapshot, opening)]
    for path, form in list(forms((OPENING, CLOSING)[part]))[1:]:
        for value in (*(each for each in ODD if not fits(each, form)), MISSING):
            parts = [msgpack.unpackb(each[48:]) for each in raw]
            place = parts[part]
            for step in path[:-1]:
                place = place[step]
            if value is not MISSING:
                place[path[-1]] = value
            elif isinstance(place, list):
                continue
            else:
                del place[path[-1]]
            if part == 0:
                parts[1]["opening"] = sealed(parts[0])[16:48]
            field = ".".join(step for step in path if isinstance(step, str))
            with refused(SnapshotRefused, field=f"head.{field}"):
                snapshot_of(sealed(parts[0]) + sealed(parts[1]), body)


def sealed(manifest: dict[str, object]) -> bytes:
    text = msgpack.packb(manifest)
    preamble = struct.pack("<8sII", MAGIC, SCHEMA, len(text))
    return preamble + blake3(preamble + text).digest() + text


@given(snapshots(), st.data())
def test_an_opening_from_before_and_a_closing_are_the_whole_head(snapshot: KvSnapshot, data: st.DataObject) -> None:
    """Whatever the request had sampled when the copy began; and what was read of it before is not read again."""
    request = snapshot.request
    then = data.draw(st.integers(0, len(request.output_token_ids)))
    before = replace(request, output_token_ids=request.output_token_ids[:then], logprobs=request.logprobs[:then])
    opening = opening_of(snapshot.layout, before)
    head, body = opening.raw + closing_of(snapshot, opening), b"".join(round_of(snapshot))
    read = opening_in(opening.raw)
    assert read == opening == opening_in(head)
    for known in (None, read, opening_of(snapshot.layout, replace(before, request_id="another"))):
        found = snapshot_of(head, body, opening=known).request
        assert found == request
        assert (found.prompt_token_ids is read.request.prompt_token_ids) == (known is read and known is not None)


def test_a_closing_belongs_to_one_opening() -> None:
    snapshot = make_snapshot()
    opening, other = (opening_of(snapshot.layout, replace(snapshot.request, request_id=name)) for name in ("r", "s"))
    with refused(SnapshotRefused, field="head.opening"):
        snapshot_of(other.raw + closing_of(snapshot, opening), b"".join(round_of(snapshot)))
    for head in (opening.raw, opening.raw + closing_of(snapshot, opening) * 2):
        with refused(SnapshotRefused, field="head bytes"):
            snapshot_of(head, b"".join(round_of(snapshot)))


def test_layouts_are_compared_field_by_field() -> None:
    check_layout(LAYOUT, replace(LAYOUT))
    for change in (
        {"fingerprint": "g"},
        {"backend": "cpu/amx"},
        {"dtype": "bfloat16"},
        {"block_tokens": 8},
        {"layers": LAYOUT.layers[:1]},
        {"shards": 2},
        {"shards": 0},
    ):
        ((name, value),) = change.items()
        with refused(SnapshotRefused if name == "shards" else LayoutMisfit, field=f"layout.{name}", value=value):
            check_layout(replace(LAYOUT, **change), LAYOUT)


def test_contradictions_within_a_snapshot_are_refused_on_both_ends() -> None:
    good = make_snapshot()
    check_consistent(good)
    for change, name in (
        ({"kv_tokens": 6}, "kv_tokens = 6"),
        ({"rng_draws": 2}, "rng_draws = 2"),
        ({"request": replace(good.request, logprobs=(-1.0,))}, "logprobs"),
        ({"request": replace(good.request, output_token_ids=(), logprobs=())}, "at least one output"),
        ({"blocks": {**good.blocks, "layer.9": good.blocks["layer.0"]}}, "layer.9"),
        ({"blocks": {**good.blocks, "layer.0": [good.blocks["layer.0"][0][:1]]}}, "layer.0"),
        ({"blocks": {**good.blocks, "layer.1": [good.blocks["layer.1"][0].astype(np.int8)]}}, "int8"),
    ):
        with refused(SnapshotRefused, names=data_words(name)):
            head_of(replace(good, **change))
