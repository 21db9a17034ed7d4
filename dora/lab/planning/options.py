"""The possible parallel configurations of a trainer, and the fastest of them for a number of accelerators."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product, starmap
from math import ceil, gcd, inf, lcm
from typing import Final

from dora.data.hardware import Hardware
from dora.lab.planning.hardware import NODE_GPUS
from dora.lab.planning.layout import Footprint, Replica, ReplicaLayout, footprints, limit_bytes, stages
from dora.lab.planning.models import ModelSpec
from dora.lab.planning.pace import Batch, ReplicaPace, pace

CONTEXTS: Final = (1, 2, 4, 8)  # ranks that share a sequence
# Limit of a micro-batch into which shorter responses are packed: smaller ones would be dominated by launches.
PACKED_TOKENS: Final = 16_384


@dataclass(frozen=True, slots=True)
class Option:
    """One way to divide a replica. ``even`` is its pace if its layers could be cut anywhere."""

    replica: Replica
    footprints: tuple[Footprint, ...]
    least_data: float  # minimum number of replicas for which it fits, not rounded
    pace: ReplicaPace
    even: ReplicaPace

    @property
    def data_step(self) -> int:
        """The number of replicas is a multiple of it, so that ranks sharing experts form whole groups."""
        return self.replica.expert // gcd(self.replica.expert, self.replica.tensor * self.replica.context)

    def fits(self, gpus: int) -> bool:
        """Whether whole replicas fit on exactly ``gpus`` accelerators."""
        data, rest = divmod(gpus, self.replica.gpus)
        return not rest and data >= self.least_data and not data % self.data_step

    def least_gpus(self, multiple: int) -> int:
        step = lcm(self.data_step, multiple // gcd(multiple, self.replica.gpus))
        return self.replica.gpus * step * ceil(self.least_data / step)

    def layout(self, gpus: int) -> ReplicaLayout:
        data = gpus // self.replica.gpus
        return ReplicaLayout(self.replica, data, max(part.on(data) for part in self.footprints))

    def step_s(self, gpus: int) -> float:
        """Relative time of a step on ``gpus`` accelerators, which whole replicas fill."""
        return self.pace.step_s(gpus // self.replica.gpus)


def options(model: ModelSpec, hardware: Hardware, batch: Batch, context: int) -> tuple[Option, ...]:
    """All ways to divide a replica, with ``context`` ranks per sequence, that fit on some number of accelerators."""
    found = []
    for replica in replicas(model, batch.longest_tokens, context):
        parts = footprints(model, replica)
        least_data = max(part.least_data(limit_bytes(hardware)) for part in parts)
        if least_data < inf:
            paces = (pace(model, hardware, batch, replica, even) for even in (False, True))
            found.append(Option(replica, parts, least_data, *paces))
    return tuple(found)


def replicas(model: ModelSpec, longest_tokens: int, context: int) -> Iterable[Replica]:
    """All ways to divide a replica: heads and experts evenly, blocks over the stages of a pipeline.

    A micro-batch is one longest response, or several with as many tokens.
    """
    tensors = [ranks for ranks in (1, 2, 4, 8) if ranks <= NODE_GPUS and not model.kv_heads % ranks]
    experts = [1 << power for power in range(model.experts.bit_length()) if not model.experts % (1 << power)]
    longest = [longest_tokens << power for power in range(PACKED_TOKENS.bit_length())]
    micro_batches = [tokens for tokens in longest if tokens <= PACKED_TOKENS] or [longest_tokens]
    pipelines = range(1, model.blocks + 1)
    return starmap(Replica, product(tensors, pipelines, [context], experts or [1], [False, True], micro_batches))


def best(options: Iterable[Option], gpus: int) -> Option | None:
    """The fastest option that fits on exactly ``gpus`` accelerators; ties go to the least divided."""
    fitting = (option for option in options if option.fits(gpus))
    return min(fitting, key=lambda option: (option.step_s(gpus), option.replica), default=None)


def even_s(options: Iterable[Option], gpus: int) -> float:
    """The shortest step if replicas, layers and groups of experts could be fractional."""
    replicas = ((option, gpus / option.replica.gpus) for option in options)
    return min(option.even.step_s(data) for option, data in replicas if data >= option.least_data)


def shortest_pipelines(model: ModelSpec) -> frozenset[int]:
    """The shortest of the pipelines with equally many layers in the fullest stage, as longer ones only wait longer."""
    return frozenset({stages(model, count)[0].layers: count for count in range(model.blocks, 0, -1)}.values())


def longest_that_fits(model: ModelSpec, hardware: Hardware, too_long: int) -> int:
    """The most tokens, below ``too_long``, for which some layout has room for a micro-batch; 0 if there is none."""
    limit = limit_bytes(hardware)

    def too_many(tokens: int) -> bool:
        divided = (replica for context in CONTEXTS for replica in replicas(model, tokens, context))
        return not any(all(part.fixed_bytes < limit for part in footprints(model, replica)) for replica in divided)

    return bisect_left(range(1, too_long), True, key=too_many)
