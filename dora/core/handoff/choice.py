"""What is best done with a request that loses its place, by cost: stay, move, park or re-prefill."""

from enum import Enum, auto
from typing import Final

from dora.core.forecast.cost import CostModel

# Where an engine was not profiled: a 32B model on four H800 (dora/sim/scenario.py). Only the ratios matter.
TYPICAL: Final = CostModel(kv_token_s=3e-8, weights_s=6e-3, request_s=5e-5, step_s=2e-2, prefill_token_s=4e-5)


class Choice(Enum):
    STAY = auto()  # it ends where it is
    MOVE = auto()  # its KV goes to a worker that has a slot for it
    PARK = auto()  # its KV goes to a pool, and from there to the next worker with a slot
    REPREFILL = auto()  # its KV is dropped, and computed again on the next worker with a slot


def cheapest(cost: CostModel | None, context_tokens: float, held_up_s: float, *, slot: bool, pool: bool) -> Choice:
    """The choice that costs the least time; of equal ones the first of ``Choice``.

    ``held_up_s``: what its worker is held up if it stays. ``slot``: a worker has one for it now; ``pool``: a pool has
    room. Time of copies counts once for each; a prefill that was not measured counts as typical.
    """
    known = cost or TYPICAL
    copy_s = context_tokens * known.copy_token_s
    costs = {Choice.STAY: held_up_s}
    if slot:
        costs[Choice.MOVE] = copy_s
    if pool:
        costs[Choice.PARK] = 2.0 * copy_s
    costs[Choice.REPREFILL] = context_tokens * (known.prefill_token_s or TYPICAL.prefill_token_s)
    return min(costs, key=costs.__getitem__)
