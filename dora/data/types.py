"""Plain data shared by every part. This module imports nothing of DORA and nothing heavy.

Units are in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_tokens`` tokens, ``_bytes`` bytes.
A *request* is one response being generated; its id is the trajectory's id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

FinishReason = Literal["stop", "length"]
FINISH_REASONS: Final[tuple[FinishReason | None, ...]] = (None, "stop", "length")  # by their numbers in columns
Arrival = Literal["new", "migrated", "parked", "re-prefilled"]
ALARM: Final = "alarm_"  # a metric "alarm_x" says that metric x is above this bound
SamplingValue = float | int | bool | tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one response. ``seed`` is always explicit, so that a response can be resumed exactly."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of these
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # a response ends with the token that completes the first of these in its text


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The place of a token to sample: ``number`` counts in its response, ``position`` in prompt and response."""

    sampling: SamplingParams
    number: int
    position: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, sampled ``group_size`` times under one policy version."""

    prompt_id: str
    task_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    group_size: int = 0  # 0: the service's default
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict)  # overrides of SamplingParams fields
    verifier_json: str = "{}"  # whatever the reward function needs: the answer, the entry, ...
    priority: int = 0  # of those that wait, the highest is admitted first
    environment: str = ""  # drives its responses, which are sessions of several turns; empty: single answers
    group_size_min: int = 0  # responses that start at once, the rest once rewards differ; 0: the service's default

    @property
    def at_once(self) -> int:
        """The number of responses that start at the group's admission, once the service has checked the prompt."""
        return self.group_size_min or self.group_size


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """The address and transports for KV snapshots to a worker."""

    address: str = ""  # host:port; empty: nowhere
    transports: tuple[str, ...] = ()  # that it could use


NO_KV: Final = KvEndpoint()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """An engine's input to generate or continue one response.

    ``output_token_ids`` and ``logprobs`` were already delivered: a resumed request keeps them as *outputs*, so
    penalties, ``max_tokens`` and the seeded random stream continue.

    A session of several turns is one request. Its outputs alternate between runs of sampled and of *given* tokens
    (tool results, user turns); the logprobs of environment tokens are 0. The present turn begins after the last given
    run, and ``sampling`` is its own.
    """

    request_id: str
    version: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    keeps: bool = False  # at the end of a turn the engine keeps the request, which may then be extended
    inputs: tuple[tuple[int, int], ...] = ()  # the input runs among the outputs, in order: (first, one after the last)
    kept: bool = False  # its present turn has ended, and an engine keeps it
    prompt_logprobs: bool = False  # with the first token of the present turn come the logprobs of all before it

    @property
    def owes_prompt(self) -> bool:
        """Returns whether the prompt logprobs of the present turn were asked for and are still to come."""
        return self.prompt_logprobs and len(self.output_token_ids) == self.turn_begin

    @property
    def turn_begin(self) -> int:
        """The index of the present turn's first sampled token among the outputs."""
        return self.inputs[-1][1] if self.inputs else 0

    @property
    def pending(self) -> int:
        """The number of environment tokens at the end, after which nothing was sampled yet."""
        return pending_of(self.inputs, len(self.output_token_ids))

    def turn(self) -> "RequestSpec":
        """Returns the present turn as a request, whose prompt is everything before it."""
        begin = self.turn_begin
        return replace(
            self,
            prompt_token_ids=self.prompt_token_ids + self.output_token_ids[:begin],
            output_token_ids=self.output_token_ids[begin:],
            logprobs=self.logprobs[begin:],
            inputs=(),
        )

    def extended(
        self,
        given_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        after: int | None = None,
        prompt_logprobs: bool = False,
    ) -> "RequestSpec":
        """Returns the request with a next turn, which is sampled as ``sampling`` says. It follows the first ``after``
        outputs, without the later ones, or all if None.
        """
        after = len(self.output_token_ids) if after is None else after
        return replace(
            self,
            sampling=sampling,
            output_token_ids=self.output_token_ids[:after] + given_token_ids,
            logprobs=self.logprobs[:after] + (0.0,) * len(given_token_ids),
            inputs=tuple(inputs_after(self.inputs, after, len(given_token_ids))),
            kept=False,
            prompt_logprobs=prompt_logprobs,
        )


def inputs_after(inputs: Iterable[tuple[int, int]], after: int, tokens: int) -> list[tuple[int, int]]:
    """Returns a response's input runs, joined, if ``after`` outputs stay and so many given ones follow them."""
    stay = [(first, min(end, after)) for first, end in inputs if first < after]
    first = stay.pop()[0] if stay and stay[-1][1] == after else after
    return [*stay, (first, after + tokens)]


