"""Names of workers and hosts, which workers begin and leave when a host is scaled, and how many each host gets."""

import pytest

from dora.errors import InvalidValue
from dora.host.command import pool_id_of
from dora.host.launcher import LOCAL, WORKERS_MAX, check_host_name, number_of, prefix_of, scaled, worker_name
from dora.orchestrator.hosts.worker_counts import distributor
from tests.refusals import refused


def test_ids_begin_with_their_host_but_for_the_services_own() -> None:
    assert worker_name(prefix_of(LOCAL), 0) == "w0" and pool_id_of(LOCAL) == "pool-0"
    assert worker_name(prefix_of("gpu-7"), 12) == "gpu-7-w12" and pool_id_of("gpu-7") == "gpu-7-pool-0"
    assert number_of(prefix_of("gpu-7"), "gpu-7-w12") == 12


@pytest.mark.parametrize("name", ["", "local", "-x", "a/b", "a b", "é", "a" * 33])
def test_a_name_that_no_host_may_have(name: str) -> None:
    with refused(InvalidValue, field="name"):
        check_host_name(name)


def test_the_lowest_free_numbers_begin_and_the_highest_leave() -> None:
    present = ["h-w10", "h-w2", "h-w0"]
    assert scaled("h-", present, 5).started == ("h-w1", "h-w3")
    assert scaled("h-", present, 1).surplus == ("h-w2", "h-w10")
    assert scaled("h-", present, 3) == scaled("h-", sorted(present), 3)
    assert len(scaled("h-", [], WORKERS_MAX).started) == WORKERS_MAX
    for wrong in (-1, WORKERS_MAX + 1):
        with refused(InvalidValue, field="workers", names=("0", "256")):
            scaled("h-", present, wrong)


def test_hosts_are_filled_evenly_and_emptied_from_the_fullest() -> None:
    assert distributor({"a": 1, "b": 4, "c": 2}, 9) == {"a": 3, "b": 4, "c": 2}
    assert distributor({"a": 1, "b": 4, "c": 2}, 5) == {"a": 1, "b": 2, "c": 2}
    assert distributor({"a": 1}, 0) == {"a": 0}
    with refused(InvalidValue, field="workers", value=1):
        distributor({}, 1)
