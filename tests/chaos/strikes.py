"""Strikes with a fault at its moment, and waits until everything is as before."""

import asyncio
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos import clock, stalling
from tests.chaos.alarms import Alarms
from tests.chaos.cast import Orphaned
from tests.chaos.faults import LONGER_THAN_SILENCE, Fault
from tests.chaos.handoffs import held, release, send, stands
from tests.chaos.moments import Missed, come, victim_of
from tests.chaos.rivals import Rivals
from tests.chaos.setting import HOST_WORKER
from tests.chaos.world import Stuck, World

SEEN_WITHIN_S: Final = 30.0  # a moment that does not come in so long is missed, and told
STOPPED_S: Final = 1.0  # so long a stopped process stands still, where nothing else is waited for
STRIKES_MOST: Final = 12  # with a fault whose moment does not come, or which has to be repeated for its alert
CUT_S: Final = 3.0  # so long a link is cut, where nothing else is waited for: shorter than a silence that is a loss
HOUR_S: Final = 3600.0

After = Coroutine[Any, Any, None]  # brings back what does not come back by itself, and waits for the rest


@dataclass
class Struck:
    """An executed strike, and the seconds until everything was as before."""

    kills: list[str] = field(default_factory=list)  # of each its fault's name
    faults: list[str] = field(default_factory=list)  # all but kills
    missed: list[str] = field(default_factory=list)
    worker_recovery_s: list[float] = field(default_factory=list)  # until it hosts a version again
    orchestrator_restart_s: list[float] = field(default_factory=list)  # until it answers, and its workers are there
    whole_again_s: list[float] = field(default_factory=list)  # until everybody is, and a step was committed


