"""A version whose weights no host has any more, event by event: asked for while it is needed, and nobody loads it."""

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.errors import Conflict, VersionRejected
from tests.refusals import refused
from tests.unit.test_arrival import TwoHosts
from tests.unit.test_rejection import Publications

WHY = "no host has its weights any more"


def loses(bench: Publications, version: int) -> list[do.Command]:
    return bench.post(on.VersionUnavailable(version, WHY))


def test_the_newest_is_asked_for_at_once_and_nobody_is_told_to_load_it() -> None:
    bench = Publications("w0", "w1", window=1)
    under_way = bench.loads(1)
    (told,) = [each for each in loses(bench, 1) if isinstance(each, do.RejectVersion)]
    assert (told.version, told.worker_ids, told.reason) == (1, (), WHY)
    with refused(VersionRejected, field="version", value=1):
        bench.post(on.StepRequested(1, 1))
    for load in under_way:
        bench.answer(load, ok=False, error="no such file")
    assert not bench.loads(1) and not bench.given(do.EvictWorker)
    assert loses(bench, 1) == [], "it is no news"
    bench.post(on.VersionRepublished(1, 1))
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {1}
    bench.fill(1)
    assert not bench.state.rejected and not bench.state.unavailable and not bench.state.window.quarantined


def test_what_was_loaded_before_goes_on_where_it_is() -> None:
    """Its weights were right: a response that runs on a worker which has them is trained on."""
    bench = Publications("w0", "w1")
    while not any(worker.hosts == 1 for worker in bench.state.workers.values()):
        bench.empty(*bench.state.workers)
        bench.load_all()
    worker = next(worker for worker in bench.state.workers.values() if worker.hosts == 1)
    bench.obey(do.StartRequest)
    (row, *_) = sorted(worker.rows)
    loses(bench, 1)
    assert worker.loaded == 1 and row in worker.rows and 1 in bench.state.proven
    bench.complete(bench.state.request_id[row])
    assert not bench.given(do.EvictWorker) and not bench.given(do.DropGroup)


def older_version(bench: Publications) -> None:
    """Version 2 is published, while groups of version 1 are under way."""
    while not any(worker.hosts == 1 and worker.rows for worker in bench.state.workers.values()):
        bench.empty(*bench.state.workers)
        bench.load_all()
    bench.fill(1)
    bench.post(on.StepCommitted(1, 1))
    assert of_version(bench, 1)


def of_version(bench: Publications, version: int) -> list[str]:
    groups = bench.state.groups
    return [
        name
        for row, name in bench.state.group_id.items()
        if groups["version"][row] == version and groups["unfinished"][row]
    ]


def test_an_older_one_is_asked_for_while_its_groups_are_under_way() -> None:
    bench = Publications("w0", "w1", window=3)
    older_version(bench)
    loses(bench, 1)
    assert set(bench.state.rejected) == {1}
    for name in of_version(bench, 1):
        bench.post(on.GroupCancelled(name, "cancelled on request"))
    assert not bench.state.rejected, "nobody needs it any more"
    assert bench.state.window.admissible(1) == 0
    loads = len(bench.given(do.LoadVersion))
    for step in (2, 3, 4):
        bench.load_all()
        bench.offer(bench.state.drawing)
        bench.fill(step)
        bench.post(on.StepCommitted(1, step))
    assert not bench.state.unavailable and not bench.state.window.quarantined, "it has left the window"
    assert 1 not in [load.version for load in bench.given(do.LoadVersion)[loads:]]
    retired = [each.version for each in bench.given(do.RetireVersion)]
    assert retired == sorted(set(retired)) and 1 in retired


def test_a_version_in_doubt_may_be_gone() -> None:
    bench = Publications("w0", "w1", window=1)
    bench.refuse(bench.loads(1)[0])
    assert bench.state.suspects
    loses(bench, 1)
    assert not bench.state.suspects and set(bench.state.rejected) == {1}
    bench.post(on.VersionRepublished(1, 1))
    bench.load_all()
    assert 1 in bench.state.proven


