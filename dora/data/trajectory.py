"""One finished response and its prompt group, as trainers and the run record have them.

Arrays are numpy, writable and unshared: ``torch.from_numpy`` accepts them. Each response token has one log probability
and one mask byte. Nothing is re-tokenised: ``response_token_ids`` are the sampled ids.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, cast, get_args

import numpy as np
import numpy.typing as npt

from dora.data.advantages import centred, normalized
from dora.data.types import Arrival, FinishReason, RoutingShape, SamplingParams, Segment
from dora.errors import MISSING, Conflict, InvalidValue, one_of

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Uint8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Decoder = Callable[[Sequence[int], bool], str]  # token ids, and whether special tokens are shown


@dataclass(frozen=True, slots=True)
class EnvironmentEvent:
    """An event within a response: a tool call, its result, an environment's turn."""

    position_token: int  # index of the first response token after the event
    kind: str  # e.g. "tool_call", "tool_result", "observation"
    name: str
    content: str
    at: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trajectory:
    """One complete response. ``n`` below is ``length_tokens``; times are seconds since the Unix epoch."""

    trajectory_id: str
    group_id: str
    prompt_id: str
    task_id: str
    sample_index: int  # 0 .. group_size - 1
    group_size: int
    behaviour_version: int  # the policy version that sampled every token
    reference_version: int  # the frozen version a KL term refers to
    trained_step: int  # the step the group is leased to
    staleness: int  # trained_step - behaviour_version
    prompt_token_ids: Int32Array
    response_token_ids: Int32Array  # (n,)
    logprobs: Float32Array  # (n,), natural log, the model's own: before temperature, penalties and truncation
    loss_mask: Uint8Array  # (n,), 1 where the token was sampled by the policy
    sampling: SamplingParams
    reward: float  # NaN if the verifier gave no number
    reward_valid: bool  # False: do not train on the reward; verifier_log says why
    reward_components: Mapping[str, float]
    verifier_log: str
    finish_reason: FinishReason  # stop: the token that ended it is among its tokens; length: it was cut
    started_at: float
    finished_at: float
    worker_history: tuple[Segment, ...]
    length_tokens: int
    events: tuple[EnvironmentEvent, ...] = field(default=())
    # the stop string or stop token id that ended it; None: the end-of-sequence token
    stop_reason: str | int | None = None
    # (prompt tokens + n - 1, layers with experts, top_k), uint8 or uint16: row i has the experts that the engine chose
    # for the token at position i, prompt first, on the way to that at position i + 1; so the last token has none.
    # None: workers.router_replay was off
    window_versions: int = 0  # size of the window at its group's admission: staleness is less; 0: unknown
    routed_experts: ExpertArray | None = None
    decoder: Decoder | None = field(default=None)  # set by a client; not part of the record

    def __post_init__(self) -> None:
        """Accepts integer or float sequences and copies them into arrays. Raises InvalidValue if lengths differ."""
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, own_array(getattr(self, name), dtype, name))
        tokens = len(self.response_token_ids)
        for name in ("logprobs", "loss_mask"):
            if len(getattr(self, name)) != tokens:
                raise InvalidValue(
                    f"trajectory {self.trajectory_id}: len({name})",
                    len(getattr(self, name)),
                    f"one per response token, that is {tokens}",
                )
        if self.length_tokens != tokens:
            raise InvalidValue(
                f"trajectory {self.trajectory_id}: length_tokens", self.length_tokens, f"the response's {tokens} tokens"
            )
        if self.finish_reason not in get_args(FinishReason):
            raise InvalidValue(f"trajectory {self.trajectory_id}: finish_reason", self.finish_reason, "stop or length")
        if self.routed_experts is not None:
            object.__setattr__(self, "routed_experts", self._own_routing(np.asarray(self.routed_experts)))

    def _own_routing(self, rows: npt.NDArray[Any]) -> ExpertArray:
        name, expected = f"trajectory {self.trajectory_id}: routed_experts", self.routed_tokens
        if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16) or len(rows) != expected:
            allowed = f"uint8 or uint16 of shape ({expected}, layers, top_k)"
            raise InvalidValue(name, f"{rows.dtype} of shape {rows.shape}", allowed)
        return rows.copy()

    @property
    def routed_tokens(self) -> int:
        """The number of tokens fed to the engine: rows of ``routed_experts``."""
        return RoutingShape.rows(len(self.prompt_token_ids), self.length_tokens)

    def __repr__(self) -> str:
        reward = f"reward {self.reward:g}" if self.reward_valid else "no valid reward"
        ended = f"{self.length_tokens} tokens, {self.finish_reason}"
        return f"<Trajectory {self.trajectory_id}: {ended}, {reward}, version {self.behaviour_version}>"

    def __getstate__(self) -> list[Any]:
        """Like a dataclass with slots, in the order of the fields; the tokenizer stays in its process."""
        return [getattr(self, each.name) if each.name != "decoder" else None for each in fields(self)]

    @property
    def text(self) -> str:
        """The response as text without special tokens, as the reward function received it.

        Raises Conflict without a tokenizer, as :meth:`dora.client.session.Session.decode` does.
        """
        return self.decoded(self.response_token_ids)

    def decoded(self, token_ids: Int32Array, special_tokens: bool = False) -> str:
        """``token_ids`` as text, special tokens shown or left out. Raises as :attr:`text`."""
        if self.decoder is None:
            allowed = "one that a trainer received; any other is decoded by a tokenizer of your own"
            raise Conflict("trajectory", self.trajectory_id, allowed, why="has no tokenizer")
        return self.decoder(token_ids.tolist(), special_tokens)

    def to_json_dict(self) -> dict[str, Any]:
        """The trajectory as plain JSON values, keyed by field. float32 values survive exactly, NaN becomes null."""
        record: dict[str, Any] = {}
        for name in _recorded():
            record[name] = getattr(self, name)
        for name in _ARRAYS:
            record[name] = record[name].tolist()
        record["sampling"] = asdict(self.sampling)
        record["sampling"] |= {name: list(getattr(self.sampling, name)) for name in _LISTS}
        record["reward"] = _finite_or_none(self.reward)
        record["reward_components"] = {key: _finite_or_none(value) for key, value in self.reward_components.items()}
        record["worker_history"] = [_segment_to_json(segment) for segment in self.worker_history]
        record["events"] = [asdict(event) for event in self.events]
        record["routed_experts"] = None if self.routed_experts is None else _routing_to_json(self.routed_experts)
        return record

    @classmethod
    def from_json_dict(cls, record: Mapping[str, Any]) -> "Trajectory":
        """The inverse of :meth:`to_json_dict`. Raises InvalidValue for a missing, unknown or misshapen field."""
        names = set(_recorded())
        for name in sorted(names - record.keys() - _LATER):
            raise InvalidValue(f"trajectory record: {name}", MISSING, "in every record")
        for name in sorted(record.keys() - names):
            raise InvalidValue(f"trajectory record: {name}", record[name], one_of(name, names))
        values = dict(record)
        try:
            sampling = dict(values["sampling"])
            sampling |= {name: tuple(sampling.get(name, ())) for name in _LISTS}
            values["sampling"] = SamplingParams(**sampling)
            values["reward"] = _number(values["reward"])
            values["reward_components"] = {key: _number(value) for key, value in values["reward_components"].items()}
            values["worker_history"] = tuple(_segment_from_json(segment) for segment in values["worker_history"])
            values["events"] = tuple(EnvironmentEvent(**event) for event in values["events"])
            if (routed := values.get("routed_experts")) is not None:
                values["routed_experts"] = _routing_from_json(routed)
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidValue("trajectory record", record["trajectory_id"], f"well-formed ({error})") from error
        return cls(**values)


