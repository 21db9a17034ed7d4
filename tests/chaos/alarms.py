"""Faults that last until a real Prometheus, with the rules of ``deploy/``, fires their alert: ``--alerts``.

The alerts of these faults are ``TIMES`` faster than deployed (``tests.prometheus.hasty``); all others are as deployed.
After each fault everything is as before and no alert fires, and none but the fault's own have fired meanwhile.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.faults import Fault, named
from tests.chaos.world import Stuck, World
from tests.prometheus.fetch import tool
from tests.prometheus.hasty import hasty_rules
from tests.prometheus.server import Prometheus, scraping

TIMES: Final = 20.0


@dataclass(frozen=True, slots=True)
class Expected:
    """The alert that ends the fault, and another one afterwards. ``again``: the fault is repeated until then."""

    alert: str
    after: str = ""
    again: bool = False

    @property
    def alerts(self) -> set[str]:
        return {each for each in (self.alert, self.after) if each}


ALERTS: Final[Mapping[str, Expected]] = {
    "stop trainer at taking": Expected("DoraTrainerStalled"),
    "kill front at chat turn": Expected("DoraFrontDown"),
    "kill environment at turn": Expected("DoraSandboxStuck"),  # a front still drives its chats
    "stop environment at tool time": Expected("DoraSandboxStuck"),
    "fill state at decoding": Expected("DoraJournalNotDurable"),
    "kill agent at decoding": Expected("DoraHostLost"),
    "kill orchestrator at admission": Expected("DoraDown", "DoraRestarted"),
    "jump orchestrator, an hour on at decoding": Expected("DoraClockOff"),
    "jump orchestrator, a day back at decoding": Expected("DoraClockOff"),
    "cut from host, until it is lost at decoding": Expected("DoraHostLost"),
    "kill worker at scoring": Expected("DoraWorkersRestart", again=True),
}
FAULTS: Final = tuple(named(each)[0] for each in ALERTS)
_NAMES: Final = {alert for each in ALERTS.values() for alert in each.alerts}


class Alarms:
    """Awaits the alerts of one fault after the other. ``found``: those that have fired, by fault."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._began_s = 0.0
        self.found: dict[str, list[str]] = {}

    async def begin(self) -> None:
        """Returns once no alert fires. Raises Stuck."""
        await self._firing(set())
        self._began_s = time.monotonic()

    async def fires(self, fault: Fault) -> None:
        """Returns once the fault's alert fires, and no other. Raises Stuck."""
        expected = ALERTS[fault.name]
        if not expected.again:
            await self._firing({expected.alert})

    def is_repeated(self, fault: Fault) -> bool:
        """Whether its alert takes several of it."""
        return ALERTS[fault.name].again

    async def is_fired(self, fault: Fault) -> bool:
        """Whether its alerts have fired, after the fault is over."""
        return ALERTS[fault.name].alerts <= await self._fired()

    async def clears(self, fault: Fault) -> None:
        """Returns once all alerts of the fault have fired and none fires. Raises Stuck if there were others."""
        expected = ALERTS[fault.name]
        await self._firing(set())
        found = await self._fired()
        self.found[fault.name] = sorted(found)
        if found != expected.alerts:
            raise Stuck(f"{sorted(found)} have fired, not {sorted(expected.alerts)}")

    async def _fired(self) -> set[str]:
        return await self._prometheus.fired(time.monotonic() - self._began_s)

    async def _firing(self, expected: set[str]) -> None:
        try:
            await self._prometheus.firing(expected)
        except AssertionError as other:
            raise Stuck(str(other)) from None


@asynccontextmanager
async def alarmed(world: World) -> AsyncIterator[Alarms]:
    """A Prometheus beside the world's service."""
    binary = tool("prometheus")
    assert binary is not None, "there is no Prometheus: `make prometheus` fetches it from Debian's package"
    with tempfile.TemporaryDirectory() as scratch:
        rules = await asyncio.to_thread(hasty_rules, Path(scratch) / "rules", _NAMES, TIMES)
        async with scraping(binary, world.metrics, Path(scratch), rules) as prometheus:
            yield Alarms(prometheus)
