"""Runs the demo: the service in this process, the trainer as a child, both watched; then the audit.

serve() ─▶ listening ─▶ trainer process ─── a JSON line per step ───▶ trained
              └─▶ ready ─▶ WatchStatus and ListTrajectories ─▶ screen, series.jsonl
trainer ends ─▶ counters are read ─▶ drain ─▶ record is read ─▶ report.json, timeline.png, report.html
"""

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora.agents.environment.child import EnvironmentProcess
from dora.client import Operator
from dora.config import Config
from dora.data.record_content import STEPS_FILE
from dora.errors import DoraError
from dora.host.launcher import LOCAL
from dora.ops.demo.audit import read_record, step_summaries
from dora.ops.demo.folder import OutFolder
from dora.ops.demo.held_out import write_held_out
from dora.ops.demo.moves import MoveWatch
from dora.ops.demo.options import DemoOptions, service_config
from dora.ops.demo.report import DemoReport, DemoRun, DemoSeconds, VersionEvaluation, build_report
from dora.ops.demo.screen import Screen
from dora.ops.demo.series import read_series, sample_json, sample_of, shares
from dora.ops.demo.timeline import TrainerSpan, draw_timeline
from dora.ops.demo.trainer_process import TrainedStep, TrainerProcess
from dora.ops.stored_token import left_token
from dora.ops.view.learning import learning_of
from dora.ops.view.learning_page import page, text_of
from dora.orchestrator.main import ServiceHandle, serve
from dora.rpc.dora_pb2 import EvaluatedVersion, Status, WorkerStatus
from dora.rpc.roles import Role

WATCH_PERIOD_MS = 250
HELD_TRAJECTORIES_MAX = 1_000_000
COUNTER_READS_MAX = 50
EVALUATED_S = 60.0  # after the last step


class CountersUnsettled(DoraError):
    """The service's counters changed during every attempt to read them."""


@dataclass(frozen=True, slots=True)
class GroupBalance:
    """The service's state when the trainer had ended."""

    status: Status
    groups_open: int
    groups_overdue: int


@dataclass(frozen=True, slots=True)
class RunObservations:
    """Observations of a run while the service was running."""

    balance: GroupBalance
    trained: dict[int, list[str]]
    replayed: dict[int, list[str]]
    model_s: float  # event loop time when the model was prepared
    ready_s: float  # event loop time when all workers were ready
    committed: list[TrainedStep]
    trainer_failure: str  # empty: it succeeded
    workers_killed: int  # on request


Ready = asyncio.Future[ServiceHandle]  # set when all workers are ready
Use = Callable[[ServiceHandle, Ready], Coroutine[Any, Any, RunObservations]]


async def run_demo(options: DemoOptions, folder: OutFolder, screen: Screen) -> DemoReport:
    """Runs the demo. Returns its report; ``folder`` has it, record, series and timeline. Raises as ``serve``."""
    config = service_config(options, folder)
    clock = asyncio.get_running_loop().time
    started_s = clock()
    folder.clear()
    if config.evaluation.prompts == str(folder.held_out):
        await asyncio.to_thread(write_held_out, folder.held_out, config)
    with _logging_to(folder.service_log):
        watched = await _with_service(
            config, screen, lambda handle, ready: _watched_run(handle, ready, options, config, folder, screen)
        )
    rows = read_record(folder.trajectories)
    run = DemoRun(
        model=options.model,
        window=config.window.most,
        workers=config.workers.count,
        groups_per_step=config.window.groups_per_step,
        group_size=config.rollout.group_size,
        steps_planned=options.steps_planned,
        groups_open_at_end=watched.balance.groups_open,
        groups_overdue_at_end=watched.balance.groups_overdue,
        kill_worker_after_s=options.kill_worker_after_s,
        workers_killed=watched.workers_killed,
        environment=config.environment.spec,
        replay_share=options.replay_share,
        replayed=watched.replayed,
        evaluated=tuple(map(_evaluation, sorted(watched.balance.status.evaluated, key=lambda each: each.version))),
    )
    seconds = _seconds(started_s, watched, clock())
    samples = read_series(folder.series)
    counters = dict(watched.balance.status.counters)
    report = build_report(rows, counters, watched.trained, seconds, run, shares(samples))
    if watched.trainer_failure:
        report["failures"].append(watched.trainer_failure)
    folder.report.write_text(json.dumps(report, indent=2) + "\n")
    name = Path(run.model).name  # the last part of a path, because the title has one line
    title = f"dora demo: {name}, {report['steps']} steps, window {run.window}, {run.workers} workers"
    steps = step_summaries(rows, watched.trained)
    trained = trainer_spans(watched.committed, watched.ready_s)
    await asyncio.to_thread(draw_timeline, samples, steps, trained, title, run, folder.timeline)
    await asyncio.to_thread(_write_page, folder, title)
    return report


