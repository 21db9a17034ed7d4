"""Converts between wire messages and types; only this module knows both. Arrays are raw little-endian bytes.

``*_to_wire`` never fails for a valid value. ``*_from_wire`` raises InvalidValue with the message's field for anything
malformed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast, get_args

import numpy as np
import numpy.typing as npt

from dora.data.trajectory import DECLARED, Decoder, Trajectory, TrajectoryGroup
from dora.data.trajectory_fields import ExpertArray, ValueKind, expert_rows, own_array
from dora.data.types import (
    NO_KV,
    Arrival,
    Canary,
    EngineCapability,
    EnvironmentEvent,
    KvEndpoint,
    PoolCapability,
    Prompt,
    RequestSpec,
    RoutingShape,
    SamplingParams,
    Segment,
    TierLoad,
)
from dora.errors import InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import BATCH_BYTES, MAX_MESSAGE_BYTES, check_message_bytes

_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
_UINT8: Final = np.dtype("u1")
TOKEN_ID_BYTES: Final = _INT32.itemsize
_FIELD_BYTES: Final = 8  # that say how long a nested message is
_ENVELOPE_BYTES: Final = 64  # of a batch, around its groups
_HISTORY_BYTES: Final = 128 << 10  # of a trajectory, beside its tokens: half for the verifier's log, half for its moves

# Fields that bear the same name on both sides and need no conversion.
_SAMPLING: Final = tuple(each.name for each in fields(SamplingParams))
_CAPABILITY: Final = tuple(each.name for each in fields(EngineCapability))
_TIER: Final = tuple(each.name for each in fields(TierLoad))
_EVENT: Final = tuple(each.name for each in fields(EnvironmentEvent))


def sampling_to_wire(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(**_named(sampling, _SAMPLING))


def sampling_from_wire(message: pb.Sampling) -> SamplingParams:
    lists = {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)}
    return SamplingParams(**{**_named(message, _SAMPLING), **lists})


def trajectory_to_wire(trajectory: Trajectory) -> pb.Trajectory:
    values = _named(trajectory, _PLAIN)
    for name, form in _CONVERTED:
        values[name] = form.write(getattr(trajectory, name))
    for name, own in _OWN:
        if (value := getattr(trajectory, name)) is not None:
            values.update(own.write(value))
    return pb.Trajectory(**values)


def trajectory_from_wire(message: pb.Trajectory, decoder: Decoder | None = None) -> Trajectory:
    """Converts a trajectory, whose ``decoder`` decodes texts on request. Raises InvalidValue if lengths differ."""
    values = _named(message, _PLAIN)
    for name, form in _CONVERTED:
        values[name] = form.read(getattr(message, name), name)
    for name, own in _OWN:
        values[name] = own.read(message)
    return Trajectory(**values, decoder=decoder)


def group_from_wire(*parts: pb.TrajectoryGroup, decoder: Decoder | None = None) -> TrajectoryGroup:
    """Joins the messages of one group. ``decoder`` is that of :func:`trajectory_from_wire`."""
    trajectories = tuple(trajectory_from_wire(each, decoder) for part in parts for each in part.trajectories)
    return TrajectoryGroup(parts[0].group_id, trajectories)


def trajectory_batches(
    step: int,
    groups: Iterable[TrajectoryGroup],
    *,
    batch_bytes: int = BATCH_BYTES,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Iterator[pb.TrajectoryBatch]:
    """Yields messages of about ``batch_bytes`` with whole groups in order; a larger group is cut between trajectories.

    Raises LimitExceeded for a trajectory over the limit.
    """
    batch, held_bytes = pb.TrajectoryBatch(step=step), 0
    room_bytes = max_message_bytes - _ENVELOPE_BYTES
    for part in (part for group in groups for part in _parts(group, room_bytes)):
        part_bytes = part.ByteSize()
        if batch.groups and held_bytes + part_bytes > min(batch_bytes, room_bytes):
            yield batch
            batch, held_bytes = pb.TrajectoryBatch(step=step), 0
        batch.groups.append(part)
        check_message_bytes(f"group {part.group_id}", batch, max_message_bytes)
        held_bytes += part_bytes + _FIELD_BYTES
    if batch.groups:
        yield batch


def _parts(group: TrajectoryGroup, most_bytes: int) -> Iterator[pb.TrajectoryGroup]:
    part = pb.TrajectoryGroup(group_id=group.group_id)
    held_bytes = part.ByteSize()
    for trajectory in group.trajectories:
        message = trajectory_to_wire(trajectory)
        message_bytes = message.ByteSize() + _FIELD_BYTES
        if part.trajectories and held_bytes + message_bytes > most_bytes:
            part.continues = True
            yield part
            part = pb.TrajectoryGroup(group_id=group.group_id)
            held_bytes = part.ByteSize()
        part.trajectories.append(message)
        held_bytes += message_bytes
    yield part


def trajectory_bytes_most(prompt_tokens: int, max_tokens: int, routing: RoutingShape | None = None) -> int:
    """Returns the largest size of one trajectory's message. ``routing`` is the shape of its expert rows, if any."""
    response_bytes = _INT32.itemsize + _FLOAT32.itemsize + _UINT8.itemsize  # token, logprob, loss mask
    routed_bytes = 0 if routing is None else routing.token_bytes * routing.rows(prompt_tokens, max_tokens)
    return _INT32.itemsize * prompt_tokens + response_bytes * max_tokens + routed_bytes + _HISTORY_BYTES


