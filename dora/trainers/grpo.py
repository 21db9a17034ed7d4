"""The reference trainer: any objective of ``objectives/presets.py``, DAPO's by default, on one process or several.

    python -m dora.trainers.grpo --address 127.0.0.1:7070 --token-file FILE --groups 16 --steps 100 --lr 1e-5
    python -m dora.trainers.grpo --objective gspo --anchor proximal --correction mask --kl-coefficient 0.01
    torchrun --standalone --nproc-per-node 2 -m dora.trainers.grpo --checkpoints out/checkpoints

:func:`train` is a run, :meth:`_Run.train_step` a step, and :func:`take_groups` trains while groups still arrive. The
learner (``learner.py``) owns the model and computes gradients of groups. On several ranks the first one runs all this,
and its learner sends orders to those of the others (:func:`follow`).

The importance ratio is present policy / behaviour policy, both of the *raw* model: the recorded logprobs are taken
before temperature, top-p and penalties. At temperature 1 without truncation or penalties, tokens were sampled from that
distribution, and the ratio is exact. At another temperature the ratio still measures how far the weights have moved
since the behaviour version (it is 1 for fresh weights), but the samples come from a sharper or flatter distribution
than the one being optimised: a bias that this trainer, like most, accepts.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dora.client import Step, Trainer
from dora.data.types import Canary
from dora.errors import DoraError, VersionRejected
from dora.trainers.checkpoint import read_replay
from dora.trainers.learner import AnyLearner, StepMetrics
from dora.trainers.options import GrpoConfig, parse_arguments
from dora.trainers.ranks import Ranks, joined
from dora.trainers.report import StepReport, TrainerReport, alarm_lines, step_json, step_line
from dora.trainers.start import Start, make_learner, start_of
from dora.trainers.writers import make_writers
from dora.weights.reference import TensorHeader

log = logging.getLogger(__name__)


MakeLearner = Callable[[Any, Start, Ranks, Sequence[TensorHeader]], AnyLearner]  # see make_learner


async def train(
    config: GrpoConfig,
    on_step: Callable[[StepReport], None] | None = None,
    ranks: Ranks | None = None,
    make: MakeLearner = make_learner,
) -> TrainerReport:
    """Trains ``config.steps`` steps, or until the prompts end; calls ``on_step`` after every commit.

    torch runs in a thread of its own, so the event loop continues. A version that the workers reject is published again
    once, with the present weights. This process leads ``ranks``. ``make`` makes every rank's learner. Raises the
    client's errors: VersionRejected if the second version is rejected too; InvalidValue for a group that cannot be
    trained on, or a loss that is not finite; DoraError if a package that ``config`` requires is not installed.
    """
    ranks = ranks or Ranks()
    started_s = time.monotonic()
    writers = make_writers(config.tensorboard, config.wandb, asdict(config.learner))
    reports: list[StepReport] = []
    client = Trainer(
        config.address,
        token=config.token,
        tls=config.tls,
        name="grpo",
        reconnect_s=config.reconnect_s,
        take_over=config.take_over,
        replay=config.replay_buffer(),
    )
    async with client as trainer:
        with ThreadPoolExecutor(1, "learner", torch.set_num_threads, (config.threads,)) as thread:
            run = _Run(trainer, config, ranks, thread, make)
            learner = await run.begin()
            steps = trainer.steps()
            while (step := await run.mended(lambda: anext(steps, None), learner)) is not None:
                report = await run.train_step(step, learner)
                if report is None:
                    break
                reports.append(report)
                for line in alarm_lines(report):
                    log.warning("%s", line)
                for write in writers:
                    write(report.step, report.numbers())
                if on_step is not None:
                    on_step(report)
                if len(reports) == config.steps:
                    break
            await run.mended(trainer.settled, learner)
            await run.in_thread(ranks.tell, "end")
    return TrainerReport(tuple(reports), time.monotonic() - started_s)


def follow(config: GrpoConfig, ranks: Ranks, make: MakeLearner = make_learner) -> None:
    """Runs a rank that does not lead: makes its part of the learner and executes the leader's orders until the end."""
    torch.set_num_threads(config.threads)
    order = ranks.next_order()
    while order.name == "idle":
        order = ranks.next_order()
    make(config, Start.of_bytes(order.content), ranks, ()).follow()


