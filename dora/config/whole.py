"""The whole configuration: all sections, and what holds between them."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from dora.config.planning import BalanceConfig, RolloutConfig, SelectionConfig, WindowConfig
from dora.config.processes import ClusterConfig, HostConfig, KvConfig, ServiceConfig, TlsConfig, WorkersConfig
from dora.config.section import Section
from dora.config.tasks import EnvironmentConfig, EvaluationConfig, PromptsConfig, RewardConfig, SessionsConfig
from dora.data.limits import (
    WINDOW_REQUESTS_MAX,
)
from dora.errors import InvalidValue


class Config(Section):
    """Everything that ``dora serve`` needs."""

    model: str = Field(
        "smollm2", min_length=1, description="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder"
    )
    record: str = Field("", description="folder for delivered trajectories and published versions; empty: none")
    record_weights: str = Field(
        "all",
        pattern=r"^(all|none|every [1-9]\d{0,8})$",
        description="versions whose weights the record keeps: all, none, or every N; version 0 and the last two are "
        "always kept",
    )
    cache: str = Field("", description="folder for prepared models; empty: the user's cache folder")
    prompts: PromptsConfig = PromptsConfig()
    window: WindowConfig = WindowConfig()
    rollout: RolloutConfig = RolloutConfig()
    balance: BalanceConfig = BalanceConfig()
    workers: WorkersConfig = WorkersConfig()
    kv: KvConfig = KvConfig()
    host: HostConfig = HostConfig()
    service: ServiceConfig = ServiceConfig()
    tls: TlsConfig = TlsConfig()
    cluster: ClusterConfig = ClusterConfig()
    reward: RewardConfig = RewardConfig()
    sessions: SessionsConfig = SessionsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    selection: SelectionConfig = SelectionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def evaluation_versions(self) -> int:
        """The number of versions that evaluations may keep beyond the window, within the bound of the weight stores."""
        most, kept = self.service.evaluation_versions, int(self.rollout.reference_version > 0)
        if not self.service.weight_versions:
            return most
        return max(0, min(most, self.service.weight_versions - self.window.most - 1 - kept))

    def live_versions(self, kept: int = 0) -> int:
        """The number of versions that a host may have to hold: the window's, the next one, and those of evaluations.

        ``kept`` counts versions of an earlier incarnation, whose window may have been wider.
        """
        return max(self.window.most, kept) + 1 + self.evaluation_versions

    @model_validator(mode="before")
    @classmethod
    def _source_alone(cls, tree: Any) -> Any:
        """Accepts ``prompts = "tiny"``, which older event logs have."""
        if isinstance(tree, Mapping) and isinstance(tree.get("prompts"), str):
            return {**tree, "prompts": {"source": tree["prompts"]}}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> Self:
        longest = self.workers.context_tokens
        if self.rollout.max_tokens >= longest:
            name = "max_model_len_tokens" if self.workers.max_model_len_tokens else "kv_tokens"
            allowed = f"below workers.{name} {longest}, which holds the prompt too"
            raise InvalidValue("rollout.max_tokens", self.rollout.max_tokens, allowed)
        self.check_groups_per_step(self.window.groups_per_step, "window.groups_per_step")
        return self

    def check_groups_per_step(self, groups: int, field: str) -> None:
        """Raises InvalidValue for steps so large that the window would hold more requests than a service can."""
        size, group_size = self.window.most, self.rollout.group_size
        most = WINDOW_REQUESTS_MAX // (size * group_size)
        if groups > most:
            name = "window.max" if self.window.is_adaptive else "window.size"
            why = f"{WINDOW_REQUESTS_MAX:,} requests in {size} versions ({name}) of groups of {group_size}"
            raise InvalidValue(field, groups, f"at most {most}: {why} (rollout.group_size)")