def request_to_wire(request: RequestSpec) -> pb.StartRequest:
    return pb.StartRequest(
        request_id=request.request_id,
        version=request.version,
        prompt_token_ids=_bytes(request.prompt_token_ids, _INT32),
        sampling=sampling_to_wire(request.sampling),
        output_token_ids=_bytes(request.output_token_ids, _INT32),
        logprobs=_bytes(request.logprobs, _FLOAT32),
        keeps=request.keeps,
        given=[bound for run in request.inputs for bound in run],
        prompt_logprobs=request.prompt_logprobs,
    )


def request_from_wire(message: pb.StartRequest) -> RequestSpec:
    """Converts a request. Raises InvalidValue if outputs and logprobs differ in number, or runs exceed these."""
    outputs, logprobs = _tokens_and_logprobs(message.output_token_ids, message.logprobs, "output_token_ids")
    bounds = list(message.given)
    if len(bounds) % 2 or bounds != sorted(set(bounds)) or (bounds and bounds[-1] > len(outputs)):
        raise InvalidValue("given", bounds, f"first and end of each run, ascending, within {len(outputs)} outputs")
    return RequestSpec(
        request_id=message.request_id,
        version=message.version,
        prompt_token_ids=token_ids_from_wire(message.prompt_token_ids, "prompt_token_ids"),
        sampling=sampling_from_wire(message.sampling),
        output_token_ids=outputs,
        logprobs=logprobs,
        keeps=message.keeps,
        inputs=tuple(zip(bounds[::2], bounds[1::2], strict=True)),
        prompt_logprobs=message.prompt_logprobs,
    )


def tier_to_wire(load: TierLoad) -> pb.KvTierLoad:
    return pb.KvTierLoad(**_named(load, _TIER))


def tier_from_wire(message: pb.KvTierLoad) -> TierLoad:
    return TierLoad(**_named(message, _TIER))


def canary_to_wire(canary: Canary) -> pb.Canary:
    return pb.Canary(token_ids=_bytes(canary.token_ids, _INT32), logprobs=_bytes(canary.logprobs, _FLOAT32))


