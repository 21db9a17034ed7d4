"""All patches, in the order in which they apply."""

from collections.abc import Sequence
from typing import Any, Final

import vllm

from dora.engine_patches import exact_resume, interleaved_rope, mapped_weights, moe_experts, quantised, tied_head
from dora.engine_patches.patch import Patch

PATCHES: Final[tuple[Patch, ...]] = (
    exact_resume.PATCH,
    tied_head.PATCH,
    moe_experts.PATCH,
    interleaved_rope.PATCH,
    mapped_weights.PATCH,
    quantised.PATCH,
)


def apply(patches: Sequence[Patch] = PATCHES) -> None:
    """Applies all patches before the engine is created. Raises InvalidValue if a patch does not support this vLLM."""
    for patch in patches:
        patch.check_version(vllm.__version__)
    for patch in patches:
        patch.apply()


def verify(runner: Any, patches: Sequence[Patch] = PATCHES) -> None:
    """Verifies all patches on one rank of a fresh engine. Raises PatchFailed, naming the first that did not take
    effect.
    """
    for patch in patches:
        patch.verify(runner)


def after_reload(model: Any, patches: Sequence[Patch] = PATCHES) -> None:
    """Repairs the state that vLLM leaves stale after a model's weights were replaced in place."""
    for patch in patches:
        patch.after_reload(model)
