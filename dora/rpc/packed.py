"""Prompt groups in columns on the wire, which let a trainer receive fifty thousand responses a second.

A packed group is a TrajectoryGroup like any other. Its tokens stay as received, or as the response buffer has them,
until they are accessed: the service joins the buffer's bytes into a message, and the client reads them from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dora.data.trajectory import (
    DECLARED,
    BoolArray,
    Decoder,
    Float64Array,
    Int32Array,
    Int64Array,
    Trajectory,
    TrajectoryGroup,
)
from dora.errors import InvalidValue
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import MAX_MESSAGE_BYTES, PACKED_BYTES
from dora.rpc.packed_columns import COLUMNS, DEFAULTS, FOLLOWING, LENGTHS, equal, packed_message

# as the response buffer and TrajectoryBatch.tokens hold it
TOKEN: Final = np.dtype([("token_id", "<i4"), ("logprob", "<f4")])
Content = bytes | bytearray | memoryview

_ARRAYS: Final = {"response_token_ids": "token_id", "logprobs": "logprob"}  # in TOKEN
_ENVELOPE_BYTES: Final = 64  # of a batch, around its content
_TOKENS_FIELD: Final = pb.TrajectoryBatch.DESCRIPTOR.fields_by_name["tokens"].number
_BY_LENGTH: Final = 2  # protobuf's wire type of bytes, texts and messages
_TOKENS_TAG: Final = bytes([_TOKENS_FIELD << 3 | _BY_LENGTH])


class PackedGroup(TrajectoryGroup):
    """A group whose responses are created on access; everything else is read from its columns."""

    def __init__(self, message: pb.PackedGroup, tokens: Sequence[Content], decoder: Decoder | None = None) -> None:
        """``tokens`` has each response's TOKENs, which must not change. Raises InvalidValue if malformed."""
        responses = len(message.trajectory_ids)
        for name, is_rare in LENGTHS:
            count = len(getattr(message, name))
            if count != responses and (count or not is_rare):
                raise InvalidValue(f"group {message.group_id}: {name}", count, f"one of each of {responses} responses")
        if sum(message.segments) != len(message.worker_history):
            allowed = f"{sum(message.segments)}, as segments say"
            raise InvalidValue(f"group {message.group_id}: worker_history", len(message.worker_history), allowed)
        if [len(content) for content in tokens] != [TOKEN.itemsize * length for length in message.length_tokens]:
            raise InvalidValue(f"group {message.group_id}: tokens", "other ones", "as many as length_tokens says")
        object.__setattr__(self, "group_id", message.group_id)
        object.__setattr__(self, "message", message)
        object.__setattr__(self, "contents", tokens)
        object.__setattr__(self, "_decoder", decoder)

    message: pb.PackedGroup
    contents: Sequence[Content]
    _decoder: Decoder | None

    def __reduce__(self) -> tuple[type[TrajectoryGroup], tuple[str, tuple[Trajectory, ...]]]:
        return TrajectoryGroup, (self.group_id, self.trajectories)

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(self._trajectories())

    def __len__(self) -> int:
        return len(self.message.trajectory_ids)

    @property
    def prompt_id(self) -> str:
        return self.message.prompt_id

    @property
    def prompt_token_ids(self) -> Int32Array:
        return np.frombuffer(self.message.prompt_token_ids, "<i4").astype(np.int32)

    @property
    def rewards(self) -> Float64Array:
        return np.array(self.message.rewards, np.float64)

    @property
    def rewards_valid(self) -> BoolArray:
        return np.array(self.message.rewards_valid, np.bool_) & np.isfinite(self.rewards)

    @property
    def sessions(self) -> Int64Array:
        return np.array(self.message.sample_indexes, np.int64)

    @property
    def versions(self) -> Int64Array:
        return np.full(len(self), self.message.behaviour_version, np.int64)

    @property
    def staleness(self) -> Int64Array:
        return np.full(len(self), self.message.trained_step - self.message.behaviour_version, np.int64)

    @property
    def lengths(self) -> Int64Array:
        return np.array(self.message.length_tokens, np.int64)

    def _padded(self, name: str, dtype: npt.DTypeLike, pad: int) -> npt.NDArray[Any]:
        lengths = list(self.message.length_tokens)
        padded = np.empty((len(lengths), max(lengths, default=0)), dtype)
        for row, length in enumerate(lengths):
            padded[row, :length] = 1 if name == "loss_mask" else self._column(row, name)
            padded[row, length:] = pad
        return padded

    def _column(self, index: int, name: str) -> npt.NDArray[Any]:
        return np.frombuffer(self.contents[index], TOKEN)[_ARRAYS[name]]

    def _trajectories(self) -> Iterator[Trajectory]:
        columns = {name: column.read(self.message) for name, column in COLUMNS.items()}
        rows = zip(range(len(self)), *columns.values(), strict=False)  # some repeat one value indefinitely
        for index, *row in rows:
            values = dict(zip(columns, row, strict=True))
            tokens = np.frombuffer(self.contents[index], TOKEN)
            for name, column in _ARRAYS.items():
                values[name] = tokens[column]
            for name, follows in FOLLOWING.items():
                values[name] = follows(values)
            yield Trajectory(**values, decoder=self._decoder)