def canary_from_wire(message: pb.Canary) -> Canary | None:
    """Returns a canary, or None for an empty message. Raises InvalidValue if its lengths do not match."""
    token_ids = token_ids_from_wire(message.token_ids, "canary.token_ids")
    logprobs = _array(message.logprobs, _FLOAT32, "canary.logprobs")
    if not token_ids and not len(logprobs):
        return None
    if len(logprobs) != len(token_ids) - 1:
        raise InvalidValue("canary.logprobs", len(logprobs), f"one fewer than the {len(token_ids)} token_ids")
    return Canary(token_ids, tuple(logprobs.tolist()))


def prompt_to_wire(prompt: Prompt) -> pb.Prompt:
    return pb.Prompt(
        prompt_id=prompt.prompt_id,
        task_id=prompt.task_id,
        token_ids=own_array(prompt.token_ids, _INT32, "token_ids").tobytes(),
        text=prompt.text,
        group_size=prompt.group_size,
        sampling_json=json.dumps(dict(prompt.sampling)),
        verifier_json=prompt.verifier_json,
        priority=prompt.priority,
        environment=prompt.environment,
        group_size_min=prompt.group_size_min,
    )


def hello_to_wire(
    worker_id: str,
    pid: int,
    host: str,
    capability: EngineCapability,
    kv: KvEndpoint = NO_KV,
) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker_id=worker_id,
        pid=pid,
        host=host,
        kv_address=kv.address,
        kv_transports=kv.transports,
        **_named(capability, _CAPABILITY),
    )


def pool_hello_to_wire(pool_id: str, pid: int, host: str, capability: PoolCapability, kv: KvEndpoint) -> pb.PoolHello:
    return pb.PoolHello(
        pool_id=pool_id,
        pid=pid,
        host=host,
        memory_bytes=capability.memory_bytes,
        spill_bytes=capability.spill_bytes,
        kv_address=kv.address,
        kv_transports=kv.transports,
    )


def capability_from_wire(message: pb.WorkerHello) -> EngineCapability:
    return EngineCapability(**_named(message, _CAPABILITY))


def kv_endpoint_from_wire(message: pb.WorkerHello | pb.PoolHello) -> KvEndpoint:
    return KvEndpoint(message.kv_address, tuple(message.kv_transports))


def stop_reason_to_wire(reason: str | int | None) -> dict[str, Any]:
    if reason is None:
        return {}
    return {"stop_string" if isinstance(reason, str) else "stop_token_id": reason}


def segment_to_wire(segment: Segment) -> pb.Segment:
    return pb.Segment(
        worker=segment.worker_id,
        first_token=segment.first_token,
        last_token=segment.last_token,
        arrival=segment.arrival,
        version=segment.version,
    )


def segment_from_wire(message: pb.Segment) -> Segment:
    if message.arrival not in get_args(Arrival):
        raise InvalidValue("worker_history: arrival", message.arrival, f"one of {', '.join(get_args(Arrival))}")
    return Segment(
        message.worker, message.first_token, message.last_token, cast(Arrival, message.arrival), message.version
    )


def event_to_wire(event: EnvironmentEvent) -> pb.EnvironmentEvent:
    return pb.EnvironmentEvent(**_named(event, _EVENT))


def event_from_wire(message: pb.EnvironmentEvent) -> EnvironmentEvent:
    return EnvironmentEvent(**_named(message, _EVENT))


