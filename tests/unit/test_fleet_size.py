"""The advice on the number of hosts, and what follows it."""

from dataclasses import dataclass, field

import pytest

from dora.cluster.adapter import Job
from dora.cluster.following import follow
from dora.core.forecast.fleet_size import LOOK_STEPS, FleetSize
from dora.rpc.dora_pb2 import FleetAdvice

COOLDOWN_S = 100.0


def sized(workers: int, used: float, took_s: float, waited_s: float, price: float = 0.01) -> FleetSize:
    """After enough steps of one kind."""
    size = FleetSize(price, COOLDOWN_S)
    for step in range(LOOK_STEPS + 1):
        size.looked(step * took_s, workers, used)
        size.committed(took_s, waited_s)
    return size


def wish(size: FleetSize, least: int = 1, most: int = 64) -> int | None:
    found = size.wish(1e6, least, most)
    return None if found is None else found.workers


def test_a_full_fleet_grows_while_the_trainer_waits() -> None:
    assert wish(sized(4, 1.0, 100.0, 50.0)) == pytest.approx(4 * 100 / 50 / 0.6, abs=1)


def test_a_fleet_that_is_not_full_does_not_grow_though_the_trainer_waits() -> None:
    """One long response, or an environment: no worker shortens it."""
    found = wish(sized(8, 0.2, 100.0, 50.0))
    assert found is not None and found <= 8


def test_a_fleet_shrinks_to_its_work() -> None:
    assert wish(sized(10, 0.2, 100.0, 0.0)) == pytest.approx(10 * 0.2 / 0.6, abs=1)


@pytest.mark.parametrize("price", [0.0, 0.01, 1.0])
def test_a_dearer_worker_is_not_asked_for_sooner(price: float) -> None:
    dear, cheap = wish(sized(4, 1.0, 100.0, 50.0, price)), wish(sized(4, 1.0, 100.0, 50.0, 0.0))
    assert dear is not None and cheap is not None and dear <= cheap


def test_the_bounds_hold_before_anything_is_measured() -> None:
    size = FleetSize(0.01, COOLDOWN_S)
    size.looked(0.0, 9, 1.0)
    assert wish(size, 1, 8) == 8 and wish(size, 10, 12) == 10 and wish(size) is None


def test_after_a_change_the_fleet_stays_for_the_cool_down() -> None:
    size = sized(4, 1.0, 10.0, 5.0)
    for step in range(LOOK_STEPS + 1):
        size.looked(1000.0 + step, 5, 1.0)
        size.committed(10.0, 5.0)
    soon, later = size.wish(1000.0 + COOLDOWN_S - 1.0, 1, 64), size.wish(1000.0 + COOLDOWN_S, 1, 64)
    assert soon is not None and later is not None and soon.workers == 5 < later.workers


def test_a_step_that_began_with_another_number_does_not_count() -> None:
    size = FleetSize(0.01, COOLDOWN_S)
    for step in range(LOOK_STEPS):
        size.looked(step * 10.0, 4, 1.0)
        size.committed(10.0, 5.0)
    assert size.wish(1e6, 1, 64) is None


# ---------------------------------------------------------------------------------------------------------- following


@dataclass
class Scheduler:
    """The jobs of a run."""

    hosts: list[str]
    chooses: bool = False
    asked: list[int] = field(default_factory=list)

    def jobs(self) -> list[Job]:
        return [
            Job("1", "service", "running"),
            *(Job(name, "host", "running", host="" if self.chooses else f"h{name}") for name in self.hosts),
        ]

    def want(self, hosts: int) -> list[Job]:
        self.asked.append(hosts)
        return self.jobs()

    def release(self, host: str) -> None:
        self.hosts.remove(host)

    def planned(self) -> dict[str, str]:
        return {}

    def up(self, hosts: int | None) -> list[Job]:
        return self.jobs()

    def down(self) -> list[str]:
        return []


def test_hosts_are_asked_for_once() -> None:
    scheduler = Scheduler(["5", "6"])
    list(follow(scheduler, FleetAdvice(act=True, hosts=2, hosts_wanted=4)))
    scheduler.hosts += ["7", "8"]  # they wait for nodes
    assert not list(follow(scheduler, FleetAdvice(act=True, hosts=2, hosts_wanted=4))) and scheduler.asked == [4]


def test_those_leave_first_that_the_advice_names_first() -> None:
    scheduler = Scheduler(["5", "6", "7"])
    said = list(follow(scheduler, FleetAdvice(act=True, hosts=3, hosts_wanted=1, leave_first=["h7", "h5", "h6"])))
    assert scheduler.hosts == ["6"] and len(said) == 2


def test_hosts_that_the_advice_does_not_name_stay() -> None:
    scheduler = Scheduler(["5", "6", "7"])
    list(follow(scheduler, FleetAdvice(act=True, hosts=3, hosts_wanted=1, leave_first=["h6"])))
    assert scheduler.hosts == ["5", "7"]


def test_a_scheduler_that_chooses_itself_is_told_the_number() -> None:
    scheduler = Scheduler(["0", "1", "2"], chooses=True)
    list(follow(scheduler, FleetAdvice(act=True, hosts=3, hosts_wanted=1, leave_first=["h0"])))
    assert scheduler.asked == [1] and scheduler.hosts == ["0", "1", "2"]


def test_an_advice_alone_changes_nothing() -> None:
    scheduler = Scheduler(["5"])
    assert not list(follow(scheduler, FleetAdvice(hosts=1, hosts_wanted=4))) and not scheduler.asked
