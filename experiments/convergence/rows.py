"""The compared rows: settings of the live service, and their counterparts in the simulator."""

from dataclasses import dataclass
from typing import Final

SYNC: Final = "sync"
BASE: Final = "window-3"  # what the rows of LIMITS change one thing of
WINDOWS_WITH_A_BAR: Final = ("window-2", "window-3")
_LAXITY: Final = "balance.policy=laxity"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train. ``settings`` are those of ``dora serve --set``."""

    name: str
    title: str
    settings: tuple[str, ...] = ()
    trainer_arguments: tuple[str, ...] = ()  # of python -m dora.trainers.grpo
    fleet: tuple[str, int | str | None] | None = None  # policy and window in the simulator; None: not simulated
    reward_of: str = ""  # only simulated, and drawn with this row's reward at each step


def _window(size: int | str, title: str) -> Row:
    settings = (_LAXITY, f"window.size={size}")
    return Row(f"window-{size}", title, settings, fleet=("laxity", size))


MODES: Final = (
    Row(SYNC, "sync", ("balance.policy=sync", "window.size=1"), fleet=("sync", None)),
    *(_window(size, f"window {size}") for size in (2, 3, 4)),
    _window("auto", "window auto"),
    Row("partial", "partial rollout", fleet=("partial", None), reward_of=SYNC),
)

_BASE_SETTINGS: Final = (_LAXITY, "window.size=3")


def _objective(name: str, *options: str) -> Row:
    settings = [f"{what.removeprefix('--')} {value}" for what, value in zip(options[::2], options[1::2], strict=True)]
    title = ", ".join((name, *settings))
    return Row(f"{BASE}-{name}", title, _BASE_SETTINGS, ("--objective", name, *options))


LIMITS: Final = (
    _objective("decoupled-ppo"),
    _objective("rloo"),
    _objective("cispo"),
    _objective("gspo", "--anchor", "proximal", "--correction", "mask"),
    Row(f"{BASE}-early", "begun as early as may be", (*_BASE_SETTINGS, "window.freshness=0")),
    Row(f"{BASE}-half-rate", "half the learning rate", _BASE_SETTINGS),
)
HALF_RATE: Final = f"{BASE}-half-rate"

RATES: Final = (3e-4, 1e-3, 3e-3)  # tried on sync; the best one is every run's
RATE_SEEDS: Final = (1000, 1001)  # no run that is compared has one of them
