"""The cost of staleness, by the movement of the policy in a step (docs/convergence.md has the measurements)."""

from math import sqrt


def samples_factor(staleness: float, movement: float, weight: float) -> float:
    """The samples to a level of reward at this mean staleness, relative to fresh ones.

    ``weight`` is ``window.staleness_cost``. A policy that is ``staleness`` steps of one direction away has a divergence
    of ``staleness ** 2 * movement``, whose square root this is linear in.
    """
    return 1.0 + weight * staleness * sqrt(movement)


def price_of(staleness: float, movement: float, weight: float) -> float:
    """The share of the time to a level that one version of staleness less would save, with steps of the same length.

    It follows from :func:`samples_factor`, and is 0 for a policy that does not move.
    """
    return weight * sqrt(movement) / samples_factor(staleness, movement, weight)