def pending_of(inputs: tuple[tuple[int, int], ...], outputs: int) -> int:
    """Returns the number of environment tokens at the end of so many outputs."""
    return outputs - inputs[-1][0] if inputs and inputs[-1][1] == outputs else 0


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The choices of a mixture's routers for one token: ``top_k`` of ``experts``, in each of ``layers``.

    A *row* holds those of one token: the layers with experts in the model's order, ``top_k`` expert ids of each,
    unsigned little-endian of ``id_bytes``. Tokens are fed to a model to sample the next ones, so a response whose
    prompt has p tokens has p rows with its first token and one more with each further token; its last token was never
    fed.
    """

    layers: int  # that have experts
    top_k: int
    experts: int

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top_k * self.id_bytes

    @staticmethod
    def rows(prompt_tokens: int, tokens: int) -> int:
        return prompt_tokens + tokens - 1 if tokens else 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request since the last step. ``logprobs`` are the model's own (before temperature)."""

    request_id: str
    version: int  # the weights that sampled these tokens
    first_token: int  # index of token_ids[0] within the response
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that these tokens completed
    # expert rows of the tokens that were fed to sample these; empty: routing is not recorded
    routed_experts: bytes = b""
    # float32, one for each token before the turn that these begin, but the first; empty: they were not asked for
    prompt_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineNumerics:
    """The settings that decide how the sampling engines round a version's logprobs.

    An empty ``quantisation`` is none. If ``batch_invariant``, a request's logits do not depend on its neighbours. An
    empty ``kv_dtype`` is ``dtype``.
    """

    quantisation: str = ""
    dtype: str = "float32"
    batch_invariant: bool = False
    kv_dtype: str = ""

    @property
    def is_low(self) -> bool:
        """Whether weights or KV have less than the precision of ``dtype``."""
        return bool(self.quantisation or self.kv_dtype)

    @property
    def precision(self) -> str:
        """The lower precision in words, or an empty text."""
        kv = f"KV in {self.kv_dtype}" if self.kv_dtype else ""
        return ", ".join(filter(None, (self.quantisation, kv)))

    def full(self) -> "EngineNumerics":
        """Returns the same in full precision."""
        return replace(self, quantisation="", kv_dtype="")


PLAIN_NUMERICS: Final = EngineNumerics()


@dataclass(frozen=True, slots=True)
class EngineCapability:
    """The capacity of a worker's engine; sent once at registration."""

    fingerprint: str  # hash of the model's config and tensor names/shapes, dtype, and KV layout but for a block's size
    slots: int  # requests decoded at once
    kv_tokens: int  # tokens that fit in the KV-cache
    block_tokens: int
    max_model_len_tokens: int
    vocab_size: int
    dtype: str
    kv_token_bytes: int = 0  # KV of one token, rounded up; 0: not known
    state_bytes: int = 0  # of one request, of the layers that keep a state
    tensor_parallel: int = 1  # ranks that share each layer
    pipeline_parallel: int = 1  # stages, each of so many ranks
    full_precision: bool = False  # it was started without the service's quantisation and KV dtype


@dataclass(frozen=True, slots=True)
class PoolCapability:
    """The capacity of a pool for parked requests' KV."""

    memory_bytes: int
    spill_bytes: int  # on disk


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One worker's use of the shared KV tier; numbers are cumulative."""

    up: bool = False
    found_tokens: int = 0  # tokens whose KV came from the tier
    kept_tokens: int = 0  # tokens whose KV this worker stored there
    damaged_chunks: int = 0  # found damaged: computed instead
    losses: int = 0  # times that the tier went down


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A momentary view of one engine."""

    running: int
    waiting: int
    kv_used_tokens: int
    reprefilled_tokens: int  # cumulative: tokens whose KV was computed a second time
    generated_tokens: int  # cumulative
    tier: TierLoad | None = None  # None: it has no shared tier
    preemptions: int = 0  # cumulative: requests that lost their KV because it was full
    state_bytes: int = 0  # of the states that sessions may return to, in host memory
    states_dropped: int = 0  # cumulative: those that had no room there
    drafted_tokens: int = 0  # cumulative: that were verified
    accepted_tokens: int = 0  # cumulative: drafted tokens that were sampled

    @property
    def tokens_per_step(self) -> float:
        """The tokens of a request in a step of the engine, above 1 by accepted drafts; 0 if none were drafted."""
        steps = self.generated_tokens - self.accepted_tokens
        return self.generated_tokens / steps if self.drafted_tokens and steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed prompt and its logprobs under one version, published with the weights.

    ``logprobs[i]`` is the natural log probability of ``token_ids[i + 1]`` given ``token_ids[: i + 1]``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Segment(NamedTuple):
    """The tokens ``[first_token, last_token]`` of one response on one worker, and how the request arrived there."""

    worker_id: str
    first_token: int
    last_token: int
    arrival: Arrival
    version: int


INPUT: Final = "given"  # a kind of event: tokens that an environment gave


@dataclass(frozen=True, slots=True)
class EnvironmentEvent:
    """An event within a response: a turn that an environment began."""

    position_token: int  # index of the first response token after the event
    kind: str
    name: str  # of what gave the tokens
    content: str
    at: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True)
class Reward:
    """A verifier's verdict. ``valid`` is False when the function raised, hung or returned no finite number:

    the trajectory is still delivered (nothing admitted is dropped), its reward must not be trained on.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    log: str = ""
    valid: bool = True
    turns: Mapping[int, float] = field(default_factory=dict)  # of a session: rewards of single turns, by number
