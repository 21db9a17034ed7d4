"""Rollout strategies by name. One more of DORA's own is a file here and a line below.

Anybody else's is a file of theirs and an entry point of the group ``dora.policies``
(dora/orchestrator/plugins.py), or a call of ``register``.
"""

from dora.core.policies.batch import OneStepPolicy, SyncPolicy
from dora.core.policies.dora import DoraPolicy
from dora.core.policies.laminar import LaminarPolicy
from dora.core.policies.laxity import LaxityPolicy
from dora.core.policies.registry import (
    POLICIES,
    Strategy,
    allows_any,
    check_live,
    check_sizes,
    check_window,
    nearest_window,
    policy_of,
    register,
)
from dora.core.policies.staleflow import StaleFlowPolicy
from dora.core.policies.streamrl import StreamRlPolicy

register("dora", DoraPolicy)
register("laxity", LaxityPolicy)
register("laminar", LaminarPolicy)
register("staleflow", StaleFlowPolicy)
register("streamrl", Strategy(StreamRlPolicy, windows=(1, 2), by_freshness=False))
register("sync", Strategy(SyncPolicy, windows=(1, 1), by_freshness=False))
for alias in ("one_step", "stream"):  # they differ in the trainer alone, which streams or does not
    register(alias, Strategy(OneStepPolicy, windows=(2, 2), by_freshness=False))

__all__ = [
    "POLICIES",
    "Strategy",
    "allows_any",
    "check_live",
    "check_sizes",
    "check_window",
    "nearest_window",
    "policy_of",
    "register",
]
