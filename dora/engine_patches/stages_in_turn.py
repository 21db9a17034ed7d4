"""Model Runner V2 with pipeline stages and one step in flight.

A stage before the last one receives each step's sampled tokens from the last one, and feeds them in a later step. vLLM
has as many steps in flight as there are stages, and takes the tokens from a queue of that length. DORA's engine has one
step in flight, so that nothing runs while a request is frozen or moved: the queue has one place then, as vLLM's own has
on XPUs without micro-batches. Source: vllm/v1/worker/gpu/pp_utils.py, PPHandler.
"""

import functools
from collections import deque
from typing import Any, Final

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "stages_in_turn"
_MARK: Final = "_dora_stages_in_turn"


def _apply() -> None:
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    whole = PPHandler.__init__
    if hasattr(whole, _MARK):
        return

    @functools.wraps(whole)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        if not self.is_last_rank:
            self.queue = deque([None])

    setattr(begin, _MARK, True)
    PPHandler.__init__ = begin


def _verify(runner: Any) -> None:
    handler = runner.pp_handler
    if handler is not None and not handler.is_last_rank and len(handler.queue) != 1:
        raise PatchFailed(NAME, f"a stage feeds tokens of {len(handler.queue)} steps ago")


PATCH: Final = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="with one step in flight a stage feeds the tokens of its last step",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
