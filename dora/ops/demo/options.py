"""The options of a demo, and the service's configuration that follows from them."""

import os
from dataclasses import dataclass
from pathlib import Path

from dora.client.replay import ReplayBy, ReplayPlanner
from dora.config import Config, WindowSize, load_config, overrides_of
from dora.errors import InvalidValue
from dora.ops.demo.folder import OutFolder
from dora.ops.demo.held_out import has_held_out
from dora.ops.demo.presets import DemoPreset, preset

DRAIN_TIMEOUT_S = 0.0  # the trainer has all its groups by then, so unfinished requests may end


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of a demo. One that is None takes the value of the model's preset."""

    model: str
    out: Path
    steps: int | None = None
    groups: int | None = None
    group_size: int | None = None
    window: WindowSize | None = None
    workers: int | None = None
    max_tokens: int | None = None
    speculation: str | None = None
    learning_rate: float | None = None
    seed: int = 0
    settings: tuple[str, ...] = ()  # overrides of the service's configuration, "section.field=value"
    kill_worker_after_s: float | None = None
    replay_share: float = 0.0  # of the groups trained on; 0: none is trained on once more
    replay_by: ReplayBy = "age"
    evaluate_every: int | None = None  # steps; 0: no evaluations; None: a quarter of the run
    is_agent: bool = False  # sessions of several turns with a tool in place of single answers
    trainer_arguments: tuple[str, ...] = ()  # for ``python -m dora.trainers.grpo``, after the demo's own

    def __post_init__(self) -> None:
        """Raises InvalidValue for options that the service's configuration would not check."""
        for name in ("steps", "groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"--{name}", value, "1 or more")
        if self.evaluate_every is not None and self.evaluate_every < 0:
            raise InvalidValue("--evaluate-every", self.evaluate_every, "0 or more steps")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise InvalidValue("--lr", self.learning_rate, "above 0")
        if self.kill_worker_after_s is not None and self.kill_worker_after_s < 0:
            raise InvalidValue("--kill-worker-after", self.kill_worker_after_s, "0 or more seconds")
        if self.replay_share:
            ReplayPlanner(self.replay_share, self.replay_by)  # raises InvalidValue

    @property
    def preset(self) -> DemoPreset:
        return preset(self.model, is_agent=self.is_agent)

    @property
    def steps_planned(self) -> int:
        return self.preset.steps if self.steps is None else self.steps

    @property
    def evaluation_period(self) -> int:
        """The number of steps from one evaluated version to the next; 0 if none is evaluated."""
        return max(1, self.steps_planned // 4) if self.evaluate_every is None else self.evaluate_every

    @property
    def rate(self) -> float:
        return self.preset.learning_rate if self.learning_rate is None else self.learning_rate


def service_config(options: DemoOptions, folder: OutFolder) -> Config:
    """The preset, overridden by ``options.settings`` and then by the given options. Raises like ``load_config``."""
    chosen = options.preset
    defaults = overrides_of(
        {
            "prompts": chosen.prompts,
            "environment.spec": chosen.environment or None,
            "window.size": chosen.window,
            "window.groups_per_step": chosen.groups,
            "rollout.group_size": chosen.group_size,
            "rollout.max_tokens": chosen.max_tokens,
            "rollout.temperature": chosen.temperature,
            "rollout.seed": options.seed,
            "balance.policy": chosen.policy,
            "balance.period_s": chosen.period_s,
            "workers.count": chosen.workers,
            "workers.slots": chosen.slots,
            "workers.kv_tokens": chosen.kv_tokens,
            "workers.max_model_len_tokens": chosen.max_model_len_tokens,
            "service.listen": "127.0.0.1:0",
            "service.drain_timeout_s": DRAIN_TIMEOUT_S,
        }
    )
    own = overrides_of(
        {
            "model": options.model,
            "record": str(folder.record),
            "service.token": os.environ.get("DORA_TOKEN") or None,
            "window.size": options.window,
            "window.groups_per_step": options.groups,
            "rollout.group_size": options.group_size,
            "rollout.max_tokens": options.max_tokens,
            "workers.count": options.workers,
            "workers.speculation": options.speculation,
        }
    )
    config = load_config(None, [*defaults, *options.settings, *own])
    if options.evaluation_period and not config.evaluation.prompts and has_held_out(config.prompts.source):
        held_out = overrides_of(
            {"evaluation.prompts": str(folder.held_out), "evaluation.every": options.evaluation_period}
        )
        config = load_config(None, [*defaults, *held_out, *options.settings, *own])
    if config.workers.engine == "fake":
        raise InvalidValue("workers.engine", "fake", "vllm: a demo's trainer learns from what the model samples")
    return config
