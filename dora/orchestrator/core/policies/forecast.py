"""KV forecasts: how much KV the admitted requests will hold after so many more tokens, if nothing else is admitted.

A request of context ``c`` with ``r`` tokens to come holds ``c + h`` after ``h`` tokens where ``r > h``, else nothing.
Summed over requests on a grid of ``h`` that is a forecast which can be added to as requests come: O(grid) each.
"""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.prediction import remaining_tokens
from dora.orchestrator.core.state import RequestStatus
from dora.orchestrator.core.table import Column

ENGINE_GRID = np.array([0.0, 300.0, 600.0, 1_000.0])  # tokens; beyond, the next plan can still move something
FLEET_GRID = np.array([0.0, 1_000.0, 2_000.0, 4_000.0, 7_000.0, 11_000.0, 16_000.0, 22_000.0])


def on_grid(context: Column, remaining: Column, grid: Column) -> Column:
    """Forecast of these requests: shape (len(grid),)."""
    return ((context[:, None] + grid) * (remaining[:, None] > grid)).sum(axis=0)


def rows_forecast(floor: Floor, rows: Column, grid: Column) -> tuple[Column, float]:
    """Forecast of requests by their rows, and the sum of their contexts now."""
    requests = floor.requests
    tokens = requests["tokens"][rows]
    context = (requests["prompt_tokens"][rows] + tokens).astype(np.float64)
    log_sd = requests["log_sd"][rows]
    if log_sd.any():
        remaining = remaining_tokens(requests["log_mean"][rows], log_sd, tokens, requests["max_tokens"][rows])
    else:  # lengths are known
        remaining = np.maximum(requests["expected"][rows] - tokens, 1.0)
    return on_grid(context, remaining, grid), float(context.sum())


def entry_forecast(entry: Entry) -> Column:
    """Forecast on FLEET_GRID of the group that a prompt would become."""
    lengths = np.asarray(entry.lengths)
    return on_grid(np.full(len(lengths), float(entry.prompt.prompt_tokens)), lengths, FLEET_GRID)


class FleetForecast:
    """KV of all admitted requests on FLEET_GRID, and how much of it is affordable.

    The cap at ``h`` is the share of all KV that a steady mix of lengths would still hold after ``h`` tokens, with some
    slack: without it a burst of long responses would fill the fleet later on and be preempted.
    """

    REFRESH_S = 5.0
    SLACK = 2.0

    def __init__(self) -> None:
        self._forecast = np.zeros(len(FLEET_GRID))
        self._cap = np.zeros(len(FLEET_GRID))
        self._made_s = -self.REFRESH_S

    def take(self, floor: Floor, entry: Entry) -> bool:
        """Counts the group in where it is affordable, and says whether it was."""
        if floor.now_s - self._made_s >= self.REFRESH_S:
            self._make(floor)
        more = entry_forecast(entry)
        if ((self._forecast + more > self._cap) & (more > 0))[1:].any():
            return False
        self._forecast = self._forecast + more
        return True

    def _make(self, floor: Floor) -> None:
        status = floor.requests["status"]
        rows = np.flatnonzero((status == RequestStatus.WAITING) | (status == RequestStatus.RUNNING))
        self._forecast, _ = rows_forecast(floor, rows, FLEET_GRID)
        self._cap = floor.kv_tokens() * np.minimum(1.0, self.SLACK * floor.rhythm.still_held(FLEET_GRID))
        self._made_s = floor.now_s
