"""Were other experts chosen than here, where rounding decides which? Loads torch."""

from typing import Any, Final

from dora.data.trajectory import Float32Array, Trajectory
from dora.models.routers import Tie, has_routers, watched
from dora.verify.recompute import difference, recomputed_logprobs

TIE: Final = 0.1  # router logits closer than this share of what logprobs may differ by are a tie
RUNS_MAX: Final = 64  # of the model, for one trajectory


def with_choices_turned(module: Any, trajectory: Trajectory, atol: float) -> tuple[Float32Array, int] | None:
    """The logprobs with tied choices of experts made as the recorded ones show them to be, and how many were turned.

    One after the other, from the first token that is more than ``atol`` apart: the one that brings it within. None
    where no choice does, where the model has no routers, or after ``RUNS_MAX`` runs.
    """
    if not has_routers(module):
        return None
    prompt = len(trajectory.prompt_token_ids)
    turned: list[Tie] = []
    logprobs, ties = _run(module, trajectory, TIE * atol, turned)
    apart, runs = _first_apart(trajectory, logprobs, atol), 1
    while apart is not None:
        for tie in sorted(ties, key=lambda tie: tie.margin):
            if tie.token >= prompt + apart or runs == RUNS_MAX:  # comes after it, and causes nothing before
                continue
            runs += 1
            tried, next_ties = _run(module, trajectory, TIE * atol, [*turned, tie])
            later = _first_apart(trajectory, tried, atol)
            if later is None or later > apart:
                turned.append(tie)
                logprobs, ties, apart = tried, next_ties, later
                break
        else:
            return None
    return logprobs, len(turned)


def _run(module: Any, trajectory: Trajectory, margin: float, turned: list[Tie]) -> tuple[Float32Array, list[Tie]]:
    with watched(module, margin, turned) as ties:
        ((_, logprobs),) = recomputed_logprobs(module, [trajectory])
    return logprobs, ties


def _first_apart(trajectory: Trajectory, logprobs: Float32Array, atol: float) -> int | None:
    """The first response token whose logprob is not as recorded."""
    apart = difference(trajectory, logprobs) > atol
    return int(apart.argmax()) if apart.any() else None
