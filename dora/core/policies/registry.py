"""The registered rollout strategies, and the windows that each allows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dora.config import BalanceConfig, WindowConfig, WindowSize
from dora.core.policy import Policy
from dora.data.limits import WINDOW_MAX
from dora.errors import Conflict, InvalidValue, NotFound, one_of


@dataclass(frozen=True, slots=True)
class Strategy:
    """A registered strategy. ``make`` builds it from its configuration, for example a subclass of ``BasePolicy``.

    ``windows`` are the fewest and the most live versions, if the strategy's definition limits them. In a narrower
    window it would stall; in a wider one it would run as in its widest. With ``by_freshness`` the core delays admission
    until a step needs the groups (freshness.py). It is False for strategies that begin whole batches by definition.
    """

    make: Callable[[BalanceConfig], Policy]
    windows: tuple[int, int] = (1, WINDOW_MAX)
    by_freshness: bool = True

    def __post_init__(self) -> None:
        least, most = self.windows
        if not 1 <= least <= most <= WINDOW_MAX:
            raise InvalidValue("windows", self.windows, f"the fewest and the most, of 1 to {WINDOW_MAX}")


POLICIES: dict[str, Strategy] = {}


def register(name: str, strategy: Strategy | Callable[[BalanceConfig], Policy]) -> None:
    """Registers a strategy in this process, for the service, the simulator and the sweep.

    Raises InvalidValue for an invalid strategy, and Conflict if another strategy has the name.
    """
    if not name.isidentifier():
        raise InvalidValue("policy", name, "a name of letters, digits and underscores")
    if not isinstance(strategy, Strategy):
        if not callable(strategy):
            raise InvalidValue(f"policy {name}", strategy, "a Strategy, or what makes a Policy of a BalanceConfig")
        strategy = Strategy(strategy)
    if POLICIES.setdefault(name, strategy) != strategy:
        raise Conflict("policy", name, "a name that no other strategy has", why="is taken")


def policy_of(config: BalanceConfig, window: WindowConfig | None = None) -> Policy:
    """The configured strategy. Raises NotFound with the nearest name.

    ``window`` is checked if it is given. Raises InvalidValue if the strategy does not allow its sizes.
    """
    strategy = POLICIES.get(config.policy)
    if strategy is None:
        raise NotFound("balance.policy", config.policy, one_of(config.policy, POLICIES, cutoff=0.6))
    if window is not None:
        check_sizes(config.policy, window)
    return strategy.make(config)


def nearest_window(policy: str, window: int, strategies: Mapping[str, Strategy] = POLICIES) -> int:
    """``window`` itself, or the nearest size that the strategy allows."""
    least, most = strategies[policy].windows if policy in strategies else (window, window)
    return min(max(window, least), most)


def allows_any(policy: str, strategies: Mapping[str, Strategy] = POLICIES) -> bool:
    """Returns whether the strategy allows every window, so that the window may change."""
    return policy not in strategies or strategies[policy].windows == (1, WINDOW_MAX)


def check_window(
    policy: str, window: int, field: str = "window.size", strategies: Mapping[str, Strategy] = POLICIES
) -> None:
    """Raises InvalidValue for a window that the strategy does not allow. ``field`` names the setting that gave it."""
    if nearest_window(policy, window, strategies) != window:
        raise _refused(policy, window, field, strategies)


def check_sizes(policy: str, window: WindowConfig, strategies: Mapping[str, Strategy] = POLICIES) -> None:
    """Raises InvalidValue for a size that the strategy does not allow. An adaptive window requires a strategy that
    allows every size, as a strategy with limits may behave quite differently at sizes 1 and 2.
    """
    if not window.is_adaptive:
        check_window(policy, window.most, strategies=strategies)
    elif not allows_any(policy, strategies):
        raise _refused(policy, window.size, "window.size", strategies)


def _refused(policy: str, window: WindowSize, field: str, strategies: Mapping[str, Strategy]) -> InvalidValue:
    least, most = strategies[policy].windows
    allowed = f"{least}" if least == most else f"{least} to {most}"
    return InvalidValue(field, window, f"{allowed}, by the definition of {policy}")


def check_live(balance: BalanceConfig, window: WindowConfig) -> None:
    """Raises InvalidValue for settings that a service may not run: an unknown strategy (with the nearest name), a
    strategy that does not allow this window, and known lengths, which only the simulator has.
    """
    if balance.policy not in POLICIES:
        raise InvalidValue("balance.policy", balance.policy, one_of(balance.policy, POLICIES, cutoff=0.6))
    check_sizes(balance.policy, window)
    if balance.predictor == "oracle":
        allowed = "statistics or ranker: only the simulator knows lengths beforehand"
        raise InvalidValue("balance.predictor", balance.predictor, allowed)