@pytest.mark.parametrize("version", [0, 2])
def test_neither_the_model_nor_what_was_never_published_can_be_gone(version: int) -> None:
    bench = Publications("w0")
    assert loses(bench, version) == [] and not bench.state.unavailable


def test_what_is_on_a_host_again_is_asked_for_no_more() -> None:
    bench = Publications("w0", window=1)
    (load,) = bench.loads(1)
    loses(bench, 1)
    bench.answer(load, ok=False, error="no such file", error_kind="missing")
    assert bench.state.rejected and not bench.loads(1)
    bench.post(on.VersionArrived("", 1))
    assert not bench.state.rejected and not bench.state.unavailable
    bench.load_all()
    assert bench.state.workers["w0"].hosts == 1


def test_what_was_asked_for_and_has_been_found_is_known_until_the_next_commit() -> None:
    """Its trainer may be about to bring it: that is no mistake of the trainer's."""
    bench = Publications("w0", "w1")
    loses(bench, 1)
    assert bench.machine.has_to_come(1) and not bench.machine.was_found(1)
    bench.post(on.VersionArrived("", 1))
    assert bench.machine.was_found(1) and not bench.machine.has_to_come(1)
    with refused(Conflict, field="version", value=1):
        bench.post(on.VersionRepublished(1, 1))
    assert not bench.machine.was_found(0) and not bench.machine.was_found(2)
    bench.load_all()
    bench.fill(1)
    bench.post(on.StepCommitted(1, 1))
    assert not bench.machine.was_found(1) and not bench.state.to_republish


def test_what_is_needed_no_more_may_still_come_anew() -> None:
    """Its trainer was asked for it, and is at it as the last response ends."""
    bench = Publications("w0", "w1", window=3)
    older_version(bench)
    loses(bench, 1)
    for name in of_version(bench, 1):
        bench.post(on.GroupCancelled(name, "cancelled on request"))
    assert not bench.state.rejected and bench.machine.has_to_come(1) and not bench.machine.was_found(1)
    bench.post(on.VersionRepublished(1, 1))
    assert not bench.state.unavailable and not bench.state.window.quarantined and not bench.state.to_republish


def test_a_worker_that_comes_with_other_weights_does_not_prove_what_is_gone() -> None:
    """Its trainer may be publishing others under this number at the moment: nobody has sampled under those yet."""
    bench = Publications("w0", "w1", window=3)
    bench.fill(1)
    bench.post(on.StepCommitted(1, 1))
    bench.state.proven.discard(1)
    loses(bench, 1)
    for name in of_version(bench, 1):
        bench.post(on.GroupCancelled(name, "cancelled on request"))
    assert not bench.state.rejected and 1 in bench.state.unavailable
    bench.post(on.WorkerJoined("w9", 99, 8, 4096, version=1))
    assert bench.state.workers["w9"].loaded != 1 and 1 not in bench.state.proven
    assert not bench.machine.counts_load("w9", 1)


def test_what_is_found_on_another_host_is_not_in_the_services_own_store_yet() -> None:
    bench = TwoHosts(window=1)
    bench.load_all()
    loses(bench, 1)
    for name in ("near", "far"):
        bench.post(on.WorkerLost(name, bench.state.workers[name].epoch, "killed"))
    bench.join("near")
    bench.join("far", host="there")
    bench.post(on.VersionArrived("there", 1))
    assert not bench.state.rejected and [load.worker_id for load in bench.loads(1)] == ["far"]
    bench.post(on.VersionArrived("", 1))
    assert {load.worker_id for load in bench.loads(1)} == {"far", "near"} and not bench.state.missing


def test_what_is_gone_and_published_anew_is_in_the_services_own_store() -> None:
    bench = TwoHosts(window=1)
    loses(bench, 1)
    bench.load_all()
    bench.post(on.VersionRepublished(1, 1))
    assert [load.worker_id for load in bench.loads(1)] == ["near"] and not bench.state.missing
