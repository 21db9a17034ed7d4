"""Settings that are limits of time: what happens is observed with the time at which it happens."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Final

from dora.config import Config
from dora.core import commands as do
from dora.core import events as on
from dora.data.types import RequestSpec, SamplingParams
from dora.host.launcher import WorkerStartError
from dora.orchestrator import waiting
from dora.orchestrator.recovery.reattachment import Reattachment
from dora.orchestrator.rollout.streams import MemberSessions
from dora.orchestrator.runtime import Runtime
from dora.worker.fake.engine import FakeEngine
from dora.worker.reporting import Reporting
from tests.unit.effects.of_core import bench
from tests.unit.effects.rows import Place, Row, Seen, Shown
from tests.unit.test_machine import Bench

# -------------------------------------------------------------------------------------------- the time of an event loop


class _Passing(selectors.DefaultSelector):
    """Waits for nothing: the time until the next timer has passed at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passing = _Passing()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.now_s


def passed_s(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """The seconds of the event loop that the work takes."""

    async def timed() -> float:
        await work()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return round(runner.run(timed()), 1)


def until_start_fails(config: Config, _: Place) -> float:
    runtime: Any = SimpleNamespace(core=bench(config).machine)
    launcher: Any = SimpleNamespace(early_death=lambda: None)

    async def work() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        said: list[str] = []
        try:
            await waiting.until_ready(config, runtime, launcher, asyncio.Event(), (never,), said.append)
        except WorkerStartError:
            assert abs(len(said) - config.workers.start_timeout_s // waiting.LINES_S) <= 1, said
            return
        raise AssertionError("the start goes on without workers")

    return passed_s(work)


def until_drained(config: Config, _: Place) -> float:
    """With a trainer that takes nothing and stays."""
    runtime: Any = SimpleNamespace(
        feed=SimpleNamespace(close=lambda: None),
        core=SimpleNamespace(post=lambda event: None, state=SimpleNamespace(group_row={})),
        trainers=SimpleNamespace(is_expected=lambda: True),
        draining=SimpleNamespace(),
    )

    async def work() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await waiting.drain(config, runtime, (never,))

    return passed_s(work)


def until_reattached(config: Config, _: Place) -> float:
    """A start with a state whose worker does not come back."""

    async def nothing() -> None: ...

    posted: list[object] = []
    runtime: Any = SimpleNamespace(
        config=config,
        _begun=nothing,
        incarnation=SimpleNamespace(reattachment=Reattachment({"w0"})),
        environments=SimpleNamespace(restored=lambda: None),
        core=SimpleNamespace(post=posted.append),
        hosts=SimpleNamespace(stood=lambda: ()),
        storage=SimpleNamespace(faults=()),
    )
    nothing_left: Any = None
    restored = on.Restored(0, 0, 0, 0, 2, 0, 0, 0, 0, (), nothing_left)
    took_s = passed_s(lambda: Runtime.restore(runtime, restored))
    assert posted
    return took_s


# ----------------------------------------------------------------------------------------------------- the core's clock


def until_given(one: Bench, kind: type, each_s: Callable[[], object] = lambda: None) -> int:
    """The seconds until the core gives such a command."""
    for second in range(1000):
        if one.given(kind):
            return second
        one.now_s += 1.0
        each_s()
        one.post(on.Tick())
    raise AssertionError(f"no {kind.__name__} in {one.now_s} s")


def until_load_fails(config: Config, _: Place) -> int:
    one = bench(config)
    one.join("w0")
    return until_given(one, do.EvictWorker)


def until_stalled(config: Config, _: Place) -> int:
    """A worker that reports, and no token."""
    one = bench(config)
    one.start("w0")
    one.offer(1)
    one.obey(do.StartRequest)
    worker = one.state.workers["w0"]
    report = on.Progress("w0", worker.epoch, worker.loaded, {}, {}, 0, 10)
    return until_given(one, do.EvictWorker, lambda: one.post(report))


def until_unanswered(config: Config, _: Place) -> int:
    """A worker that answers no command."""
    one = bench(config)
    one.start("w0")
    one.offer(1)
    return until_given(one, do.EvictWorker)


def until_undone(config: Config, _: Place) -> int:
    """A handoff whose copy never ends."""
    one = bench(config)
    one.move()
    assert one.state.handoffs
    for second in range(1000):
        if not one.state.handoffs or next(iter(one.state.handoffs.values())).overdue:
            return second
        one.now_s += 1.0
        one.post(on.Tick())
    raise AssertionError("the handoff never ends")


# --------------------------------------------------------------------------------------------------- the worker's clock


def reports(config: Config, place: Place) -> int:
    """The reports that a worker with work sends in ten seconds, of steps of 10 ms."""
    period_ms = MemberSessions(lambda *_: None, None, config.workers.report_period_ms).report_period_ms
    engine = FakeEngine(slots=1, kv_tokens=4096, max_model_len_tokens=4096)
    engine.load_weights(0, place.model("dense"), None)
    engine.add(RequestSpec("r", 0, (1, 2), SamplingParams(max_tokens=2000, ignore_eos=True)))
    now_s, sent = 0.0, []
    orders: Any = SimpleNamespace(send=sent.append)
    reporting = Reporting(engine, orders, period_ms / 1000, lambda: now_s)
    reporting.begin("r", 0)
    for _step in range(1000):
        now_s += 0.01
        reporting.add(engine.step())
        reporting.report_due(True)
    return len(sent)


LATER: Final = "tests/e2e/test_orphans_fake.py::test_a_worker_ends_where_no_service_comes_back"

ZONES: Final = "tests/unit/test_places.py::test_the_link_between_zones_decides_whether_kv_crosses"

ROWS: Final[dict[str, Row]] = {
    "balance.handoff_timeout_s": Seen(12.0, until_undone, 12),
    "host.lease_s": Shown("tests/unit/test_host_service.py::test_a_host_is_lost_once_nothing_of_it_is_heard"),
    "host.notice_s": Shown("tests/e2e/test_host_notice.py::test_hosts_leave_by_a_deadline_and_every_group_comes_once"),
    "host.zone_link_bytes_per_s": Shown(ZONES),
    "host.zone_link_latency_s": Shown(ZONES),
    "workers.silence_timeout_s": Seen(5.0, until_unanswered, 65),
    "workers.load_timeout_s": Seen(12.0, until_load_fails, 12),
    "service.trainer_stall_timeout_s": Shown(
        "tests/e2e/test_lease_fake.py::test_another_trainer_goes_on_with_the_groups_of_one_that_stalls"
    ),
    "workers.stall_timeout_s": Seen(40.0, until_stalled, 40),
    "workers.start_timeout_s": Seen(7.0, until_start_fails),
    "workers.orphan_timeout_s": Shown(LATER),
    "workers.reattach_timeout_s": Seen(2.0, until_reattached, 2.0),
    "workers.report_period_ms": Seen(500, reports),
    "service.drain_timeout_s": Seen(3.0, until_drained),
}
