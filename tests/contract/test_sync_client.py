"""Tests of the synchronous clients alone: Ctrl-C, forks, threads, a running event loop, and their names.

Their contract with a service is that of the asynchronous ones: tests/contract/test_client.py runs on both.
"""

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dora
from dora import client
from dora.client import background
from dora.data.types import Prompt
from dora.errors import Conflict
from dora.models.tiny import make_tiny
from tests.contract.trainer_service import TOKEN, Running, start_service
from tests.refusals import refused

GROUPS = 2


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def weights(model_folder: Path) -> Path:
    return model_folder / "model.safetensors"


@contextmanager
def served(store: Path, model_folder: Path) -> Iterator[Running]:
    """The scripted service in a thread of its own, so that the test's is free to wait."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    running: Running = run(start_service(store, model_folder))
    running.end = lambda: run(running.server.stop(None))
    try:
        yield running
    finally:
        run(running.server.stop(None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def service(tmp_path: Path, model_folder: Path) -> Iterator[Running]:
    with served(tmp_path / "store", model_folder) as running:
        yield running


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in an interpreter, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def trainer_of(service: Running) -> "dora.sync.Trainer":
    return dora.sync.Trainer(service.address, token=TOKEN, reconnect_s=20.0)


def interrupt_at(connection: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once, at the client's next use of ``method``, while the main thread waits for it."""
    original = getattr(connection, method)

    async def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(connection, method, original)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await original(*arguments)

    monkeypatch.setattr(connection, method, interrupted)


def test_the_names_and_parameters_are_those_of_the_asynchronous_clients() -> None:
    within = {
        "attach_again",
        "attached",
        "beside",
        "bring",
        "connection",
        "has_come",
        "release",
        "make_ready",
        "stream_step",
        "stub",
        "take",
    }  # for the client's own parts
    for ours, theirs in (
        (dora.sync.Trainer, client.Trainer),
        (dora.sync.Prompts, client.Prompts),
        (dora.sync.Step, client.Step),
        (dora.sync.EvaluationSeries, client.EvaluationSeries),
    ):
        public = {name for name, _ in inspect.getmembers(theirs) if not name.startswith("_")} - within
        assert public <= {name for name in dir(ours) if not name.startswith("_")}, ours
        called = [name for name in public if callable(getattr(theirs, name))]
        for name in [*called, *(["__init__"] if issubclass(ours, dora.sync.Client) else [])]:
            assert _parameters(getattr(ours, name)) == _parameters(getattr(theirs, name)), f"{ours}.{name}"
            assert getattr(ours, name).__doc__, f"{ours}.{name}"


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]


def test_clients_share_one_thread_which_ends_with_the_last(service: Running, weights: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "dora.sync" for thread in threading.enumerate())

    with trainer_of(service) as trainer:
        with dora.sync.Prompts(service.address, TOKEN) as prompts:
            assert prompts.submit([Prompt("p", "toy", (1,))]).accepted == 1
            assert threads() == 1
        for step in trainer.steps(groups=GROUPS):
            assert [group.group_id for group in step] == ["s0-g0", "s0-g1"]
            assert step.commit(weights=weights, metrics={"loss": 0.5}, wait=True).version == 1
            break
        assert threads() == 1
    assert threads() == 0
    trainer.open()  # as in a notebook
    assert next(trainer.steps()).number == 1
    trainer.close()
    trainer.close()
    assert threads() == 0


async def test_a_running_event_loop_is_no_hindrance(service: Running) -> None:
    """As in a notebook, whose cells run within one."""
    with trainer_of(service) as trainer:
        assert trainer.attach(GROUPS).next_step == 0


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_wait_and_loses_no_group(
    service: Running, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.service.faults.hold_after = 1
    with trainer_of(service) as trainer:
        step = next(trainer.steps(groups=GROUPS))
        taken = [next(step).group_id]
        interrupt_at(trainer._client.connection, "read", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            next(step)
        taken += [group.group_id for group in step]
        assert taken == ["s0-g0", "s0-g1"]
        step.commit(weights, wait=True)
    assert service.service.next_step == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_commit_comes_when_the_commit_is_whole(
    service: Running, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(service) as trainer:
        step = next(trainer.steps(groups=GROUPS))
        list(step)
        interrupt_at(trainer._client.connection, "call", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            step.commit(weights, wait=True)
        assert step.committed and service.service.next_step == 1
        assert step.commit(weights, wait=True).version == 1
        assert len(service.service.commits) == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_by_the_with_statement(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service.service.faults.hold_after = 1
    with pytest.raises(KeyboardInterrupt), trainer_of(service) as trainer:
        for step in trainer.steps(groups=GROUPS):
            next(step)
            interrupt_at(trainer._client.connection, "read", monkeypatch)
            next(step)
    assert background._shared.thread is None
    with refused(Conflict, field="trainer", why="is not open"):
        trainer.attach()


def test_errors_are_the_asynchronous_clients_own(service: Running, weights: Path) -> None:
    with trainer_of(service) as trainer:
        steps = trainer.steps(groups=GROUPS)
        step = next(steps)
        with refused(Conflict, names=("0", "2")) as caught:
            step.commit(weights, wait=True)
        assert caught.value.field == "step"
        with refused(Conflict, field="trainer", why="is open already"):
            trainer.open()


def test_a_thread_at_a_time(service: Running) -> None:
    service.service.faults.hold_after = 1
    with trainer_of(service) as trainer:
        step = next(trainer.steps(groups=GROUPS))
        next(step)
        left = threading.Event()

        def wait() -> None:
            with refused(Conflict, field="trainer", why="was closed meanwhile"):
                next(step)
            left.set()

        thread = threading.Thread(target=wait)
        thread.start()
        while not trainer._background._busy.locked():
            pass
        with refused(Conflict, field="trainer", allowed="used by one thread at a time"):
            trainer.attach()
        trainer._background.close()
        assert left.wait(30)
        thread.join()


def in_fork(work: Callable[[], object]) -> str:
    """Returns the error that ``work`` raises in a fork of this process."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = repr(work())
        except BaseException as error:  # told to the parent
            told = str(error)
        os.write(sink, told.encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, encoding="utf-8") as stream:
        told = stream.read()
    os.waitpid(child, 0)
    return told


def test_a_fork_is_refused_rather_than_hung(service: Running, weights: Path) -> None:
    """A DataLoader's worker processes are forks, for example."""
    with trainer_of(service) as trainer:
        step = next(trainer.steps(groups=GROUPS))
        list(step)
        told = in_fork(lambda: trainer.attach())
        assert f"was opened by process {os.getpid()}, which forked this one" in told
        assert "it must be used in the process that opened it" in in_fork(lambda: step.commit(weights, wait=True))
        assert "forked after a client was opened" in in_fork(lambda: trainer_of(service).open())
        assert in_fork(trainer.close) == "None"
        assert step.commit(weights, wait=True).version == 1