_LISTS: Final = ("stop", "stop_token_ids")  # of sampling: lists in JSON
_LATER: Final = {
    "stop_reason",
    "window_versions",
    "routed_experts",
}  # fields that records of earlier DORA versions lack
_ARRAYS: Final[Mapping[str, npt.DTypeLike]] = {
    "prompt_token_ids": np.int32,
    "response_token_ids": np.int32,
    "logprobs": np.float32,
    "loss_mask": np.uint8,
}


def _recorded() -> tuple[str, ...]:
    """The fields of a trajectory's record."""
    return tuple(each.name for each in fields(Trajectory) if each.name != "decoder")


@dataclass(frozen=True, repr=False)
class TrajectoryGroup:
    """All responses to one prompt, by ``sample_index``. Arrays have shape (group,) or (group, longest response).

    Each access makes a new array, so changing one affects neither the group nor later accesses.
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.group_id != self.group_id:
                raise InvalidValue(f"group {self.group_id}: group_id", trajectory.group_id, "the group's own")

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        if not self.trajectories:
            return f"<TrajectoryGroup {self.group_id}: no responses>"
        valid, lengths = self.rewards[self.rewards_valid], self.lengths
        rewards = f"mean reward {valid.mean():.3g} of {len(valid)} valid" if len(valid) else "no valid reward"
        size = f"{len(self)} responses of {lengths.min()} to {lengths.max()} tokens"
        version = self.trajectories[0].behaviour_version
        return f"<TrajectoryGroup {self.group_id}: {size}, {rewards}, version {version}>"

    @property
    def prompt_id(self) -> str:
        return self.trajectories[0].prompt_id

    @property
    def prompt_token_ids(self) -> Int32Array:
        """The prompt, the same for every response."""
        return self.trajectories[0].prompt_token_ids.copy()

    @property
    def prompt_text(self) -> str:
        """The prompt as the model read it, with special tokens. Raises like :attr:`Trajectory.text`."""
        return self.trajectories[0].decoded(self.trajectories[0].prompt_token_ids, special_tokens=True)

    @property
    def rewards(self) -> Float64Array:
        """(group,); NaN or meaningless where ``rewards_valid`` is False."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)

    @property
    def rewards_valid(self) -> BoolArray:
        """(group,): whether the reward may be trained on: valid by the verifier, and finite."""
        declared = np.array([trajectory.reward_valid for trajectory in self.trajectories], np.bool_)
        return declared & np.isfinite(self.rewards)

    @property
    def versions(self) -> Int64Array:
        """(group,): behaviour versions."""
        return np.array([trajectory.behaviour_version for trajectory in self.trajectories], np.int64)

    @property
    def staleness(self) -> Int64Array:
        """(group,): trained step less behaviour version."""
        return np.array([trajectory.staleness for trajectory in self.trajectories], np.int64)

    @property
    def lengths(self) -> Int64Array:
        """(group,): response tokens."""
        return np.array([trajectory.length_tokens for trajectory in self.trajectories], np.int64)

    def advantages(self, *, normalize: bool = True) -> Float32Array:
        """(group,): the advantage of each response over its group, which GRPO multiplies its tokens by.

            A_i = (r_i - mean(r)) / std(r)

        Mean and population standard deviation are over the *valid* rewards; ``normalize=False`` omits the division.
        :mod:`dora.data.advantages` has both, other estimators, and the values for invalid rewards.
        """
        return (normalized if normalize else centred)(self.rewards, self.rewards_valid)

    def tokens(self, pad: int = 0) -> Int32Array:
        """(group, longest): response token ids, padded on the right with ``pad``."""
        return cast(Int32Array, self._padded("response_token_ids", np.int32, pad))

    def logprobs(self) -> Float32Array:
        """(group, longest): the behaviour policy's log probabilities, padded on the right with 0."""
        return cast(Float32Array, self._padded("logprobs", np.float32, 0))

    def loss_mask(self) -> Uint8Array:
        """(group, longest): 1 where the token was sampled by the policy; 0 for the rest and for the padding."""
        return cast(Uint8Array, self._padded("loss_mask", np.uint8, 0))

    def _padded(self, name: str, dtype: npt.DTypeLike, pad: int) -> npt.NDArray[Any]:
        padded = np.full((len(self), int(self.lengths.max(initial=0))), pad, dtype)
        for row, trajectory in enumerate(self.trajectories):
            padded[row, : trajectory.length_tokens] = getattr(trajectory, name)
        return padded


