"""Chooses the cheapest action for a request that loses its place: stay, move, park or re-prefill."""

from enum import Enum, auto
from typing import Final

from dora.core.forecast.cost import CostModel

# The default for an engine without a profile: a 32B model on four H800, as in lab/sim/scenario.py. Only ratios matter.
TYPICAL: Final = CostModel(kv_token_s=3e-8, weights_s=6e-3, request_s=5e-5, step_s=2e-2, prefill_token_s=4e-5)


class Choice(Enum):
    STAY = auto()  # it ends on its present worker
    MOVE = auto()  # its KV goes to a worker with a free slot
    PARK = auto()  # its KV goes to a pool, and later to the next worker with a slot
    REPREFILL = auto()  # its KV is dropped and computed again on the next worker with a slot


def cheapest(cost: CostModel | None, context_tokens: float, held_up_s: float, *, slot: bool, pool: bool) -> Choice:
    """The choice that costs the least time, among equal ones the first in ``Choice``.

    ``held_up_s`` is the time that its worker is delayed if it stays. With ``slot`` a worker has a free slot for it now,
    with ``pool`` a pool has room. Each copy counts its time once; an unmeasured prefill is typical.
    """
    known = cost or TYPICAL
    copy_s = known.copy_s(context_tokens)
    costs = {Choice.STAY: held_up_s}
    if slot:
        costs[Choice.MOVE] = copy_s
    if pool:
        costs[Choice.PARK] = 2.0 * copy_s
    costs[Choice.REPREFILL] = context_tokens * (known.prefill_token_s or TYPICAL.prefill_token_s)
    return min(costs, key=costs.__getitem__)
