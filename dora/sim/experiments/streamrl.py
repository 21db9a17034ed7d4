"""StreamRL's experiments (paper 002, section 7)."""

from collections.abc import Mapping
from typing import Final

from dora.sim.experiments.base import PPO_PASSES, PROMPT_TOKENS, Experiment, Placement, flop_training_s, lognormal
from dora.sim.scenario import Workload


# StreamRL's ablation is of the 72B model at 20K: PPO, 1,024 prompts with one response each. Assumed: a mean of 6K and
# 48:80, where a batch generated on 80 takes about as long as its training on 48. Asynchronous by one step: window 2.
def _streamrl() -> Experiment:
    gpus, rollout_gpus, model, hardware, mean_tokens = 128, 80, "qwen2.5-72b", "h800", 6000
    tokens = 1024 * (mean_tokens + PROMPT_TOKENS)

    def training_s(train_gpus: int) -> float:
        return flop_training_s(model, hardware, train_gpus, tokens, PPO_PASSES)

    return Experiment(
        gpus,
        others=Placement(rollout_gpus, training_s(gpus - rollout_gpus), engine_gpus=8),
        workload=Workload.model_validate(lognormal(mean_tokens, 20 * 1024, group_size=1)),
        systems={"sync": Placement(gpus, training_s(gpus), True, engine_gpus=8)},
        model=model,
        hardware=hardware,
        groups_per_step=1024,
        window=2,
    )


EXPERIMENTS: Final[Mapping[str, Experiment]] = {"streamrl-128": _streamrl()}
