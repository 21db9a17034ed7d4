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
LIVE_POLICIES = tuple(name for name in POLICIES if name not in SIMULATED)
# The fewest and the most versions that may be live, where a strategy's definition says so: in a narrower window it
# would stall, in a wider one run as in its widest. Partial rollout knows no versions: the largest window is no bound.
WINDOWS = {"sync": (1, 1), "one_step": (2, 2), "stream": (2, 2), "streamrl": (1, 2), "partial": (64, 64)}


def policy_of(config: BalanceConfig, window: int | None = None) -> Policy:
    """The strategy that the configuration names. Raises NotFound, with the nearest name.

    ``window``: ``window.size``, where it is to be checked. Raises InvalidValue where the strategy does not allow it.
    """
    make = POLICIES.get(config.policy)
    if make is None:
        raise NotFound("balance.policy", config.policy, one_of(config.policy, POLICIES, cutoff=0.6))
    if window is not None:
        check_window(config.policy, window)
    return make(config)


def nearest_window(policy: str, window: int) -> int:
    """``window`` itself, or the nearest one that the strategy is defined for."""
    least, most = WINDOWS.get(policy, (window, window))
    return min(max(window, least), most)


def check_window(policy: str, window: int, field: str = "window.size") -> None:
    """Raises InvalidValue for a window that the strategy is not defined for. ``field``: where it was given."""
    if nearest_window(policy, window) != window:
        least, most = WINDOWS[policy]
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise InvalidValue(field, window, f"{allowed}, by the definition of {policy}")


def check_live(balance: BalanceConfig, window: int) -> None:
    """Raises InvalidValue for what a service may not run: an unknown strategy, with the nearest name, one that only the
    simulator may, one that is not defined for this window, and lengths that no prompt brings."""
    name = balance.policy
    if name in SIMULATED:
        allowed = f"one of {', '.join(LIVE_POLICIES)}: {name} breaks C1 and only runs in dora simulate"
        raise InvalidValue("balance.policy", name, allowed)
    if name not in LIVE_POLICIES:
        raise InvalidValue("balance.policy", name, one_of(name, LIVE_POLICIES, cutoff=0.6))
    check_window(name, window)
    if balance.predictor == "given":
        allowed = "statistics or ranker: only the simulator knows lengths beforehand"
        raise InvalidValue("balance.predictor", balance.predictor, allowed)


__all__ = [
    "LIVE_POLICIES",
    "POLICIES",
    "SIMULATED",
    "WINDOWS",
    "check_live",
    "check_window",
    "nearest_window",
    "policy_of",
]
