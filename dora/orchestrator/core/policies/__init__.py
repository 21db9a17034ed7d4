"""Rollout strategies by name. A third one is a file here and a line below."""

import difflib
from collections.abc import Callable

from dora.config import BalanceConfig
from dora.errors import InvalidValue, NotFound
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
        near = difflib.get_close_matches(config.policy, POLICIES, n=1)
        allowed = f"one of {', '.join(POLICIES)}" + (f"; did you mean {near[0]}?" if near else "")
        raise NotFound("balance.policy", config.policy, allowed)
    least = WINDOW_MIN.get(config.policy, 1)
    if window is not None and window < least:
        raise InvalidValue("window.size", window, f"at least {least} with balance.policy {config.policy}")
    return make(config)


def check_live(name: str) -> None:
    """Raises InvalidValue for a strategy that a service may not run: an unknown one, with the nearest name, or one that
    only the simulator may."""
    live = [known for known in POLICIES if known not in SIMULATED]
    if name not in live:
        near = difflib.get_close_matches(name, live, n=1)
        reason = f": {name} breaks C1 and only runs in dora simulate" if name in SIMULATED else ""
        hint = f"; did you mean {near[0]}?" if near and not reason else ""
        raise InvalidValue("balance.policy", name, f"one of {', '.join(live)}{reason}{hint}")


__all__ = ["POLICIES", "SIMULATED", "WINDOW_MIN", "check_live", "policy_of"]