class Striker:
    """``alarms``: a fault lasts until its alert fires; None: for a moment."""

    def __init__(self, world: World, alarms: Alarms | None = None) -> None:
        self.world = world
        self._alarms = alarms
        self.struck = Struck()
        self._rivals = Rivals(world)
        self._workers: dict[int, str] = {}  # by process id, as the fault found them
        self._workers_lost = 0.0  # before the fault

    async def strike(self, fault: Fault) -> bool:
        """Whether its moment came. Returns once everything is as before. Raises Stuck where it does not get so."""
        world = self.world
        status = await world.until(world.is_whole, f"everybody at work before {fault.name}")
        self._workers = {worker.pid: worker.worker_id for worker in status.workers if worker.pid}
        trained, self._workers_lost = status.counters["groups_trained"], status.counters["workers_lost"]
        try:
            async with asyncio.timeout(SEEN_WITHIN_S):
                after = await (self._in_handoff(fault) if ":" in fault.moment else self._at_moment(fault))
        except (TimeoutError, Missed):
            self.struck.missed.append(fault.name)
            return False
        began_s = time.monotonic()
        if fault.is_kill:
            self.struck.kills += [fault.name] * fault.kills
        else:
            self.struck.faults.append(fault.name)
        try:
            await after
            await world.recovered(trained)
        except Stuck as stuck:
            raise Stuck(f"after {fault.name}: {stuck}") from None
        self.struck.whole_again_s.append(time.monotonic() - began_s)
        return True

    async def strike_until_told(self, fault: Fault, alarms: Alarms) -> None:
        """Strikes until the fault's alert has fired, then until none fires. Raises Stuck if there were others."""
        await self.world.until(self.world.is_whole, f"everybody at work before {fault.name}")
        await alarms.begin()
        for _ in range(STRIKES_MOST):
            if await self.strike(fault) and (not alarms.is_repeated(fault) or await alarms.is_fired(fault)):
                break
        try:
            await alarms.clears(fault)
        except Stuck as stuck:
            raise Stuck(f"after {fault.name}: {stuck}") from None

    async def _in_handoff(self, fault: Fault) -> After:
        kind, _, phase = fault.moment.partition(":")
        end = HOST_WORKER if fault.action == "cut" else ""
        ends = await held(self.world, kind, "FROZEN" if phase == "STRANDED" else phase, end)
        victim = {
            "source": ends.source,
            "target": ends.target,
            "pool": ends.source if kind == "resume" else ends.target,
            "orchestrator": self.world.service.pid,
            "from host": self.world.agent.pid,
            "to host": self.world.agent.pid,
        }[fault.whose]
        stays_stopped = victim if fault.action == "stop" else 0
        try:
            if phase == "STRANDED":
                send(ends.source, signal.SIGKILL)
                while (now := await stands(self.world, ends.trajectory_id)) != "STRANDED":
                    if not now:
                        raise Missed
            return await self._befall(fault, victim)
        finally:
            release(*({ends.source, ends.target} - {stays_stopped}))

    async def _at_moment(self, fault: Fault) -> After:
        world = self.world
        if fault.moment == "restarting":
            await world.service.kill()
            return self._restart_twice(time.monotonic())
        await come(world, fault.moment)
        return await self._befall(fault, await victim_of(world, fault))

    # ---------------------------------------------------------------------------------------------- what befalls whom

    async def _befall(self, fault: Fault, victim: int) -> After:
        if not victim:
            raise Missed
        began_s = time.monotonic()
        match fault.action:
            case "kill" if victim == self.world.service.pid:
                await self.world.service.kill()
                return self._restart(began_s, fault)
            case "kill":
                away = [each for each in self.world.cast if each.pid == victim and self._alarms is not None]
                for each in away:
                    each.may_return.clear()
                send(victim, signal.SIGKILL)
                return self._back(fault, away) if away else self._worker_back(victim, began_s)
            case "stop":
                send(victim, signal.SIGSTOP)
                return self._continue(fault, victim)
            case "stall":
                send(victim, stalling.STALL)
                return self._worker_back(victim, began_s)
            case "fill":
                assert self.world.disk is not None
                self.world.disk.fill()
                return self._make_room(fault)
            case "jump":
                clock.jump(self.world.clock, HOUR_S if fault.how == "an hour on" else -24 * HOUR_S)
                return self._jump_back(fault)
            case "copy":
                return self._rivals.copied()
            case "older":
                return self._older()
            case "second":
                return self._rivals.second(fault.whose)
            case "cut":
                assert self.world.link is not None
                self.world.link.cut(fault.whose)
                return self._mend(fault)

    async def _older(self) -> None:
        start = await self._rivals.older()
        await start()
        await self._restart(time.monotonic())

    async def _held(self, fault: Fault, or_s: float = 0.0) -> None:
        """Returns once the fault's alert fires; without alarms after ``or_s``."""
        if self._alarms is not None:
            await self._alarms.fires(fault)
        else:
            await asyncio.sleep(or_s)

    async def _back(self, fault: Fault, away: list[Orphaned]) -> None:
        try:
            await self._held(fault)
        finally:
            for each in away:
                each.may_return.set()

    async def _restart(self, began_s: float, fault: Fault | None = None) -> None:
        if fault is not None:
            await self._held(fault)
        await self.world.start()
        self.struck.orchestrator_restart_s.append(time.monotonic() - began_s)

    async def _restart_twice(self, began_s: float) -> None:
        """It is killed once more as soon as it has said something."""
        await self.world.service.begin()
        await self.world.service.says_more()
        await self.world.service.kill()
        await self._restart(began_s)

    async def _worker_back(self, victim: int, began_s: float) -> None:
        """Waits, after a worker was struck, until it hosts a version again."""
        name = self._workers.get(victim)
        if name is None:
            return
        await self.world.until(
            lambda status: any(
                worker.worker_id == name and worker.version >= 0 and worker.pid not in (0, victim)
                for worker in status.workers
            ),
            f"{name} again",
        )
        self.struck.worker_recovery_s.append(time.monotonic() - began_s)

    async def _continue(self, fault: Fault, victim: int) -> None:
        try:
            if fault.how == "until it is lost":
                await self._lost(self._workers[victim], victim)
            elif fault.how == LONGER_THAN_SILENCE:
                await asyncio.sleep(1.5 * self.world.setting.silence_s)
            else:
                await self._held(fault, STOPPED_S)
        finally:
            release(victim)
        if fault.how == LONGER_THAN_SILENCE:
            await self._none_lost()

    async def _none_lost(self) -> None:
        """The service does not count its own absence as its workers' silence."""
        status = await self.world.until(self.world.is_whole, "everybody at work again")
        if status.counters["workers_lost"] != self._workers_lost:
            raise Stuck("the service lost workers while it was itself stopped")

    async def _lost(self, name: str, pid: int) -> None:
        await self.world.until(
            lambda status: not any(each.worker_id == name and each.pid == pid for each in status.workers),
            f"{name} lost",
        )

    async def _mend(self, fault: Fault) -> None:
        """The link, once it was cut for long enough."""
        world = self.world
        assert world.link is not None
        try:
            if fault.how == "until it is lost":
                pid = next(pid for pid, name in self._workers.items() if name == HOST_WORKER)
                await self._lost(HOST_WORKER, pid)
                await self._held(fault)
            elif fault.how == "and kill orchestrator":
                began_s = time.monotonic()
                await world.service.kill()
                await self._restart(began_s)
            else:
                await asyncio.sleep(CUT_S)
        finally:
            world.link.mend(fault.whose)

    async def _make_room(self, fault: Fault) -> None:
        world = self.world
        assert world.disk is not None
        try:
            await world.until(lambda status: bool(status.storage_faults), "a full disk told")
            await self._held(fault)
            if fault.how == "and kill orchestrator":
                await world.service.kill()
        finally:
            world.disk.free()
        if fault.how == "and kill orchestrator":
            await self._restart(time.monotonic())

    async def _jump_back(self, fault: Fault) -> None:
        status = await self.world.operator.status()
        await self.world.recovered(status.counters["groups_trained"])
        await self._held(fault)
        clock.jump(self.world.clock, 0.0)