def own_array(values: Sequence[float] | npt.NDArray[Any], dtype: npt.DTypeLike, name: str) -> npt.NDArray[Any]:
    """Copies ``values`` into a new one-dimensional array. Raises InvalidValue if that is impossible."""
    kinds = "iub" if np.issubdtype(dtype, np.integer) else "iubf"
    try:
        given = np.asarray(values)
        if given.size and given.dtype.kind not in kinds:
            raise InvalidValue(name, str(values)[:80], f"a sequence of {np.dtype(dtype)}")
        array = np.array(values, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(name, str(values)[:80], f"a sequence of {np.dtype(dtype)} ({error})") from error
    if array.ndim != 1:
        raise InvalidValue(f"{name}: dimensions", array.ndim, "1")
    return array


def expert_rows(raw: bytes | bytearray, layers: int, top_k: int, id_bytes: int) -> ExpertArray:
    """Rows of expert ids, as ``RoutingShape`` has them: a view of ``raw``. Raises InvalidValue for one that is cut."""
    if id_bytes not in (1, 2):
        raise InvalidValue("routed_experts: id_bytes", id_bytes, "1 or 2")
    token_bytes = layers * top_k * id_bytes
    if token_bytes < 1 or len(raw) % token_bytes:
        allowed = f"rows of {layers} layers and {top_k} experts, of {id_bytes} bytes each"
        raise InvalidValue("routed_experts: bytes", len(raw), allowed)
    return cast(ExpertArray, np.frombuffer(raw, f"<u{id_bytes}").reshape(-1, layers, top_k))


def _routing_to_json(rows: ExpertArray) -> dict[str, Any]:
    _, layers, top_k = rows.shape
    raw = rows.astype(f"<u{rows.itemsize}", copy=False).tobytes()
    return {
        "layers": layers,
        "top_k": top_k,
        "id_bytes": rows.itemsize,
        "base64": base64.b64encode(raw).decode("ascii"),
    }


def _routing_from_json(record: Mapping[str, Any]) -> ExpertArray:
    try:
        raw = base64.b64decode(record["base64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidValue("routed_experts: base64", str(record["base64"])[:80], f"base64 ({error})") from error
    return expert_rows(raw, int(record["layers"]), int(record["top_k"]), int(record["id_bytes"]))


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


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
