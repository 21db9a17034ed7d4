"""The kinds of values of a trajectory's fields, and the declaration that each field carries.

:class:`dora.data.trajectory.Trajectory` has the declarations. Everything that reads or writes trajectories follows from
them: the JSON record (here), the protobuf message and the packed columns (``dora/rpc``), and the table of fields in
``docs/reference/``. ``orchestrator/rollout/responses/state.py`` computes each value in the service.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final, cast, get_args, get_origin

import numpy as np
import numpy.typing as npt

from dora.data.types import Arrival, EnvironmentEvent, SamplingParams, Segment
from dora.errors import InvalidValue

ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class ValueKind(StrEnum):
    """The values of a field, as far as they are written differently."""

    PLAIN = "plain"  # a text, a whole number, a time or a flag
    NUMBER = "number"  # a float that may be NaN, which is null in JSON
    NUMBERS = "numbers"  # such floats by name
    INT32 = "int32"  # arrays
    FLOAT32 = "float32"
    UINT8 = "uint8"
    SAMPLING = "sampling"  # SamplingParams
    SAMPLINGS = "samplings"  # SamplingParams by name
    SEGMENTS = "segments"  # a tuple of Segment
    EVENTS = "events"  # a tuple of EnvironmentEvent
    STOP = "stop"  # a stop string, a stop token id or None
    EXPERTS = "experts"  # rows of expert ids, or None


class Packing(StrEnum):
    """The form of a field in a packed group (``PackedGroup`` in dora.proto)."""

    SAME = "same"  # one value, which all responses share
    EACH = "each"  # one value a response
    RARE = "rare"  # the same; no values at all where each is the empty one
    TOKENS = "tokens"  # in TrajectoryBatch.tokens
    LEFT_OUT = "left out"  # it follows from other fields; a group in which it does not is not packed


class PersistedIn(StrEnum):
    """The log record (``dora/journal``) from which a restarted service restores a field."""

    ADMITTED = "Admitted"
    TOKENS = "Tokens"
    VERDICT = "Verdict"
    NOWHERE = ""  # computed when the group is delivered


@dataclass(frozen=True, slots=True)
class Declared:
    """Declares how one field of a trajectory is written, packed and restored.

    ``column`` is its name in ``PackedGroup``, or the field's own if empty. ``empty`` makes the value that a RARE field
    mostly has. ``follows`` computes a field that is LEFT_OUT from the others; None is the field's default.
    """

    packing: Packing
    persisted: PersistedIn
    kind: ValueKind = ValueKind.PLAIN
    column: str = ""
    empty: Callable[[], Any] | None = None
    follows: Callable[[Mapping[str, Any]], Any] | None = None
    by_token: bool = False  # one value a response token
    is_later: bool = False  # records of earlier releases lack it: it then has its default


ARRAYS: Final[Mapping[ValueKind, npt.DTypeLike]] = {
    ValueKind.INT32: np.int32,
    ValueKind.FLOAT32: np.float32,
    ValueKind.UINT8: np.uint8,
}
_LISTS: Final = ("stop", "stop_token_ids")  # of sampling: lists in JSON


def declarations(kind: type) -> tuple[dict[str, Declared], dict[str, str]]:
    """The declared fields of a dataclass, in its order, and their meanings.

    Raises TypeError for a field that is LEFT_OUT and neither follows from others nor has a default.
    """
    found: dict[str, Declared] = {}
    texts: dict[str, str] = {}
    for each in fields(kind):
        if get_origin(each.type) is not Annotated:
            continue
        texts[each.name], declared = cast(Any, each.type).__metadata__
        if declared.packing is Packing.LEFT_OUT and declared.follows is None and each.default is MISSING:
            raise TypeError(f"{kind.__name__}.{each.name} is left out of packed groups and has no default")
        found[each.name] = declared
    return found, texts


def own_array(values: Sequence[float] | npt.NDArray[Any], dtype: npt.DTypeLike, name: str) -> npt.NDArray[Any]:
    """Copies ``values`` into a new one-dimensional array. Raises InvalidValue if that is impossible."""
    kinds = "iub" if np.issubdtype(dtype, np.integer) else "iubf"
    try:
        shown = np.asarray(values)
        if shown.size and shown.dtype.kind not in kinds:
            raise InvalidValue(name, str(values)[:80], f"a sequence of {np.dtype(dtype)}")
        array = np.array(values, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(name, str(values)[:80], f"a sequence of {np.dtype(dtype)} ({error})") from error
    if array.ndim != 1:
        raise InvalidValue(f"{name}: dimensions", array.ndim, "1")
    return array


def expert_rows(raw: bytes | bytearray, layers: int, top_k: int, id_bytes: int) -> ExpertArray:
    """Returns rows of expert ids (``RoutingShape``), a view of ``raw``. Raises InvalidValue for one that is cut."""
    if id_bytes not in (1, 2):
        raise InvalidValue("routed_experts: id_bytes", id_bytes, "1 or 2")
    token_bytes = layers * top_k * id_bytes
    if token_bytes < 1 or len(raw) % token_bytes:
        allowed = f"rows of {layers} layers and {top_k} experts, of {id_bytes} bytes each"
        raise InvalidValue("routed_experts: bytes", len(raw), allowed)
    return cast(ExpertArray, np.frombuffer(raw, f"<u{id_bytes}").reshape(-1, layers, top_k))


# ---------------------------------------------------------------------------------------------------------------- JSON


@dataclass(frozen=True, slots=True)
class Json:
    """Writes the values of one kind to JSON, and reads them from it."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    return asdict(sampling) | {name: list(getattr(sampling, name)) for name in _LISTS}


