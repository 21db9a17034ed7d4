"""Shrinks a failing fault schedule to the part that the failure needs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from dora.lab.sim.faults.trial import Trial

Item = TypeVar("Item")

RUNS_MAX: Final = 200


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> tuple[Item, ...]:
    """A part of the items, in order, that still fails, and from which no single item can be removed.

    Delta debugging (Zeller and Hildebrandt, 2002), by complements: it removes halves first, then ever smaller parts.
    ``fails`` must hold for all the items and be deterministic.
    """
    left, parts = tuple(items), 2
    if fails(()):
        return ()
    while len(left) > 1:
        size = -(-len(left) // parts)
        complements = (left[:at] + left[at + size :] for at in range(0, len(left), size))
        smaller = next((complement for complement in complements if complement and fails(complement)), None)
        if smaller is not None:
            left, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left


def shrunk(trial: Trial, kind: str) -> Trial:
    """A trial with fewer faults, steps and workers that fails in the same way. Ends after ``RUNS_MAX`` runs."""
    runs = 0

    def still_fails(smaller: Trial) -> bool:
        nonlocal runs
        runs += 1
        failure = smaller.run() if runs <= RUNS_MAX else None
        return failure is not None and failure.kind == kind

    def with_fewer_faults(larger: Trial) -> Trial:
        every = tuple(range(len(larger.drawn))) if larger.chosen is None else larger.chosen
        return replace(larger, chosen=ddmin(every, lambda few: still_fails(replace(larger, chosen=tuple(few)))))

    trial = with_fewer_faults(trial)
    simpler = [replace(trial, steps_after=steps) for steps in range(trial.steps_after)]
    trial = next(filter(still_fails, simpler), trial)
    engines = trial.cluster().cluster.engines
    simpler = [replace(trial, workers=workers) for workers in range(1, engines)]
    smallest = next(filter(still_fails, simpler), trial)
    return smallest if smallest is trial else with_fewer_faults(smallest)