def _named(source: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _bytes(values: Sequence[float] | npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _array(content: bytes, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise InvalidValue(
            f"{name}: bytes", len(content), f"a multiple of {dtype.itemsize} (little-endian {dtype.name})"
        )
    return np.frombuffer(content, dtype)


def token_ids_from_wire(content: bytes, name: str) -> tuple[int, ...]:
    """Converts int32 bytes. Raises InvalidValue unless they are a whole number of int32."""
    return tuple(_array(content, _INT32, name).tolist())


def _tokens_and_logprobs(tokens: bytes, logprobs: bytes, name: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids, values = token_ids_from_wire(tokens, name), _array(logprobs, _FLOAT32, "logprobs")
    if len(values) != len(token_ids):
        raise InvalidValue("logprobs", len(values), f"one per token, that is {len(token_ids)}")
    return token_ids, tuple(values.tolist())


# ----------------------------------------------------------------------------------------------- a trajectory's fields


@dataclass(frozen=True, slots=True)
class FieldForm:
    """Writes values of one kind to the message's field of the same name, and reads them from it."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]  # and the name, for errors


@dataclass(frozen=True, slots=True)
class OwnForm:
    """Does the same for a kind with several fields in ``pb.Trajectory``. ``write`` returns these fields.

    It is not called for None, which writes no field.
    """

    write: Callable[[Any], dict[str, Any]]
    read: Callable[[pb.Trajectory], Any]


def _array_form(dtype: np.dtype[Any]) -> FieldForm:
    return FieldForm(
        lambda array: np.asarray(array, dtype).tobytes(), lambda content, name: _array(content, dtype, name)
    )


def _stop_from_wire(message: pb.Trajectory) -> str | int | None:
    stopped_by = message.WhichOneof("stop_reason")
    return cast(str | int, getattr(message, stopped_by)) if stopped_by else None


def _routing_to_wire(rows: ExpertArray) -> dict[str, Any]:
    _, layers, top_k = rows.shape
    raw = _bytes(rows, np.dtype(f"<u{rows.itemsize}"))
    return {
        "routed_experts": pb.RoutedExperts(layers=layers, top_k=top_k, id_bytes=rows.itemsize, expert_ids=raw),
    }


def _routing_from_wire(message: pb.Trajectory) -> ExpertArray | None:
    if not message.HasField("routed_experts"):
        return None
    routed = message.routed_experts
    return expert_rows(routed.expert_ids, routed.layers, routed.top_k, routed.id_bytes)


UNCHANGED: Final = (ValueKind.PLAIN, ValueKind.NUMBER)  # the same on both sides
ARRAY_DTYPES: Final[Mapping[ValueKind, np.dtype[Any]]] = {
    ValueKind.INT32: _INT32,
    ValueKind.FLOAT32: _FLOAT32,
    ValueKind.UINT8: _UINT8,
}
FORMS: Final[Mapping[ValueKind, FieldForm]] = {
    **{kind: _array_form(dtype) for kind, dtype in ARRAY_DTYPES.items()},
    ValueKind.NUMBERS: FieldForm(dict, lambda values, _: dict(values)),
    ValueKind.SAMPLING: FieldForm(sampling_to_wire, lambda message, _: sampling_from_wire(message)),
    ValueKind.SAMPLINGS: FieldForm(
        lambda samplings: {key: sampling_to_wire(value) for key, value in samplings.items()},
        lambda messages, _: {key: sampling_from_wire(message) for key, message in messages.items()},
    ),
    ValueKind.SEGMENTS: FieldForm(
        lambda segments: list(map(segment_to_wire, segments)),
        lambda messages, _: tuple(map(segment_from_wire, messages)),
    ),
    ValueKind.EVENTS: FieldForm(
        lambda events: list(map(event_to_wire, events)), lambda messages, _: tuple(map(event_from_wire, messages))
    ),
}
OWN_FORMS: Final[Mapping[ValueKind, OwnForm]] = {
    ValueKind.STOP: OwnForm(stop_reason_to_wire, _stop_from_wire),
    ValueKind.EXPERTS: OwnForm(_routing_to_wire, _routing_from_wire),
}
_PLAIN: Final = tuple(name for name, each in DECLARED.items() if each.kind in UNCHANGED)
_CONVERTED: Final = tuple((name, FORMS[each.kind]) for name, each in DECLARED.items() if each.kind in FORMS)
_OWN: Final = tuple((name, OWN_FORMS[each.kind]) for name, each in DECLARED.items() if each.kind in OWN_FORMS)
