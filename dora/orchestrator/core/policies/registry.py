"""Rollout strategies by name, and in which windows, and where, each may run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dora.config import BalanceConfig
from dora.errors import Conflict, InvalidValue, NotFound, one_of
from dora.limits import WINDOW_MOST
from dora.orchestrator.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Strategy:
    """``make`` builds it from its configuration: a class over ``BasePolicy``, say.

    ``windows``: the fewest and the most versions that may be live, where the strategy's definition says so: in a
    narrower window it would stall, in a wider one run as in its widest.
    """

    make: Callable[[BalanceConfig], Policy]
    windows: tuple[int, int] = (1, WINDOW_MOST)

    def __post_init__(self) -> None:
        least, most = self.windows
        if not 1 <= least <= most <= WINDOW_MOST:
            raise InvalidValue("windows", self.windows, f"the fewest and the most, of 1 to {WINDOW_MOST}")


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
        raise Conflict("policy", name, "a name that no other strategy has", why="is taken")


def policy_of(config: BalanceConfig, window: int | None = None) -> Policy:
    """The strategy that the configuration names. Raises NotFound, with the nearest name.

    ``window``: ``window.size``, where it is to be checked. Raises InvalidValue where the strategy does not allow it.
    """
    strategy = POLICIES.get(config.policy)
    if strategy is None:
        raise NotFound("balance.policy", config.policy, one_of(config.policy, POLICIES, cutoff=0.6))
    if window is not None:
        check_window(config.policy, window)
    return strategy.make(config)


def nearest_window(policy: str, window: int, strategies: Mapping[str, Strategy] = POLICIES) -> int:
    """``window`` itself, or the nearest one that the strategy is defined for."""
    least, most = strategies[policy].windows if policy in strategies else (window, window)
    return min(max(window, least), most)


def check_window(
    policy: str, window: int, field: str = "window.size", strategies: Mapping[str, Strategy] = POLICIES
) -> None:
    """Raises InvalidValue for a window that the strategy is not defined for. ``field``: where it was given."""
    if nearest_window(policy, window, strategies) != window:
        least, most = strategies[policy].windows
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise InvalidValue(field, window, f"{allowed}, by the definition of {policy}")


def check_live(balance: BalanceConfig, window: int) -> None:
    """Raises InvalidValue for what a service may not run: an unknown strategy, with the nearest name, one that is not
    defined for this window, and lengths that no prompt brings."""
    if balance.policy not in POLICIES:
        raise InvalidValue("balance.policy", balance.policy, one_of(balance.policy, POLICIES, cutoff=0.6))
    check_window(balance.policy, window)
    if balance.predictor == "oracle":
        allowed = "statistics or ranker: only the simulator knows lengths beforehand"
        raise InvalidValue("balance.predictor", balance.predictor, allowed)
