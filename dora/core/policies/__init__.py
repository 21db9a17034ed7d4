"""The registered rollout strategies. To add one to DORA, add a file here and a line below.

An external strategy registers through an entry point of the group ``dora.policies`` (dora/orchestrator/plugins.py) or
calls ``register``.
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
for alias in ("one_step", "stream"):  # both names have the same strategy; their trainers differ: one streams
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