def _write_page(folder: OutFolder, title: str) -> None:
    if (folder.record / STEPS_FILE).exists():
        content = page(learning_of(folder.record), title, 0.0, text_of(folder.record))
        folder.page.write_text(content, encoding="utf-8")


def _seconds(started_s: float, watched: RunObservations, ended_s: float) -> DemoSeconds:
    commits_s = [step.committed_s for step in watched.committed] or [watched.ready_s]
    ready_s = min(watched.ready_s, commits_s[0])  # a step may be committed while a slow worker starts
    return DemoSeconds(
        model=watched.model_s - started_s,
        start=ready_s - watched.model_s,
        first_step=commits_s[0] - ready_s,
        later_steps=commits_s[-1] - commits_s[0],
        end=ended_s - commits_s[-1],
    )


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """Writes the service's log to a file, because on the terminal it would break the live view."""
    logger = logging.getLogger("dora")
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        handler.close()


async def _with_service(config: Config, screen: Screen, use: Use) -> RunObservations:
    """Serves while ``use(handle, ready)`` runs, then drains. If either fails, the other ends."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    listening: Ready = loop.create_future()
    ready: Ready = loop.create_future()
    service = asyncio.create_task(
        serve(config, ready=ready.set_result, stop=stop, progress=screen.line, listening=listening.set_result)
    )
    using: asyncio.Task[RunObservations] | None = None
    either: list[asyncio.Future[Any]] = [listening, service]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            await service  # raises the error that ended it before it was listening
        using = asyncio.create_task(use(listening.result(), ready))
        await asyncio.wait({using, service}, return_when=asyncio.FIRST_COMPLETED)
        if not using.done():
            await service
        return await using
    finally:
        if using is not None and not using.done():
            using.cancel()
            await asyncio.wait({using})
        stop.set()
        await asyncio.wait({service})
        if not service.cancelled() and (error := service.exception()) is not None:
            raise error


def trainer_arguments(options: DemoOptions, config: Config, address: str) -> list[str]:
    arguments = ["--address", address, "--steps", str(options.steps_planned), "--lr", str(options.rate)]
    arguments += ["--groups", str(config.window.groups_per_step)]
    arguments += ["--layers", str(options.preset.train_layers)]
    arguments += ["--micro-batch-tokens", str(options.preset.micro_batch_tokens)]
    if options.replay_share:
        arguments += ["--replay-share", str(options.replay_share), "--replay-by", options.replay_by]
    if options.preset.autocast:
        arguments += ["--autocast", "auto"]
    return [*arguments, *options.trainer_arguments]


async def _watched_run(
    handle: ServiceHandle, ready: Ready, options: DemoOptions, config: Config, folder: OutFolder, screen: Screen
) -> RunObservations:
    """Stores the token for commands while it trains, as ``dora serve`` does."""
    screen.line(f"serving on {handle.address}; starting the trainer. Look into it from another terminal:")
    screen.line(f"  dora status --address {handle.address}")
    screen.line(f"  dora front --service {handle.address}    # then open http://127.0.0.1:8000/")
    with left_token(handle.address, handle.token):
        return await _trained(handle, ready, options, config, folder, screen)


async def _trained(
    handle: ServiceHandle, ready: Ready, options: DemoOptions, config: Config, folder: OutFolder, screen: Screen
) -> RunObservations:
    """Trains and watches until the trainer ends, then reads the service's counters.

    The trainer starts beside the workers, so that full engines don't wait for its imports.
    """
    arguments = trainer_arguments(options, config, handle.address)
    threads = options.preset.trainer_threads
    async with (
        Operator(handle.address, handle.token) as operator,
        TrainerProcess(arguments, handle.tokens[Role.TRAINER], threads, folder.trainer_log, folder.trained) as trainer,
        _environment(config, handle, folder),
    ):
        strike = Strike(options.kill_worker_after_s, screen)
        training = asyncio.create_task(trainer.run())
        watching: asyncio.Task[None] | None = None
        try:
            await ready
            ready_s = asyncio.get_running_loop().time()
            screen.line("all workers are ready")
            watching = asyncio.create_task(_watch(operator, strike, folder, screen))
            code = await training
            if not code and config.evaluation.every:
                await _evaluated(operator, options.steps_planned, config.evaluation.every)
        finally:
            for task in (training, watching):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        balance = await _read_balance(operator)
    screen.show(balance.status, last=True)
    failure = f"the trainer ended with exit code {code}: {trainer.last_words()}" if code else ""
    return RunObservations(
        balance=balance,
        trained=trainer.trained,
        replayed=trainer.replayed,
        model_s=handle.model_s,
        ready_s=ready_s,
        committed=trainer.committed,
        trainer_failure=failure,
        workers_killed=strike.workers_killed,
    )


@asynccontextmanager
async def _environment(config: Config, handle: ServiceHandle, folder: OutFolder) -> AsyncIterator[None]:
    """Runs the sessions' environment, if there is one. Raises InvalidValue if its class does not load."""
    if not config.environment.spec:
        yield
        return
    environment = await asyncio.to_thread(EnvironmentProcess, config.environment, config.reward.environment)
    environment.start(handle.address, handle.tokens[Role.ENVIRONMENT], handle.model, folder.environment_log)
    try:
        yield
    finally:
        await environment.stop()


