"""The layout of a model over ranks: the sizes of Megatron's parallel groups, and this rank's place in them."""

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dora.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups. The rest of the world is data parallelism: ``world / (tp * pp * cp)``."""

    tp: int = 1  # tensor: ranks that share each layer
    pp: int = 1  # pipeline: stages of layers
    ep: int = 1  # expert: ranks that share a layer's experts
    cp: int = 1  # context: ranks that share each sequence
    etp: int = 1  # expert tensor: ranks that share each expert

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 1:
                raise InvalidValue(f"--{each.name}", getattr(self, each.name), "1 or more")

    def check(self, world: int) -> None:
        """Raises InvalidValue if ``world`` ranks cannot be divided this way."""
        for names in (("tp", "pp", "cp"), ("etp", "pp", "ep")):
            size = 1
            for name in names:
                size *= getattr(self, name)
            if world % size:
                product = " * ".join(f"--{name}" for name in names)
                raise InvalidValue(product, size, f"a divisor of the number of ranks, {world}")


@dataclass(frozen=True, slots=True)
class Place:
    """This rank in each of Megatron's groups. Ranks of one data-parallel shard train on the same rows."""

    rank: int
    world: int
    layout: Layout
    tp: int
    pp: int
    cp: int
    dp: int
    dp_size: int
    ep: int
    etp: int
    expert_dp: int  # index of its copy of the experts

    @property
    def is_last_stage(self) -> bool:
        return self.pp == self.layout.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank reports the sums of its data-parallel shard."""
        return self.is_last_stage and self.tp == 0 and self.cp == 0

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The part of the weights that this rank has: ranks with the same part hold copies."""
        return self.pp, self.tp, self.ep, self.etp


def begin(layout: Layout, timeout_s: float = 600.0) -> Place:
    """Makes Megatron's groups in an existing process group. Raises InvalidValue as :meth:`Layout.check`.

    ``timeout_s`` limits a training collective.
    """
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout.check(dist.get_world_size())
    groups.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(int(timedelta(seconds=timeout_s).total_seconds() // 60), 1),
    )
    model_parallel_cuda_manual_seed(0)  # Megatron requires it; dropout is off, so nothing is drawn
    return Place(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        layout=layout,
        tp=groups.get_tensor_model_parallel_rank(),
        pp=groups.get_pipeline_model_parallel_rank(),
        cp=groups.get_context_parallel_rank(),
        dp=groups.get_data_parallel_rank(),
        dp_size=groups.get_data_parallel_world_size(),
        ep=groups.get_expert_model_parallel_rank(),
        etp=groups.get_expert_tensor_parallel_rank(),
        expert_dp=groups.get_expert_data_parallel_rank(),
    )


def own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def group_of(name: str) -> Any:
    """Returns Megatron's process group: ``tp``, ``cp``, ``etp`` or ``dp``."""
    from megatron.core import parallel_state as groups

    found = {
        "tp": groups.get_tensor_model_parallel_group,
        "cp": groups.get_context_parallel_group,
        "etp": groups.get_expert_tensor_parallel_group,
        "dp": groups.get_data_parallel_group,
    }
    return found[name]()
