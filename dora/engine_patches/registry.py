"""Applies and verifies the patches of an engine; its device chooses them (``dora/worker/vllm/device``)."""

from collections.abc import Sequence
from typing import Any

import vllm

from dora.engine_patches.patch import Patch


def apply(patches: Sequence[Patch]) -> None:
    """Applies all patches before the engine is created. Raises InvalidValue if a patch does not support this vLLM."""
    for patch in patches:
        patch.check_version(vllm.__version__)
    for patch in patches:
        patch.apply()


def verify(runner: Any, patches: Sequence[Patch]) -> None:
    """Verifies all patches on one rank of a fresh engine. Raises PatchFailed, naming the first without effect."""
    for patch in patches:
        patch.verify(runner)


def after_reload(model: Any, patches: Sequence[Patch]) -> None:
    """Repairs the state that vLLM leaves stale after a model's weights were replaced in place."""
    for patch in patches:
        patch.after_reload(model)
