"""The definition of an experiment, and the parts that several papers share: lengths, and the FLOP model of training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dora.config import merged
from dora.data.hardware import find_hardware
from dora.lab.planning.hardware import coefficients, kv_tokens
from dora.lab.planning.models import find_model
from dora.lab.planning.workload import SIGMA, lognormal_of_mean
from dora.lab.sim.scenario import Workload

# Share of the peak FLOP/s that training reaches, by accelerator. H800: Laminar's authors "tune the placement by
# matching the generation and training throughput"; 0.26 is the value (geometric mean over the 15 rows of its table 2)
# at which their own splits match, with the lengths assumed below. DORA's stated 8.0 min on 64 are 0.18. An H20 has a
# seventh of the FLOP/s and more bandwidth, so it reaches more: verl's stated 377 s on 32 are 0.41.
TRAINING_EFFICIENCY: Final = {"h800": 0.26, "h20": 0.41}
UPDATE_PASSES: Final = 6  # FLOP a parameter and token, where the old policy's logprobs come with the response
GRPO_PASSES: Final = UPDATE_PASSES + 2  # where the trainer computes them
PPO_PASSES: Final = 18  # GRPO's, a critic of the same size, and a reference model's logprobs
PROMPT_TOKENS: Final = 150
# Tool calls: Laminar shows its sandbox's latencies in a figure (2) only, verl none. Assumed for both.
SANDBOX: Final = {"environment_mean_s": 5.0, "environment_sigma": 1.0, "answer_tokens": 200}
VERL_SLOTS: Final = 1024  # requests one engine takes at once: verl's default, Laminar's and AReaL's setting


@dataclass(frozen=True, slots=True)
class Placement:
    """How one system uses the accelerators, and its training time on them. ``window`` 0: the experiment's.

    ``in_flight_groups``: at most so many that are generated and not yet handed to the trainer; 0: no limit.
    ``publish_s``: how long its trainer then stands until the new version is there for the engines.
    """

    rollout_gpus: int
    training_s: float
    colocated: bool = False
    engine_gpus: int = 4
    window: int = 0
    in_flight_groups: int = 0
    publish_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of a paper. ``systems``: placements by policy; ``others``: of every policy that the paper does not run.

    ``cluster`` replaces fields that model and accelerators imply.
    """

    gpus: int
    others: Placement
    workload: Workload
    model: str
    hardware: str
    systems: Mapping[str, Placement] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    groups_per_step: int = 512
    window: int = 3
    slots: int = 256
    micro_batches: int = 16

    def placement(self, policy: str) -> Placement:
        return self.systems.get(policy, self.others)

    def tree(self, policy: str) -> dict[str, Any]:
        """Fields of the scenario under ``policy``."""
        placement = self.placement(policy)
        return {
            # none of the papers' systems holds back what its window allows
            "window": {"size": placement.window or self.window, "freshness": 0.0},
            "cluster": {
                "gpus": self.gpus,
                "rollout_gpus": placement.rollout_gpus,
                "gpus_per_engine": placement.engine_gpus,
                "colocated": placement.colocated,
                "slots": self.slots,
                **self.engine(placement.engine_gpus),
            },
            "trainer": {
                "groups_per_step": self.groups_per_step,
                "step_s": placement.training_s,
                "micro_batches": self.micro_batches,
                "publish_s": placement.publish_s,
            },
            "workload": self.workload.model_dump(),
            "in_flight_groups": placement.in_flight_groups,
        }

    def engine(self, gpus: int) -> dict[str, Any]:
        """Fields of a cluster for one engine on ``gpus`` accelerators."""
        model, hardware = find_model(self.model), find_hardware(self.hardware)
        implied = {
            "kv_tokens": kv_tokens(model, hardware, gpus),
            "kv_token_bytes": model.kv_token_bytes,
            "weights_bytes": model.weights_bytes,
            "gpu_memory_bytes": hardware.memory_bytes,
            "cost": coefficients(model, hardware, gpus).model_dump(),
        }
        return merged(implied, self.cluster)


def lognormal(mean_tokens: float, cap_tokens: int, sigma: float = SIGMA, **fields: Any) -> dict[str, Any]:
    """Fields of a workload: lognormal lengths of that mean, cut at ``cap_tokens``, by default with DORA's spread."""
    fit = lognormal_of_mean(mean_tokens, cap_tokens, sigma)
    return {"prompt_tokens": PROMPT_TOKENS, **fields} | {
        "lengths": {"mu": fit.mu, "sigma": fit.sigma, "cap_tokens": cap_tokens}
    }


def flop_training_s(model: str, hardware: str, gpus: int, tokens: float, passes: int = GRPO_PASSES) -> float:
    """Seconds to train ``tokens`` on ``gpus`` accelerators: passes x active parameters x tokens over the FLOP/s."""
    flop = passes * find_model(model).active_parameters * tokens
    return flop / (gpus * find_hardware(hardware).flops * TRAINING_EFFICIENCY[hardware])
