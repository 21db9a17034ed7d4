"""StreamRL's experiments (section 7)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dora.lab.sim.scenario import Workload
from experiments import papers
from experiments.base import PPO_PASSES, PROMPT_TOKENS, Experiment, Placement, flop_training_s, lognormal


@dataclass(frozen=True, slots=True)
class _Size:
    gpus: int
    rollout_gpus: int
    engine_gpus: int


# PPO, 1,024 prompts with one response each, three models, and lengths of 20K or "proportionally scaled down by two and
# four". Assumed: a mean of 6K, and engines like those of Laminar's baselines. Neither the ablation (72B at 20K) nor
# figure 8 gives accelerators or splits: assumed are the testbed's 128, for 7B the 32 of section 7.2, and in whole nodes
# the split where a batch generated takes about as long as its training. Asynchronous by one step: window 2.
_SIZES: Final = {"7b": _Size(32, 16, 2), "32b": _Size(128, 104, 4), "72b": _Size(128, 80, 8)}
_SCALED_BY: Final = {"5k": 4, "10k": 2, "20k": 1}


def _streamrl(size: str, length: str) -> Experiment:
    model, hardware, layout, scaled_by = f"qwen2.5-{size}", "h800", _SIZES[size], _SCALED_BY[length]
    mean_tokens, cap_tokens = 6000 // scaled_by, 20 * 1024 // scaled_by
    tokens = 1024 * (mean_tokens + PROMPT_TOKENS)

    def training_s(train_gpus: int) -> float:
        return flop_training_s(model, hardware, train_gpus, tokens, PPO_PASSES)

    return Experiment(
        layout.gpus,
        others=Placement(
            layout.rollout_gpus, training_s(layout.gpus - layout.rollout_gpus), engine_gpus=layout.engine_gpus
        ),
        workload=Workload.model_validate(lognormal(mean_tokens, cap_tokens, group_size=1)),
        systems={"sync": Placement(layout.gpus, training_s(layout.gpus), True, engine_gpus=layout.engine_gpus)},
        model=model,
        hardware=hardware,
        groups_per_step=1024,
        window=2,
    )


def _name(size: str, length: str) -> str:
    """The ablation's setting has the shortest name."""
    return "streamrl-128" if (size, length) == ("72b", "20k") else f"streamrl-{size}-{_SIZES[size].gpus}-{length}"


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    _name(size, length): _streamrl(size, length) for size in papers.STREAMRL_SIZES for length in papers.STREAMRL_LENGTHS
}
