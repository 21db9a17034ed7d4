"""The columns of a packed group: one for each field of a trajectory that declares one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, repeat
from typing import Any, Final, cast

import numpy as np

from dora.data.trajectory import DECLARED, Trajectory
from dora.data.trajectory_fields import Declared, Packing, ValueKind
from dora.data.types import SamplingParams, Segment
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb

_Convert = Callable[[Any], Any]


def packed_message(members: Sequence[Any], read: Callable[[str], Callable[[Any], Any]]) -> pb.PackedGroup:
    """Returns the columns of a group. ``read`` returns the function that reads a field, by name, from a member."""
    written: dict[str, Any] = {name: read(name)(members[0]) for name in _SAME_UNCHANGED}
    for name, column in _EACH_UNCHANGED.items():
        written[column] = list(map(read(name), members))
    for name, converted in _CONVERTED.items():
        written.update(converted.write(list(map(read(name), members[: converted.reads]))))
    return pb.PackedGroup(**written)


def equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """The form of one field of all responses in ``pb.PackedGroup``.

    ``write`` converts the values, one for each response, to the message's fields, and ``read`` back. ``lengths`` names
    the fields of the message that have one value for each response, or none if the column is rare.
    """

    write: Callable[[Sequence[Any]], dict[str, Any]]
    read: Callable[[pb.PackedGroup], Iterable[Any]]
    fits: Callable[[Sequence[Any]], bool] = lambda _: True
    lengths: tuple[str, ...] = ()
    reads: int | None = None  # members that it is written from; None: all
    is_rare: bool = False


def _column_of(name: str, declared: Declared) -> PackedColumn:
    if declared.packing is Packing.SAME:
        return _same(name, declared.kind)
    if declared.kind in _OWN_COLUMNS:
        return _OWN_COLUMNS[declared.kind]
    column = declared.column or name
    to_wire, from_wire = _VALUES[declared.kind]
    if declared.packing is Packing.RARE:
        return _rare(column, to_wire, from_wire, declared.empty or str)
    return PackedColumn(
        write=lambda values: {column: values if to_wire is None else list(map(to_wire, values))},
        read=lambda message: (
            getattr(message, column) if from_wire is None else map(from_wire, getattr(message, column))
        ),
        lengths=(column,),
    )


def _same(name: str, kind: ValueKind) -> PackedColumn:
    to_wire, from_wire = _VALUES[kind]

    def read(message: pb.PackedGroup) -> Iterator[Any]:
        value = getattr(message, name)
        return repeat(value if from_wire is None else from_wire(value))

    return PackedColumn(
        write=lambda values: {name: values[0] if to_wire is None else to_wire(values[0])},
        read=read,
        fits=lambda values: all(equal(value, values[0]) for value in values),
        reads=1,
    )


def _rare(column: str, to_wire: _Convert | None, from_wire: _Convert | None, empty: Callable[[], Any]) -> PackedColumn:
    nothing = empty()

    def write(values: Sequence[Any]) -> dict[str, Any]:
        if all(value == nothing for value in values):
            return {}
        return {column: values if to_wire is None else list(map(to_wire, values))}

    def read(message: pb.PackedGroup) -> Iterable[Any]:
        values = getattr(message, column)
        if not values:
            return iter(empty, _NEVER)
        return values if from_wire is None else map(from_wire, values)

    return PackedColumn(write, read, lengths=(column,), is_rare=True)


def _seedless(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, seed=0)


def _read_sampling(message: pb.PackedGroup) -> Iterator[SamplingParams]:
    sampling = convert.sampling_from_wire(message.sampling)
    return (replace(sampling, seed=seed) for seed in message.seeds)


def _read_segments(message: pb.PackedGroup) -> Iterator[tuple[Segment, ...]]:
    segments = map(convert.segment_from_wire, message.worker_history)
    return (tuple(islice(segments, count)) for count in message.segments)


def _stop_to_wire(reason: str | int | None) -> pb.StopReason:
    return pb.StopReason(**convert.stop_reason_to_wire(reason))


def _stop_from_wire(message: pb.StopReason) -> str | int | None:
    stopped_by = message.WhichOneof("stop_reason")
    return cast(str | int, getattr(message, stopped_by)) if stopped_by else None


def _array_values(dtype: np.dtype[Any]) -> tuple[_Convert, _Convert]:
    return (lambda array: np.asarray(array, dtype).tobytes()), (lambda content: np.frombuffer(content, dtype))


_NEVER: Final = object()
_VALUES: Final[
    Mapping[ValueKind, tuple[_Convert | None, _Convert | None]]
] = {  # to the wire, and from it; None: unchanged
    **dict.fromkeys(convert.UNCHANGED, (None, None)),
    **{kind: _array_values(dtype) for kind, dtype in convert.ARRAY_DTYPES.items()},
    ValueKind.NUMBERS: (
        lambda numbers: pb.RewardComponents(values=dict(numbers)),
        lambda message: dict(message.values),
    ),
    ValueKind.STOP: (_stop_to_wire, _stop_from_wire),
}
_OWN_COLUMNS: Final = {
    ValueKind.SAMPLING: PackedColumn(  # of all responses, except their seeds
        write=lambda values: {
            "sampling": convert.sampling_to_wire(values[0]),
            "seeds": [sampling.seed for sampling in values],
        },
        read=_read_sampling,
        fits=lambda values: all(_seedless(sampling) == _seedless(values[0]) for sampling in values),
        lengths=("seeds",),
    ),
    ValueKind.SEGMENTS: PackedColumn(
        write=lambda values: {
            "segments": list(map(len, values)),
            "worker_history": [convert.segment_to_wire(segment) for segments in values for segment in segments],
        },
        read=_read_segments,
        lengths=("segments",),
    ),
}
COLUMNS: Final = {
    name: _column_of(name, each)
    for name, each in DECLARED.items()
    if each.packing not in (Packing.TOKENS, Packing.LEFT_OUT)
}
# those that a message holds unconverted: a service writes very many
_UNCHANGED: Final = {name: each for name, each in DECLARED.items() if each.kind in convert.UNCHANGED}
_SAME_UNCHANGED: Final = tuple(name for name, each in _UNCHANGED.items() if each.packing is Packing.SAME)
_EACH_UNCHANGED: Final = {
    name: each.column or name for name, each in _UNCHANGED.items() if each.packing is Packing.EACH
}
_CONVERTED: Final = {
    name: each for name, each in COLUMNS.items() if name not in _SAME_UNCHANGED and name not in _EACH_UNCHANGED
}
LENGTHS: Final = tuple((length, each.is_rare) for each in COLUMNS.values() for length in each.lengths)
# fields without a column: how they follow from the others, and those with their default
FOLLOWING: Final = {name: each.follows for name, each in DECLARED.items() if each.follows is not None}
DEFAULTS: Final = {
    each.name: each.default
    for each in fields(Trajectory)
    if each.name in DECLARED and DECLARED[each.name].packing is Packing.LEFT_OUT and each.name not in FOLLOWING
}