def trainer_spans(committed: Sequence[TrainedStep], ready_s: float) -> list[TrainerSpan]:
    """The timeline's trainer row, in seconds since the service was ready."""
    spans: list[TrainerSpan] = []
    for step in committed:
        end_s = step.committed_s - ready_s
        begin_s = spans[-1].end_s if spans else end_s - step.took_s
        spans.append(TrainerSpan(step.step, begin_s, end_s, step.took_s - step.waited_s))
    return spans


async def _evaluated(operator: Operator, steps: int, every: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(EVALUATED_S):
            async for status in operator.watch(WATCH_PERIOD_MS):
                if any(each.version >= steps - steps % every for each in status.evaluated):
                    return


def _evaluation(found: EvaluatedVersion) -> VersionEvaluation:
    reward = found.reward_mean if found.HasField("reward_mean") else None
    return {"version": found.version, "responses": found.responses, "reward": reward}


class Strike:
    """Kills one worker with SIGKILL once ``after_s`` has passed and one runs requests; never if it is None."""

    def __init__(self, after_s: float | None, screen: Screen) -> None:
        self._after_s = after_s
        self._screen = screen
        self.workers_killed = 0

    def look(self, status: Status, now_s: float) -> None:
        """Kills the busiest worker if it is time to. A status without one is skipped."""
        if self._after_s is None or self.workers_killed or now_s < self._after_s:
            return
        victim = busiest(status)
        if victim is None:
            return
        with suppress(ProcessLookupError):  # it has just ended: the next status has another
            os.kill(victim.pid, signal.SIGKILL)
            self.workers_killed = 1
            self._screen.line(f"killed {victim.worker_id} (pid {victim.pid}, {victim.running} requests), as requested")


def busiest(status: Status) -> WorkerStatus | None:
    """The worker of the service's own host that runs the most requests; None if none runs any."""
    own = [worker for worker in status.workers if worker.pid and worker.running and worker.host == LOCAL]
    return max(own, key=lambda worker: worker.running, default=None)


async def _watch(operator: Operator, strike: Strike, folder: OutFolder, screen: Screen) -> None:
    clock = asyncio.get_running_loop().time
    started_s = clock()
    moves = MoveWatch()
    with folder.series.open("w") as series:
        async for status in operator.watch(WATCH_PERIOD_MS):
            now_s = clock() - started_s
            held = await operator.trajectories(limit=HELD_TRAJECTORIES_MAX)
            workers = {worker.worker_id for worker in status.workers}
            moved = moves.seen(held.trajectories, workers, now_s)
            series.write(sample_json(sample_of(status, now_s, moved)) + "\n")
            series.flush()
            screen.show(status)
            strike.look(status, now_s)


async def _read_balance(operator: Operator) -> GroupBalance:
    """Reads consistent counters and trajectories: retries until nothing was admitted or taken in between."""
    before = await operator.status()
    for _ in range(COUNTER_READS_MAX):
        held = await operator.trajectories(limit=HELD_TRAJECTORIES_MAX)
        after = await operator.status()
        if all(before.counters.get(name) == after.counters.get(name) for name in ("groups_admitted", "groups_taken")):
            open_groups = {row.group_id for row in held.trajectories}
            overdue = {
                row.group_id
                for row in held.trajectories
                if row.state != "leased" and row.deadline_step < after.filling_step
            }
            return GroupBalance(after, len(open_groups), len(overdue))
        before = after
    raise CountersUnsettled(f"the service's counters changed during each of {COUNTER_READS_MAX} attempts to read them")
