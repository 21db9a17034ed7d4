"""Settings of what the core plans: the window, rollouts, balancing, the choice of groups."""

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from dora.config.section import Section, StopTokenId
from dora.data.limits import (
    GROUPS_MAX,
    STOP_TOKENS_MAX,
    STOPS_MAX,
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    Count,
    Fraction,
    GroupSize,
    GroupSizeMin,
    Period,
    PositiveShare,
    Share,
    StepSeconds,
    StopString,
    Timeout,
    Versions,
    check_size_min,
)
from dora.errors import InvalidValue

DEFAULT_POLICY: Final = "laxity"  # docs/strategy.md explains it

WindowSize = Versions | Literal["auto"]


class WindowConfig(Section):
    """The sliding window of policy versions (C3)."""

    size: WindowSize = Field(
        2,
        description="versions that may be live; staleness is at most size - 1; auto: from min to max, as the trainer's "
        "wait and its off-policy signals ask for",
    )
    groups_per_step: int = Field(0, ge=0, le=GROUPS_MAX, description="prompt groups a step takes; 0: the trainer says")
    freshness: Share = Field(
        0.005,
        description="share of a step's time that the trainer may wait for groups to begin later, under newer versions; "
        "0: they begin as early as the window allows; size auto: more than this while staleness costs more",
    )
    min: Versions = Field(1, description="auto: the narrowest window, with which a run begins")
    max: Versions = Field(4, description="auto: the widest window")
    wait_share: PositiveShare = Field(
        0.02, description="auto: a wider window is tried where the trainer waits for more of a step than this"
    )
    clip_fraction_max: Share = Field(0.2, description="auto: a narrower window where more of the tokens are clipped")
    effective_sample_min: Share = Field(
        0.5, description="auto: a narrower window where the effective sample size is below this"
    )
    staleness_cost: float = Field(
        0.9,
        ge=0.0,
        le=1000.0,
        description="auto: share of the samples that a version of staleness costs, divided by the square root of the "
        "policy's movement in a step (the metric movement, in nats); about 2.7 for the objective dapo; 0: staleness is "
        "taken to cost nothing",
    )
    look_steps: int = Field(4, ge=1, le=256, description="auto: steps that are looked at before a change")
    rest_steps: int = Field(
        64, ge=0, le=1024, description="auto: steps until a window that was of no use is tried again; twice each time"
    )

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.min > self.max:
            raise InvalidValue("window.max", self.max, f"at least window.min, {self.min}")
        return self

    @property
    def is_adaptive(self) -> bool:
        return self.size == "auto"

    @property
    def least(self) -> int:
        return self.min if self.size == "auto" else self.size

    @property
    def most(self) -> int:
        return self.max if self.size == "auto" else self.size


class RolloutConfig(Section):
    """The sampling of responses, unless their prompt says otherwise."""

    group_size: GroupSize = Field(8, description="responses per prompt")
    group_size_min: GroupSizeMin = Field(
        0, description="of these, so many start at once, and the rest once two rewards differ; 0: all start at once"
    )
    max_tokens: int = Field(256, ge=1, le=1 << 22, description="longest response")
    temperature: float = Field(
        1.0, ge=0.0, le=TEMPERATURE_MAX, description="of sampling; 0: the likeliest token, else at least 0.01"
    )
    top_p: PositiveShare = Field(1.0, description="sample from the likeliest tokens of this total probability")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="sample from so many likeliest tokens; 0: no limit")
    min_p: Share = Field(0.0, description="least probability of a token, as a share of the likeliest's")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="of the logit of a token that has occurred")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="the same, for each time it has")
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0, description="factor of such a logit; 1: none")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token, to the longest response")
    stop: tuple[StopString, ...] = Field(
        (), max_length=STOPS_MAX, description="texts that end a response: at most 16, of 1 to 128 characters each"
    )
    stop_token_ids: tuple[StopTokenId, ...] = Field(
        (), max_length=STOP_TOKENS_MAX, description="token ids that end a response: at most 64"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="every response's seed follows from this and its prompt id")
    reference_version: int = Field(0, ge=0, description="the frozen version a KL term refers to")

    @model_validator(mode="after")
    def _is_sampled_as_it_says(self) -> Self:
        if 0.0 < self.temperature < TEMPERATURE_MIN:  # an engine would raise it
            raise InvalidValue("rollout.temperature", self.temperature, f"0, or a number from {TEMPERATURE_MIN:g} on")
        return self

    @model_validator(mode="after")
    def _starts_some_at_once(self) -> Self:
        check_size_min(self.group_size_min, self.group_size, "rollout.group_size_min")
        return self


