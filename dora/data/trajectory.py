"""One finished response and its prompt group, as trainers and the run record have them.

Arrays are numpy, writable and unshared: ``torch.from_numpy`` accepts them. Each response token has one log probability
and one mask byte. Nothing is re-tokenised: ``response_token_ids`` are the sampled ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, cast, get_args

import numpy as np
import numpy.typing as npt

from dora.data.advantages import centred, normalized, over_sessions
from dora.data.trajectory_fields import (
    ARRAYS,
    JSON,
    Declared,
    ExpertArray,
    Packing,
    PersistedIn,
    ValueKind,
    declarations,
    own_array,
)
from dora.data.types import EnvironmentEvent, FinishReason, RoutingShape, SamplingParams, Segment
from dora.errors import MISSING, Conflict, InvalidValue, one_of

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Uint8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
Decoder = Callable[[Sequence[int], bool], str]  # token ids, and whether special tokens are shown

SAME, EACH, RARE, IN_TOKENS, LEFT_OUT = Packing
ADMITTED, TOKENS, VERDICT, NOWHERE = PersistedIn


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trajectory:
    """One complete response. ``n`` below is ``length_tokens``; times are seconds since the Unix epoch.

    A field is declared here and nowhere else: its meaning, how a packed group holds it, and which log record keeps it
    over a restart. CONTRIBUTING.md says how to add one.
    """

    trajectory_id: Annotated[str, "its id, the request's", Declared(EACH, ADMITTED, column="trajectory_ids")]
    group_id: Annotated[str, "the prompt group", Declared(SAME, ADMITTED)]
    prompt_id: Annotated[str, "the prompt", Declared(SAME, ADMITTED)]
    task_id: Annotated[str, "the prompt's task, as its source names it", Declared(SAME, ADMITTED)]
    sample_index: Annotated[int, "0 to group_size - 1", Declared(EACH, ADMITTED, column="sample_indexes")]
    group_size: Annotated[int, "responses to the prompt that are delivered", Declared(SAME, ADMITTED)]
    behaviour_version: Annotated[int, "the policy version that sampled every token", Declared(SAME, ADMITTED)]
    reference_version: Annotated[int, "the frozen version a KL term refers to", Declared(SAME, NOWHERE)]
    trained_step: Annotated[int, "the step that the group is leased to", Declared(SAME, NOWHERE)]
    staleness: Annotated[
        int,
        "trained_step - behaviour_version",
        Declared(LEFT_OUT, NOWHERE, follows=lambda of: of["trained_step"] - of["behaviour_version"]),
    ]
    prompt_token_ids: Annotated[Int32Array, "the prompt's tokens", Declared(SAME, ADMITTED, ValueKind.INT32)]
    response_token_ids: Annotated[
        Int32Array,
        "(n,): exactly the ids that were sampled",
        Declared(IN_TOKENS, TOKENS, ValueKind.INT32, by_token=True),
    ]
    logprobs: Annotated[
        Float32Array,
        "(n,): natural log, the model's own: before temperature, penalties and truncation",
        Declared(IN_TOKENS, TOKENS, ValueKind.FLOAT32, by_token=True),
    ]
    loss_mask: Annotated[
        Uint8Array,
        "(n,): 1 if the policy sampled the token",
        Declared(
            LEFT_OUT,
            NOWHERE,
            ValueKind.UINT8,
            follows=lambda of: np.ones(of["length_tokens"], np.uint8),
            by_token=True,
        ),
    ]
    sampling: Annotated[
        SamplingParams,
        "how it was sampled, with its seed",
        Declared(EACH, ADMITTED, ValueKind.SAMPLING),
    ]
    reward: Annotated[
        float,
        "the verifier's; NaN (null in JSON) if it gave no number",
        Declared(EACH, VERDICT, ValueKind.NUMBER, column="rewards"),
    ]
    reward_valid: Annotated[
        bool,
        "false: do not train on the reward; verifier_log says why",
        Declared(EACH, VERDICT, column="rewards_valid"),
    ]
    reward_components: Annotated[
        Mapping[str, float], "parts of the reward, by name", Declared(RARE, VERDICT, ValueKind.NUMBERS, empty=dict)
    ]
    verifier_log: Annotated[str, "the verifier's remarks", Declared(RARE, VERDICT, column="verifier_logs", empty=str)]
    finish_reason: Annotated[
        FinishReason,
        "`stop`: the token that ended it is its last one; `length`: it was cut",
        Declared(EACH, TOKENS, column="finish_reasons"),
    ]
    started_at: Annotated[float, "when its group was admitted", Declared(EACH, ADMITTED)]
    finished_at: Annotated[float, "when its last token came", Declared(EACH, TOKENS)]
    worker_history: Annotated[
        tuple[Segment, ...],
        "the workers that sampled it, each with its first and last token and how the request came there",
        Declared(EACH, TOKENS, ValueKind.SEGMENTS),
    ]
    length_tokens: Annotated[int, "n: response tokens", Declared(EACH, TOKENS)]
    events: Annotated[
        tuple[EnvironmentEvent, ...], "tool calls and environment turns", Declared(LEFT_OUT, NOWHERE, ValueKind.EVENTS)
    ] = ()
    stop_reason: Annotated[
        str | int | None,
        "the stop string or stop token id that ended it; none: the model's own end, or it was cut",
        Declared(RARE, TOKENS, ValueKind.STOP, column="stop_reasons", empty=lambda: None, is_later=True),
    ] = None
    window_versions: Annotated[
        int,
        "versions of the window when its group was admitted: staleness is less; 0: not known",
        Declared(SAME, ADMITTED, is_later=True),
    ] = 0
    routed_experts: Annotated[
        ExpertArray | None,
        "(prompt tokens + n - 1, layers with experts, top_k), uint8 or uint16: row i has the experts that the engine "
        "chose for the token at position i, prompt first; the last token has none, nor have environment tokens at the "
        "end of a session that was broken off. None: `workers.router_replay` is off",
        Declared(LEFT_OUT, TOKENS, ValueKind.EXPERTS, is_later=True),
    ] = None
    turn_rewards: Annotated[
        Mapping[str, float],
        "rewards of single turns of a session, by the position of the turn's first sampled token, in decimal",
        Declared(LEFT_OUT, NOWHERE, ValueKind.NUMBERS, follows=lambda of: {}, is_later=True),
    ] = field(default_factory=dict)
    turn_sampling: Annotated[
        Mapping[str, SamplingParams],
        "how turns of a session were sampled that were asked with sampling of their own, by the same positions",
        Declared(LEFT_OUT, NOWHERE, ValueKind.SAMPLINGS, follows=lambda of: {}, is_later=True),
    ] = field(default_factory=dict)
    branch_index: Annotated[
        int,
        "of its session: 0, or more for one that forked. All branches of a session have its reward and sample_index",
        Declared(LEFT_OUT, NOWHERE, is_later=True),
    ] = 0
    shared_prefix_tokens: Annotated[
        int,
        "response tokens that an earlier branch of its session has too; their loss_mask is 0",
        Declared(LEFT_OUT, NOWHERE, is_later=True),
    ] = 0
    decoder: Decoder | None = field(default=None)  # set by the client that received it: no part of the record

    def __post_init__(self) -> None:
        """Accepts integer or float sequences and copies them into arrays. Raises InvalidValue if lengths differ."""
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, own_array(getattr(self, name), dtype, name))
        tokens = len(self.response_token_ids)
        for name in _BY_TOKEN:
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
        name, most = f"trajectory {self.trajectory_id}: routed_experts", self.routed_tokens
        counted = np.flatnonzero(self.loss_mask)
        least = len(self.prompt_token_ids) + int(counted[-1]) if len(counted) else 0
        if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16) or not least <= len(rows) <= most:
            tokens = most if least == most else f"{least} to {most}"
            raise InvalidValue(
                name, f"{rows.dtype} of shape {rows.shape}", f"uint8 or uint16 of shape ({tokens}, layers, top_k)"
            )
        return rows.copy()

    @property
    def routed_tokens(self) -> int:
        """The number of rows of ``routed_experts``, at most: of the tokens before the last one."""
        return RoutingShape.rows(len(self.prompt_token_ids), self.length_tokens)

    def __repr__(self) -> str:
        reward = f"reward {self.reward:g}" if self.reward_valid else "no valid reward"
        ended = f"{self.length_tokens} tokens, {self.finish_reason}"
        return f"<Trajectory {self.trajectory_id}: {ended}, {reward}, version {self.behaviour_version}>"

    def __getstate__(self) -> list[Any]:
        """Returns a dataclass's state with slots, in the order of the fields. The tokenizer stays in its process."""
        return [getattr(self, each.name) if each.name != "decoder" else None for each in fields(self)]

    @property
    def text(self) -> str:
        """The response as text without special tokens, as the reward function received it.

        Raises Conflict without a tokenizer, as :meth:`dora.client.session.Session.decode` does.
        """
        return self.decoded(self.response_token_ids)

    def decoded(self, token_ids: Int32Array, special_tokens: bool = False) -> str:
        """Returns ``token_ids`` as text, with special tokens or without. Raises as :attr:`text`."""
        if self.decoder is None:
            allowed = "one that a trainer received; any other is decoded by a tokenizer of your own"
            raise Conflict("trajectory", self.trajectory_id, allowed, why="has no tokenizer")
        return self.decoder(token_ids.tolist(), special_tokens)

    def to_json_dict(self) -> dict[str, Any]:
        """The trajectory as plain JSON values, keyed by field. float32 values survive exactly, NaN becomes null."""
        return {name: JSON[declared.kind].write(getattr(self, name)) for name, declared in DECLARED.items()}

    @classmethod
    def from_json_dict(cls, record: Mapping[str, Any]) -> "Trajectory":
        """The inverse of :meth:`to_json_dict`. Raises InvalidValue for a missing, unknown or misshapen field."""
        for name in sorted(name for name, declared in DECLARED.items() if not declared.is_later):
            if name not in record:
                raise InvalidValue(f"trajectory record: {name}", MISSING, "in every record")
        for name in sorted(record.keys() - DECLARED.keys()):
            raise InvalidValue(f"trajectory record: {name}", record[name], one_of(name, DECLARED))
        try:
            values = {name: JSON[DECLARED[name].kind].read(value) for name, value in record.items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidValue("trajectory record", record["trajectory_id"], f"well-formed ({error})") from error
        return cls(**values)


DECLARED, MEANINGS = declarations(Trajectory)
_ARRAYS: Final = {name: ARRAYS[each.kind] for name, each in DECLARED.items() if each.kind in ARRAYS}
_BY_TOKEN: Final = tuple(name for name, each in DECLARED.items() if each.by_token and name != "response_token_ids")


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
    def sessions(self) -> Int64Array:
        """(group,): sample indexes. Branches of one session have the same."""
        return np.array([trajectory.sample_index for trajectory in self.trajectories], np.int64)

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
        estimate = normalized if normalize else centred
        return over_sessions(estimate, self.rewards, self.rewards_valid, self.sessions)

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
