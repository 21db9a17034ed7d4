"""The stages of ``dora doctor``, in order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dora.ops.doctor import checks, engine_checks, gpu_checks, images, kv_between, rank_checks
from dora.ops.doctor.verdict import Subject


@dataclass(frozen=True, slots=True)
class Stage:
    """One check. ``run`` returns what it found, or raises Failed or Skipped; other exceptions are failures too.

    The process of a stage that takes longer than ``limit_s`` is ended, and the stage has failed.
    """

    name: str
    meaning: str
    run: Callable[[Subject], dict[str, Any]]
    limit_s: float = 180.0


STAGES: Final[tuple[Stage, ...]] = (
    Stage("environment", "packages, driver, GPUs, and vLLM for every patch", checks.environment),
    Stage("host", "compiler, driver's number, shared memory, and nobody else on the GPUs", gpu_checks.host),
    Stage("every GPU", "each computes and copies, as fast as its data sheet lets expect", gpu_checks.every_gpu),
    Stage("links", "peer access and NVLink between each pair of GPUs", gpu_checks.links),
    Stage("purity", "torch.cuda is torch's own after vLLM is imported", checks.purity),
    Stage("blocks", "KV blocks go to the device and back bit for bit", checks.blocks),
    Stage("engine", "an engine starts, loads weights and samples", engine_checks.engine),
    Stage("speed", "tokens/s of a batch, beside what the memory's bandwidth allows", gpu_checks.speed),
    Stage("reload", "weights A, B, A in place: both A alike bit for bit", engine_checks.reload),
    Stage("neighbours", "a request alone, beside others, and after a hold", engine_checks.neighbours),
    Stage("moves", "a request that leaves with its KV and returns", engine_checks.moves),
    Stage("late copies", "the same while copies into the KV-cache are late", engine_checks.late_copies),
    Stage("invariance", "with batch invariance: neighbours and moves change nothing", gpu_checks.invariance),
    Stage(
        "ranks",
        "engines of two ranks: load, sample, move a request, all of its shards or none",
        rank_checks.ranks,
        limit_s=600.0,
    ),
    Stage("images", "weights in a trainer's GPU, read by another process", images.images),
    Stage("memory", "too large a KV-cache is refused by name", engine_checks.memory),
    Stage("run", "service, workers and trainer for three steps, then `dora verify`", checks.run, limit_s=600.0),
    Stage("two GPUs", "KV between two GPUs by NCCL", checks.two_gpus),
    Stage("kv", "KV of a worker straight into the GPU of another, and a target that dies", kv_between.kv_between),
)
