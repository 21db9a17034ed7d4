"""Checks whether other experts were chosen where rounding decides. Loads torch."""

from typing import Any, Final

from dora.data.trajectory import Float32Array, Trajectory
from dora.models.routers import Tie, has_routers, watched
from dora.ops.verify.recompute import difference, recomputed_logprobs

TIE: Final = 0.1  # router logits are tied if they are closer than this share of the logprobs' tolerance
RUNS_MAX: Final = 64  # runs of the model for one trajectory


def with_choices_turned(module: Any, trajectory: Trajectory, atol: float) -> tuple[Float32Array, int] | None:
    """The logprobs with tied expert choices reversed to match the recorded ones, and the number of reversed choices.

    Choices are reversed one at a time: at the first token that differs by more than ``atol``, the choice that brings it
    within ``atol``. None if no choice does, if the model has no routers, or after ``RUNS_MAX`` runs.
    """
    if not has_routers(module):
        return None
    prompt = len(trajectory.prompt_token_ids)
    turned: list[Tie] = []
    logprobs, ties = _run(module, trajectory, TIE * atol, turned)
    apart, runs = _first_apart(trajectory, logprobs, atol), 1
    while apart is not None:
        for tie in sorted(ties, key=lambda tie: tie.margin):
            if tie.token >= prompt + apart or runs == RUNS_MAX:  # a later choice cannot be the cause
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
    apart = difference(trajectory, logprobs) > atol
    return int(apart.argmax()) if apart.any() else None
