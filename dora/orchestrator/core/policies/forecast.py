"""KV forecasts: how much KV the admitted requests will hold after so many more tokens, if nothing else is admitted.

A request of context ``c`` with ``r`` tokens to come holds ``c + h`` after ``h`` tokens where ``r > h``, else nothing.
Summed over requests on a grid of ``h`` that is a forecast which can be added to as requests come: O(grid) each.
"""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.lognormal import running_chance
from dora.orchestrator.core.table import Column

ENGINE_GRID = np.array([0.0, 300.0, 600.0, 1_000.0])  # tokens; beyond, the next plan can still move something


def on_grid(context: Column, remaining: Column, grid: Column) -> Column:
    """Forecast of these requests: shape (len(grid),)."""
    return ((context[:, None] + grid) * (remaining[:, None] > grid)).sum(axis=0)


def rows_forecast(floor: Floor, rows: Column, grid: Column) -> tuple[Column, float]:
    """Forecast of requests by their rows, and the sum of their contexts now.

    Where lengths are only believed, each counts with the chance that it still runs: over many that is what they hold.
    """
    requests = floor.requests
    tokens = requests["tokens"][rows]
    context = (requests["prompt_tokens"][rows] + tokens).astype(np.float64)
    remaining = np.maximum(requests["expected"][rows] - tokens, 1.0)
    log_mean, log_sd, most = (requests[name][rows] for name in ("log_mean", "log_sd", "max_tokens"))
    runs = running_chance(remaining, log_mean, log_sd, tokens, most, grid)
    return ((context[:, None] + grid) * runs).sum(axis=0), float(context.sum())