class _Run:
    def __init__(
        self, trainer: Trainer, config: GrpoConfig, ranks: Ranks, thread: ThreadPoolExecutor, make: MakeLearner
    ) -> None:
        self._trainer, self._config, self._ranks, self._thread, self._make = trainer, config, ranks, thread, make
        self._republished: set[int] = set()  # version numbers
        self._reference_version = 0

    async def begin(self) -> AnyLearner:
        attachment = await self.awaiting(self._trainer.attach(self._config.groups))
        start = start_of(self._config, attachment)
        self._reference_version = start.reference_version
        await self.in_thread(self._ranks.tell, "begin", [start.to_bytes()] * self._ranks.count)
        if self._trainer.replay is not None and start.moments:
            content = read_replay(Path(start.moments), start.step)
            self._trainer.replay.restore(content, attachment.window_versions)
        learner: AnyLearner = await self.in_thread(self._make, self._config, start, self._ranks, attachment.tensors)
        return learner

    async def train_step(self, step: Step, learner: AnyLearner) -> StepReport | None:
        """Trains one step, from its first group to its commit. Returns None if no group arrived and no prompt is left.

        Both continue if a rejected version was published again.
        """
        waited_s = step.waited_s  # for the step's first group
        started_s = time.monotonic() - waited_s
        group_ids: list[str] = []
        replays = step.replays()
        for group in replays:
            learner.add_group(group, is_replay=True)
        metrics: StepMetrics | None = None
        weights: Any = None
        canary: Canary | None = None
        while metrics is None or not step.committed:
            try:
                waited_s += await take_groups(step, learner, self._thread, group_ids, self.awaiting)
                if not group_ids:
                    return None
                if metrics is None:
                    metrics = await self.in_thread(learner.finish_step)
                    weights, canary = await self.in_thread(_published, learner)
                    await self._save(step, learner, weights)
                numbers = metrics.numbers()
                await self.awaiting(step.commit(weights=weights, metrics=numbers, canary=canary, waited_s=waited_s))
            except VersionRejected as rejected:
                if weights is None:
                    weights, canary = await self.in_thread(_published, learner)
                await self._republish(rejected, weights, canary)
        replayed = tuple(group.group_id for group in replays)
        return StepReport(step.number, metrics, tuple(group_ids), time.monotonic() - started_s, waited_s, replayed)

    async def _save(self, step: Step, learner: AnyLearner, weights: Any) -> None:
        """Saves a checkpoint before the commit, so the service's next step always has one (unless set otherwise)."""
        if self._config.checkpoints and (step.number + 1) % self._config.checkpoint_every == 0:
            folder, replay = Path(self._config.checkpoints), self._trainer.replay
            content = await self.in_thread(replay.to_bytes) if replay is not None else b""
            await self.in_thread(learner.save, folder, self._reference_version, weights, content)

    async def mended(self, call: Callable[[], Awaitable[Any]], learner: AnyLearner) -> Any:
        """Returns ``call``'s result between two steps. Publishes again if the service reports a rejected version."""
        try:
            return await self.awaiting(call())
        except VersionRejected as rejected:
            await self._republish(rejected, *await self.in_thread(_published, learner))
        return await self.awaiting(call())

    async def _republish(self, rejected: VersionRejected, weights: Any, canary: Canary | None) -> None:
        if rejected.version in self._republished:
            raise rejected  # the present weights were rejected too; there is no further remedy
        self._republished.add(rejected.version)
        await self.awaiting(self._trainer.republish(weights, version=rejected.version, canary=canary))

    async def awaiting(self, work: Awaitable[Any]) -> Any:
        """Returns the result of ``work``. Meanwhile it tells the other ranks periodically that the leader is alive."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if not (await asyncio.wait({task}, timeout=self._ranks.tick_s))[0]:
                    await self.in_thread(self._ranks.tell, "idle")
        finally:
            task.cancel()
        return await task

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await _in(self._thread, function, *arguments)


def _published(learner: AnyLearner) -> tuple[Any, Canary | None]:
    return learner.weights(), learner.canary()


async def take_groups(
    step: Step,
    learner: AnyLearner,
    thread: ThreadPoolExecutor,
    group_ids: list[str],
    awaiting: Callable[[Awaitable[Any]], Awaitable[Any]] = lambda work: work,
) -> float:
    """Takes groups as they arrive, while ``thread`` trains on them. Returns the seconds in which it was idle.

    If either fails, the other is ended; the learner is idle when this returns or raises.
    """
    began_s, busy_s = time.monotonic(), learner.busy_s
    try:
        async with asyncio.TaskGroup() as works:
            while await awaiting(step.has_groups()):
                group = step.take()
                group_ids.append(group.group_id)
                learner.add_group(group)
                works.create_task(_in(thread, learner.work))  # finds nothing if the previous call did this group
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await _in(thread, int)  # after the thread's current work
    return max(time.monotonic() - began_s - (learner.busy_s - busy_s), 0.0)


async def _in(thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when done, 1 if the service or the configuration is refused, or another rank failed."""
    return run(parse_arguments, arguments, make_learner)


def run(parse: Callable[[list[str]], tuple[GrpoConfig, bool]], arguments: list[str], make: MakeLearner) -> int:
    """Runs a trainer's command on each of its ranks, like :func:`main`, with other options and another learner."""
    try:
        config, as_json = parse(arguments)
        show = step_json if as_json else step_line
        with joined(config.rank_timeout_s) as ranks:
            if not ranks.leads:
                follow(config, ranks, make)
                return 0
            report = asyncio.run(train(config, lambda step: print(show(step), flush=True), ranks, make))
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not as_json:
        print(f"{len(report.steps)} steps in {report.seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
