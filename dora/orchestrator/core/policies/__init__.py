"""Rollout strategies by name. A third one is a file here and a line below."""

from collections.abc import Callable

from dora.config import BalanceConfig
from dora.errors import InvalidValue, NotFound, one_of
from dora.orchestrator.core.policies.dora import DoraPolicy
from dora.orchestrator.core.policies.laminar import LaminarPolicy
from dora.orchestrator.core.policies.laxity import LaxityPolicy
from dora.orchestrator.core.policies.one_step import OneStepPolicy, StreamPolicy
from dora.orchestrator.core.policies.partial import PartialPolicy
from dora.orchestrator.core.policies.staleflow import StaleFlowPolicy
from dora.orchestrator.core.policies.streamrl import StreamRlPolicy
from dora.orchestrator.core.policies.sync import SyncPolicy
from dora.orchestrator.core.snapshot import Policy

POLICIES: dict[str, Callable[[BalanceConfig], Policy]] = {
    "dora": DoraPolicy,
    "laxity": LaxityPolicy,
    "laminar": LaminarPolicy,
    "staleflow": StaleFlowPolicy,
    "streamrl": StreamRlPolicy,
    "sync": SyncPolicy,
    "one_step": OneStepPolicy,
    "stream": StreamPolicy,
    "partial": PartialPolicy,
}
# They break C1, which no service does: only the simulator runs them.
SIMULATED = frozenset({"partial"})
# Versions that must be live at once; the others do with one.
WINDOW_MIN = {"one_step": 2, "stream": 2}


def policy_of(config: BalanceConfig, window: int | None = None) -> Policy:
    """The strategy that the configuration names. Raises NotFound, with the nearest name.

    ``window``: ``window.size``, where it is to be checked. Raises InvalidValue where that strategy needs a larger one.
    """
    make = POLICIES.get(config.policy)
    if make is None:
        raise NotFound("balance.policy", config.policy, one_of(config.policy, POLICIES, cutoff=0.6))
    least = WINDOW_MIN.get(config.policy, 1)
    if window is not None and window < least:
        raise InvalidValue("window.size", window, f"at least {least} with balance.policy {config.policy}")
    return make(config)


def check_live(name: str) -> None:
    """Raises InvalidValue for a strategy that a service may not run: an unknown one, with the nearest name, or one that
    only the simulator may."""
    live = [known for known in POLICIES if known not in SIMULATED]
    if name in SIMULATED:
        allowed = f"one of {', '.join(live)}: {name} breaks C1 and only runs in dora simulate"
        raise InvalidValue("balance.policy", name, allowed)
    if name not in live:
        raise InvalidValue("balance.policy", name, one_of(name, live, cutoff=0.6))


__all__ = ["POLICIES", "SIMULATED", "WINDOW_MIN", "check_live", "policy_of"]
