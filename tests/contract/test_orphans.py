"""A worker that outlives its service: it generates on, and the next service gets what it lacks, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from dora.data.types import RequestSpec, SamplingParams
from dora.kvtransfer.plane import DataPlane
from dora.models.tiny import make_tiny
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.worker.engine import RolloutEngine
from dora.worker.fake.engine import FakeEngine
from dora.worker.loop import EngineLoop
from dora.worker.responses import Responses
from tests.contract.driver import Driver, Response, VersionFolder, make_request
from tests.contract.incarnations import Incarnation, Unhurried
from tests.contract.planes import a_plane
from tests.contract.workers import Worker, anywhere, peer_of

SAMPLING = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)


def requests_of(count: int, max_tokens: int = 30) -> list[RequestSpec]:
    return [
        replace(make_request(index), sampling=replace(SAMPLING, seed=index, max_tokens=max_tokens + index))
        for index in range(1, count + 1)
    ]


def undisturbed(driver: Driver, requests: list[RequestSpec]) -> dict[str, Response]:
    """Returns the results without an end of the service."""
    for request in requests:
        driver.add(request)
    found = dict(driver.finish())
    driver.clear()
    return found


def begin(engine: RolloutEngine, folder: Path, requests: list[RequestSpec], tokens: int) -> Worker:
    """A worker that outlives, with these requests, each with so many tokens told."""
    worker = Worker(None, folder, engine=engine, orphan_timeout_s=60.0)
    load = pb.LoadVersion(version=1, name=str(folder))
    assert worker.obey(load_version=load).ok
    for request in requests:
        assert worker.obey(start_request=convert.request_to_wire(request)).ok
    while min(len(worker.tokens.get(request.request_id, ())) for request in requests) < tokens:
        worker.turn()
    return worker


def held(loop: EngineLoop) -> dict[str, int]:
    return {each.request_id: each.tokens for each in loop.held().held}


def test_the_next_service_gets_what_it_lacks(driver: Driver, version_folder: VersionFolder) -> None:
    """It may have lost the last tokens that it was told, and has none of those that were sampled without it."""
    requests = requests_of(4)
    expected = undisturbed(driver, requests)
    worker = begin(driver.engine, version_folder(1), requests, 6)
    worker.loop.leave()
    for _ in range(9):
        assert worker.loop.step_alone()
    said = worker.loop.held()
    assert (said.hosts.version, said.hosts.name) == (1, str(version_folder(1)))
    assert held(worker.loop) == {request.request_id: len(worker.tokens[request.request_id]) + 9 for request in requests}
    worker.return_with({"r1": 0, "r2": 4, "r3": 6})
    for name in ("r1", "r2", "r3"):
        worker.finish(name)
        assert worker.tokens[name] == expected[name].token_ids
        assert worker.logprobs[name] == [float(np32(value)) for value in expected[name].logprobs]
    assert "r4" not in held(worker.loop), "a request that is not named is given up"
    assert driver.engine.load().running == driver.engine.load().waiting == 0


def test_what_has_ended_meanwhile_is_told(driver: Driver, version_folder: VersionFolder) -> None:
    requests = requests_of(2)
    expected = undisturbed(driver, requests)
    worker = begin(driver.engine, version_folder(1), requests, 3)
    worker.loop.leave()
    while worker.loop.step_alone():
        pass
    worker.tokens["r2"] = list(
        expected["r2"].token_ids
    )  # the service has all of it, and does not know that it has ended
    worker.return_with({"r1": 2, "r2": len(expected["r2"].token_ids)})
    assert worker.ends == {"r1": expected["r1"].finish_reason, "r2": expected["r2"].finish_reason}
    assert [worker.tokens[name] for name in ("r1", "r2")] == [expected[name].token_ids for name in ("r1", "r2")]


def test_an_ended_response_is_kept_until_it_is_settled(engine: RolloutEngine, version_folder: VersionFolder) -> None:
    worker = begin(engine, version_folder(1), requests_of(2), 3)
    for name in ("r1", "r2"):
        worker.finish(name)
    worker.order(settled=pb.Settled(request_ids=["r1", "unknown"]))
    worker.turn()
    worker.loop.leave()
    assert list(held(worker.loop)) == ["r2"]
    worker.return_with({"r2": 1})
    assert worker.ends["r2"] == "length"
    assert worker.obey(remove_request=pb.RemoveRequest(request_id="r2")).ok
    assert not held(worker.loop)


def test_it_may_be_left_more_than_once(driver: Driver, version_folder: VersionFolder) -> None:
    requests = requests_of(2)
    expected = undisturbed(driver, requests)
    worker = begin(driver.engine, version_folder(1), requests, 2)
    for tokens in (3, 6, 10):
        worker.loop.leave()
        for _ in range(5):
            worker.loop.step_alone()
        worker.return_with({"r1": tokens, "r2": tokens - 3})
    for name in ("r1", "r2"):
        assert worker.finish(name) == expected[name].token_ids


def test_what_was_under_way_between_workers_is_undone(tmp_path: Path) -> None:
    """A frozen request goes on, and nothing is kept for one that will not come."""
    model = make_tiny("dense", tmp_path / "model", seed=1)
    load = pb.LoadVersion(version=1, name=str(model))
    with a_plane(tmp_path, 1, ("shm",)) as one, a_plane(tmp_path, 2, ("shm",)) as two:
        source, target = Worker(one, model, orphan_timeout_s=60.0), Worker(two, model, orphan_timeout_s=60.0)
        request = replace(make_request(1), sampling=replace(SAMPLING, max_tokens=60))
        for worker in (source, target):
            assert worker.obey(load_version=load).ok
        assert source.obey(start_request=convert.request_to_wire(request)).ok
        assert target.obey(reserve_slot=pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=1)).ok
        assert target.end is not None
        assert source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end))).ok
        assert not source.engine.has_work(), "it is frozen"
        for worker in (source, target):
            worker.loop.leave()
        assert target.engine.reserved == 0
        assert source.loop.step_alone() and not target.loop.step_alone()
        source.return_with({"r1": 0})
        assert len(source.finish("r1")) == 60


def test_a_worker_that_has_no_room_for_more_stands_still(tmp_path: Path) -> None:
    model = make_tiny("dense", tmp_path / "model", seed=1)
    worker = Worker(None, model, orphan_timeout_s=60.0)
    worker.loop._responses = Responses(most_bytes=8 * 40)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    for request in requests_of(4, max_tokens=30):
        assert worker.obey(start_request=convert.request_to_wire(request)).ok
    worker.loop.leave()
    steps = 0
    while worker.loop.step_alone():
        steps += 1
    assert steps == 10, "four requests have got ten tokens each"
    before = held(worker.loop)
    worker.return_with({name: len(worker.tokens.get(name, [])) for name in before})
    worker.turn()
    assert held(worker.loop) == {name: tokens + 1 for name, tokens in before.items()}


def test_without_a_service_that_keeps_its_state_nothing_is_kept(tmp_path: Path) -> None:
    model = make_tiny("dense", tmp_path / "model", seed=1)
    worker = Worker(None, model)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    assert worker.obey(start_request=convert.request_to_wire(requests_of(1)[0])).ok
    assert worker.loop.orphan_timeout_s == 0.0 and not worker.loop.held().held


def np32(value: float) -> float:
    """As it travels."""
    return float(np.float32(value))


def test_a_copy_that_ends_late_is_not_told_to_the_next_service_whose_commands_have_the_same_numbers(
    tmp_path: Path,
) -> None:
    model = make_tiny("dense", tmp_path / "model", seed=1)
    engine = FakeEngine(slots=4, kv_tokens=2048, max_model_len_tokens=256, mean_tokens=25, model=model)
    first, second, plane = Incarnation(), Incarnation(), Unhurried()
    welcome = pb.Welcome(epoch=1, report_period_ms=1, orphan_timeout_s=60.0)
    clock = iter(range(1 << 40)).__next__
    loop = EngineLoop(engine, first, welcome, cast(DataPlane, plane), clock, anywhere)
    first.commands = [
        pb.WorkerCommand(command_id=1, load_version=pb.LoadVersion(version=1, name=str(model))),
        pb.WorkerCommand(command_id=2, start_request=convert.request_to_wire(requests_of(1)[0])),
    ]
    loop.turn()
    first.commands = [pb.WorkerCommand(command_id=3, copy_out=pb.CopyOut(request_id="r1"))]
    while engine.has_work():
        loop.turn()
    (transfer,) = plane.sent
    loop.leave()
    loop.come_back(second, pb.Welcome(epoch=2, report_period_ms=1, orphan_timeout_s=60.0), None)
    assert transfer.cancelled.is_set()
    transfer.fail("it was cancelled")
    assert [outcome.command_id for outcome in first.outcomes] == [1, 3]
    assert not second.outcomes
