"""The patches of an engine on a CPU, in the order in which they apply."""

from typing import Final

from dora.engine_patches import mapped_weights
from dora.engine_patches.cpu import (
    delta_net,
    elementwise,
    exact_resume,
    interleaved_rope,
    moe_experts,
    own_noise,
    quantised_scales,
    tied_head,
)
from dora.engine_patches.patch import Patch

PATCHES: Final[tuple[Patch, ...]] = (
    exact_resume.PATCH,
    own_noise.PATCH,
    tied_head.PATCH,
    moe_experts.PATCH,
    interleaved_rope.PATCH,
    mapped_weights.PATCH,
    quantised_scales.PATCH,
    delta_net.PATCH,
    elementwise.PATCH,
)