class CostConfig(Section):
    """Cost of one engine step (dora/core/forecast/cost.py defines the coefficients)."""

    kv_token_s: StepSeconds = Field(description="k1: a step's seconds for each cached token")
    weights_s: StepSeconds = Field(description="k2: a step's seconds to read the weights")
    request_s: StepSeconds = Field(description="k3: a step's seconds for each running request")
    step_s: StepSeconds = Field(description="k4: a step's other seconds")
    prefill_token_s: StepSeconds = Field(0.0, description="seconds for each prefilled token")
    copy_token_s: StepSeconds = Field(1e-5, description="seconds to copy a token's KV into a pool, or out of it")
    state_s: StepSeconds = Field(0.0, description="a step's seconds for each running request's state; 0: there is none")
    copy_state_s: StepSeconds = Field(0.0, description="seconds to copy a request's state into a pool, or out of it")
    expert_fraction: float = Field(1.0, ge=1e-6, le=1.0, description="share of the experts one token reads; 1: dense")
    imbalance: float = Field(0.0, ge=0.0, le=1e4, description="extra k3 from uneven experts, times 1/sqrt(requests)")
    shared_fraction: Fraction = Field(0.0, description="share of the weights that every token reads")
    draft_acceptance: float = Field(
        0.0, ge=0.0, le=0.99, description="probability that a drafted token is accepted; 0: engines draft none"
    )
    draft_verify_s: StepSeconds = Field(0.0, description="a step's seconds to verify drafts at all")

    def check(self, place: str) -> None:
        """Raises InvalidValue if a step takes no time: no forecast would be possible, and a simulated engine would
        generate without end at one moment. ``place`` names this section.
        """
        if self.kv_token_s + self.weights_s + self.request_s + self.state_s + self.step_s <= 0.0:
            raise InvalidValue(f"{place}.step_s", self.step_s, "above 0 where k1, k2 and k3 are 0 too")


class DoraConfig(Section):
    """Settings of the strategy ``dora`` only."""

    hysteresis: Share = Field(0.6, description="share of a worker that a periodic change must be worth")
    level_gap: Count = Field(2, description="difference of requests between workers that is levelled, if it gains")


class BalanceConfig(Section):
    """Re-balancing and handoff."""

    policy: str = Field(DEFAULT_POLICY, description="strategy by name: see dora.core.policies")
    predictor: Literal["oracle", "statistics", "ranker"] = Field(
        "statistics", description="of response lengths; oracle: the simulator's, which knows them, and no service's"
    )
    cost: CostConfig | None = Field(None, description="of one engine's steps, as `dora profile` prints it")
    period_s: Period = Field(30.0, description="time between two periodic re-balancings")
    pressure: PositiveShare = Field(0.9, description="KV use above which a worker is relieved")
    handoff_timeout_s: Timeout = Field(30.0, description="after this a handoff is undone")
    moves_at_once: int = Field(64, ge=1, le=1 << 16, description="handoffs in flight")
    dora: DoraConfig = DoraConfig()

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.cost is not None:
            self.cost.check("balance.cost")
        return self


class SelectionConfig(Section):
    """Groups that are started and not trained on: off by default, each recorded with its reason."""

    filter: str = Field(
        "",
        pattern=r"^(|equal_rewards|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="equal_rewards (scored groups that teach nothing are let go), module:function, or empty: none",
    )
    redundant_fraction: Share = Field(
        0.0, description="a step's slowest groups that finished later ones may replace; they are cancelled"
    )
