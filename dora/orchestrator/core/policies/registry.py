"""Rollout strategies by name, and in which windows, and where, each may run."""

from collections.abc import Callable
from dataclasses import dataclass

from dora.config import WINDOW_MOST, BalanceConfig
from dora.errors import Conflict, InvalidValue, NotFound, one_of
from dora.orchestrator.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Strategy:
    """``make`` builds it from its configuration: a class over ``BasePolicy``, say.

    ``windows``: the fewest and the most versions that may be live, where the strategy's definition says so: in a
    narrower window it would stall, in a wider one run as in its widest. ``live`` False: it breaks C1, as no service
    may, and only the simulator runs it. ``versioned`` False: it does so by knowing one version alone, under which
    responses go on whatever is published; the simulator lets its window never end.
    """

    make: Callable[[BalanceConfig], Policy]
    windows: tuple[int, int] = (1, WINDOW_MOST)
    live: bool = True
    versioned: bool = True

    def __post_init__(self) -> None:
        least, most = self.windows
        if not 1 <= least <= most <= WINDOW_MOST:
            raise InvalidValue("windows", self.windows, f"the fewest and the most, of 1 to {WINDOW_MOST}")
        if self.live and not self.versioned:
            raise InvalidValue("live", self.live, "False for a strategy that knows no versions: it breaks C1")


POLICIES: dict[str, Strategy] = {}


def register(name: str, strategy: Strategy | Callable[[BalanceConfig], Policy]) -> None:
    """From now on ``name`` is this strategy, in the service, the simulator and the sweep of this process.

    Raises InvalidValue for what cannot be one, Conflict for a name that another strategy has.
    """
    if not name.isidentifier():
        raise InvalidValue("policy", name, "a name of letters, digits and underscores")
    if not isinstance(strategy, Strategy):
        if not callable(strategy):
            raise InvalidValue(f"policy {name}", strategy, "a Strategy, or what makes a Policy of a BalanceConfig")
        strategy = Strategy(strategy)
    if POLICIES.setdefault(name, strategy) != strategy:
        raise Conflict("policy", name, "a name that no other strategy has")


def live_policies() -> tuple[str, ...]:
    """Those that a service may run."""
    return tuple(name for name, strategy in POLICIES.items() if strategy.live)


def is_live(policy: str) -> bool:
    """Whether a service may run it: it keeps C1."""
    return policy in POLICIES and POLICIES[policy].live


def is_versioned(policy: str) -> bool:
    """Whether its responses belong to versions."""
    return policy not in POLICIES or POLICIES[policy].versioned


def policy_of(config: BalanceConfig, window: int | None = None) -> Policy:
    """The strategy that the configuration names. Raises NotFound, with the nearest name.

    ``window``: ``window.size``, where it is to be checked. Raises InvalidValue where the strategy does not allow it.
    """
    strategy = POLICIES.get(config.policy)
    if strategy is None:
        raise NotFound("balance.policy", config.policy, one_of(config.policy, POLICIES, cutoff=0.6))
    if window is not None and strategy.versioned:
        check_window(config.policy, window)
    return strategy.make(config)


def nearest_window(policy: str, window: int) -> int:
    """``window`` itself, or the nearest one that the strategy is defined for."""
    least, most = POLICIES[policy].windows if policy in POLICIES else (window, window)
    return min(max(window, least), most)


def check_window(policy: str, window: int, field: str = "window.size") -> None:
    """Raises InvalidValue for a window that the strategy is not defined for. ``field``: where it was given."""
    if nearest_window(policy, window) != window:
        least, most = POLICIES[policy].windows
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise InvalidValue(field, window, f"{allowed}, by the definition of {policy}")


def check_live(balance: BalanceConfig, window: int) -> None:
    """Raises InvalidValue for what a service may not run: an unknown strategy, with the nearest name, one that only the
    simulator may, one that is not defined for this window, and lengths that no prompt brings."""
    name, live = balance.policy, live_policies()
    if name not in live:
        allowed = one_of(name, live, cutoff=0.6)
        if name in POLICIES:
            allowed = f"one of {', '.join(live)}: {name} breaks C1 and only runs in dora simulate"
        raise InvalidValue("balance.policy", name, allowed)
    check_window(name, window)
    if balance.predictor == "given":
        allowed = "statistics or ranker: only the simulator knows lengths beforehand"
        raise InvalidValue("balance.predictor", balance.predictor, allowed)