def pack(group: TrajectoryGroup) -> PackedGroup | None:
    """Returns the group in columns, or None if they cannot hold all of it."""
    members = group.trajectories
    if not members or not all(map(_follows, members)):
        return None
    columns = {name: [getattr(each, name) for each in members] for name in COLUMNS}
    if not all(column.fits(columns[name]) for name, column in COLUMNS.items()):
        return None
    contents = []
    for each in members:
        tokens = np.empty(each.length_tokens, TOKEN)
        for name, column_name in _ARRAYS.items():
            tokens[column_name] = getattr(each, name)
        contents.append(tokens.tobytes())
    return PackedGroup(packed_message(members, attrgetter), contents)


def _follows(trajectory: Trajectory) -> bool:
    values = {name: getattr(trajectory, name) for name in DECLARED}
    return all(equal(values[name], follows(values)) for name, follows in FOLLOWING.items()) and all(
        equal(values[name], default) for name, default in DEFAULTS.items()
    )


# ------------------------------------------------------------------------------------------------------------ messages


def packed_batches(
    step: int,
    groups: Iterable[TrajectoryGroup],
    *,
    batch_bytes: int = PACKED_BYTES,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Iterator[bytes | pb.TrajectoryBatch]:
    """Does as :func:`dora.rpc.convert.trajectory_batches`. Packed groups become bytes of messages, others messages.

    Raises LimitExceeded for a trajectory over the limit.
    """
    held: list[PackedGroup] = []
    held_bytes = 0
    for group in groups:
        size_bytes = _size_bytes(group)
        if held and (size_bytes is None or held_bytes + size_bytes > min(batch_bytes, max_message_bytes)):
            yield _joined(step, held)
            held, held_bytes = [], 0
        if isinstance(group, PackedGroup) and size_bytes is not None and size_bytes <= max_message_bytes:
            held.append(group)
            held_bytes += size_bytes
        else:
            yield from convert.trajectory_batches(step, [group], max_message_bytes=max_message_bytes)
    if held:
        yield _joined(step, held)


def _size_bytes(group: TrajectoryGroup) -> int | None:
    if not isinstance(group, PackedGroup):
        return None
    return group.message.ByteSize() + sum(map(len, group.contents)) + _ENVELOPE_BYTES


def _joined(step: int, groups: Sequence[PackedGroup]) -> bytes:
    """Returns the message as protobuf would serialise it, but copies its tokens only once."""
    head = pb.TrajectoryBatch(step=step, packed=[group.message for group in groups]).SerializeToString()
    contents = [content for group in groups for content in group.contents]
    return b"".join([head, _TOKENS_TAG, _varint(sum(map(len, contents))), *contents])


def split(content: bytes) -> tuple[pb.TrajectoryBatch, memoryview]:
    """Returns a batch without its tokens, and the tokens as a view of ``content``. Raises DecodeError if malformed."""
    view, at, tokens = memoryview(content), 0, memoryview(b"")
    rest: list[memoryview] = []
    begun = 0
    while at < len(content):
        tag, begin = _read_varint(content, at)
        if tag & 7 != _BY_LENGTH:
            if tag & 7:
                break  # no field of this message: protobuf says what is wrong, or leaves it out
            at = _read_varint(content, begin)[1]
            continue
        length, begin = _read_varint(content, begin)
        if tag >> 3 == _TOKENS_FIELD and begin + length <= len(content):
            tokens = view[begin : begin + length]
            rest.append(view[begun:at])
            begun = begin + length
        at = begin + length
    return pb.TrajectoryBatch.FromString(b"".join([*rest, view[begun:]])), tokens


def packed_groups(batch: pb.TrajectoryBatch, tokens: memoryview, decoder: Decoder | None = None) -> list[PackedGroup]:
    """Returns the groups of :func:`split`'s result. Raises InvalidValue if the tokens do not match the groups."""
    groups, at = [], 0
    for message in batch.packed:
        contents = []
        for length in message.length_tokens:
            contents.append(tokens[at : at + TOKEN.itemsize * length])
            at += TOKEN.itemsize * length
        groups.append(PackedGroup(message, contents, decoder))
    if at != len(tokens):
        raise InvalidValue("tokens: bytes", len(tokens), f"{at}, of the groups with them")
    return groups


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Returns the number and its end, which is beyond the content if that is cut."""
    value = shift = 0
    while at < len(content):
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    return value, at + 1
