"""Least squares with coefficients that cannot be negative."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def non_negative_least_squares(columns: Matrix, target: Matrix) -> tuple[Matrix, float]:
    """The x >= 0 that minimises ``|columns @ x - target|**2``, and that loss.

    ``columns`` is (samples, k) for a small k: the unconstrained solutions of all subsets of columns are compared, as
    the constrained one is among them; ties go to the fewest columns.
    """
    width = columns.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            loss = float(np.square(part @ found - target).sum())
            if (found >= 0.0).all() and loss < least:
                best, least = np.zeros(width), loss
                best[list(chosen)] = found
    return best, least