def _sampling_from_json(record: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**record, **{name: tuple(record.get(name, ())) for name in _LISTS}})


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    return {
        "worker": segment.worker_id,
        "first_token": segment.first_token,
        "last_token": segment.last_token,
        "arrival": segment.arrival,
        "version": segment.version,
    }


def _segment_from_json(record: Mapping[str, Any]) -> Segment:
    if record["arrival"] not in get_args(Arrival):
        raise InvalidValue("worker_history: arrival", record["arrival"], f"one of {', '.join(get_args(Arrival))}")
    return Segment(record["worker"], record["first_token"], record["last_token"], record["arrival"], record["version"])


def _routing_to_json(rows: ExpertArray | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    _, layers, top_k = rows.shape
    raw = rows.astype(f"<u{rows.itemsize}", copy=False).tobytes()
    return {
        "layers": layers,
        "top_k": top_k,
        "id_bytes": rows.itemsize,
        "base64": base64.b64encode(raw).decode("ascii"),
    }


def _routing_from_json(record: Mapping[str, Any] | None) -> ExpertArray | None:
    if record is None:
        return None
    try:
        raw = base64.b64decode(record["base64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidValue("routed_experts: base64", str(record["base64"])[:80], f"base64 ({error})") from error
    return expert_rows(raw, int(record["layers"]), int(record["top_k"]), int(record["id_bytes"]))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _alike(value: Any) -> Any:
    return value


_ARRAY: Final = Json(lambda array: array.tolist(), _alike)
JSON: Final[Mapping[ValueKind, Json]] = {
    ValueKind.PLAIN: Json(_alike, _alike),
    ValueKind.NUMBER: Json(_finite_or_none, _number),
    ValueKind.NUMBERS: Json(
        lambda numbers: {key: _finite_or_none(value) for key, value in numbers.items()},
        lambda record: {key: _number(value) for key, value in record.items()},
    ),
    **dict.fromkeys(ARRAYS, _ARRAY),
    ValueKind.SAMPLING: Json(_sampling_to_json, _sampling_from_json),
    ValueKind.SAMPLINGS: Json(
        lambda samplings: {key: _sampling_to_json(value) for key, value in samplings.items()},
        lambda record: {key: _sampling_from_json(value) for key, value in record.items()},
    ),
    ValueKind.SEGMENTS: Json(
        lambda segments: [_segment_to_json(segment) for segment in segments],
        lambda records: tuple(_segment_from_json(record) for record in records),
    ),
    ValueKind.EVENTS: Json(
        lambda events: [asdict(event) for event in events],
        lambda records: tuple(EnvironmentEvent(**record) for record in records),
    ),
    ValueKind.STOP: Json(_alike, _alike),
    ValueKind.EXPERTS: Json(_routing_to_json, _routing_from_json),
}
