"""The reference trainer, on one process: any objective of ``objectives/presets.py``, DAPO's by default.

    python -m dora.trainers.grpo --address 127.0.0.1:7070 --token SECRET --groups 16 --steps 100 --lr 1e-5
    python -m dora.trainers.grpo --objective gspo --anchor proximal --correction mask --kl-coefficient 0.01

The importance ratio is present policy / behaviour policy, both of the *raw* model: the recorded logprobs are taken
before temperature, top-p and penalties. At temperature 1 without truncation or penalties that is the distribution the
tokens were sampled from, and the ratio is exact. At another temperature the ratio still measures how far the weights
have moved since the behaviour version (it is 1 for fresh weights), but the samples come from a sharper or flatter
distribution than the one being optimised: a bias that this trainer, like most, accepts.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dora.client import Attachment, Step, Trainer
from dora.errors import MISSING, Conflict, DoraError, InvalidValue, VersionRejected
from dora.trainers.learner import Learner, LearnerConfig, StepMetrics, multiplies_bfloat16
from dora.trainers.objectives.presets import add_objective, objective_of
from dora.trainers.writers import make_writers
from dora.types import ALARM

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """One run of the reference trainer."""

    address: str
    token: str
    model: str = ""  # Hugging Face folder; empty: the service's newest version, which needs a shared host
    groups: int = 0  # prompt groups a step; 0: what the service has
    steps: int = 0  # 0: until the prompts are exhausted
    threads: int = 1  # CPU threads of the forward and backward passes
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: int = 0  # train only the last decoder layers, so many; 0: the whole model
    reconnect_s: float = 60.0
    tensorboard: str = ""  # folder for event files; empty: none
    wandb: str = ""  # project; empty: none
    learner: LearnerConfig = field(default_factory=LearnerConfig)

    def __post_init__(self) -> None:
        for name, least in (("groups", 0), ("steps", 0), ("layers", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise InvalidValue(name, getattr(self, name), f"{least} or more")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One committed step."""

    step: int
    metrics: StepMetrics
    group_ids: tuple[str, ...]  # as received, in order
    seconds: float
    waited_s: float  # of it, there was nothing to train on

    def numbers(self) -> dict[str, float]:
        """For curves: those of the metrics, and the times."""
        return {**self.metrics.numbers(), "step_s": self.seconds, "waited_s": self.waited_s}


@dataclass(frozen=True, slots=True)
class Report:
    """The steps of one run."""

    steps: tuple[StepReport, ...]
    seconds: float


async def train(config: GrpoConfig, on_step: Callable[[StepReport], None] | None = None) -> Report:
    """Trains ``config.steps`` steps, or until the prompts end; calls ``on_step`` after every commit.

    torch runs in a thread of its own, so the event loop goes on. A version that the workers reject is published anew
    once, with the present weights. Raises the client's errors: VersionRejected where that is rejected too; DoraError
    where a package that ``config`` asks for is not installed.
    """
    started_s = time.monotonic()
    writers = make_writers(config.tensorboard, config.wandb, asdict(config.learner))
    reports: list[StepReport] = []
    async with Trainer(config.address, token=config.token, name="grpo", reconnect_s=config.reconnect_s) as trainer:
        attachment = await trainer.attach(config.groups)
        with ThreadPoolExecutor(1, "learner", torch.set_num_threads, (config.threads,)) as thread:
            learner = await _in(thread, _make_learner, config, attachment)
            mended: set[int] = set()  # versions that were published anew
            async for step in trainer.steps():
                report = await _train_step(trainer, step, learner, thread, mended)
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
    return Report(tuple(reports), time.monotonic() - started_s)


async def _train_step(
    trainer: Trainer, step: Step, learner: Learner, thread: ThreadPoolExecutor, mended: set[int]
) -> StepReport | None:
    """One step, from its first group to its commit; None for one without any, after which no prompt is left.

    Both go on where a rejected version was published anew.
    """
    started_s = time.monotonic()
    group_ids: list[str] = []
    metrics: StepMetrics | None = None
    waited_s = 0.0
    while metrics is None or not step.committed:
        try:
            waited_s += await take_groups(step, learner, thread, group_ids)
            if not group_ids:
                return None
            metrics = metrics or await _in(thread, learner.finish_step)
            await step.commit(weights=learner.module, metrics=metrics.numbers(), waited_s=waited_s)
        except VersionRejected as rejected:
            if rejected.version in mended:
                raise  # of these weights, too: what would help is not known here
            mended.add(rejected.version)
            await trainer.republish(learner.module, version=rejected.version)
    return StepReport(step.number, metrics, tuple(group_ids), time.monotonic() - started_s, waited_s)


async def take_groups(step: Step, learner: Learner, thread: ThreadPoolExecutor, group_ids: list[str]) -> float:
    """Takes groups as they come, while ``thread`` trains on those that are there. The seconds in which it had none.

    Where the one fails, the other is ended; the learner is at rest when this returns or raises.
    """
    began_s, busy_s = time.monotonic(), learner.busy_s
    try:
        async with asyncio.TaskGroup() as works:
            while await step.has_groups():
                group = step.take()
                group_ids.append(group.group_id)
                learner.add_group(group)
                works.create_task(_in(thread, learner.work))  # finds nothing to do where the one before it took it in
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await _in(thread, int)  # after whatever the thread is still at
    return max(time.monotonic() - began_s - (learner.busy_s - busy_s), 0.0)


async def _in(thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def _make_learner(config: GrpoConfig, attachment: Attachment) -> Learner:
    from transformers import AutoModelForCausalLM

    folder = _weights_folder(config, attachment)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype), local_files_only=True)
    module.train()
    if config.layers:
        decoder_layers = module.get_decoder().layers
        if config.layers > len(decoder_layers):
            raise InvalidValue("--layers", config.layers, f"0 to {len(decoder_layers)}, as the model has")
        module.requires_grad_(False)
        decoder_layers[-config.layers :].requires_grad_(True)
    return Learner(module, config.learner)


def _weights_folder(config: GrpoConfig, attachment: Attachment) -> Path:
    """Of the weights to go on from: the service's newest version is what the next step improves on."""
    if config.model:
        folder = Path(config.model)
    elif attachment.store_folder is not None:
        folder = attachment.store_folder / "versions" / str(attachment.next_step)
    elif attachment.next_step == 0:
        folder = Path(attachment.model)
    else:
        allowed = f"the folder of version {attachment.next_step}, on this host"
        raise Conflict("--model", MISSING, allowed)
    if not (folder / "config.json").is_file():
        raise InvalidValue("--model", str(folder), "a Hugging Face model folder on this host")
    return folder


def parse_arguments(arguments: list[str]) -> tuple[GrpoConfig, bool]:
    """The configuration, and whether each step is to be printed as a JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m dora.trainers.grpo",
        description="Reference trainer for a running 'dora serve'.",
        epilog="example: python -m dora.trainers.grpo --address 127.0.0.1:7070 --token SECRET --groups 16 --lr 1e-5",
    )
    defaults = LearnerConfig()
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service (%(default)s)")
    parser.add_argument("--token", default=os.environ.get("DORA_TOKEN", ""), help="default: $DORA_TOKEN")
    parser.add_argument("--model", default="", help="Hugging Face folder; default: the service's newest version")
    parser.add_argument("--groups", type=int, default=0, help="prompt groups a step; 0: what the service has")
    parser.add_argument("--steps", type=int, default=0, help="0: until the prompts are exhausted")
    parser.add_argument("--lr", type=float, default=defaults.learning_rate, help="AdamW's rate (%(default)s)")
    parser.add_argument("--grad-norm-max", type=float, default=defaults.grad_norm_max)
    parser.add_argument("--weight-decay", type=float, default=defaults.weight_decay)
    parser.add_argument("--micro-batch-tokens", type=int, default=defaults.micro_batch_tokens)
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True, help="rows in one sequence")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", type=int, default=0, help="train the last so many decoder layers; 0: everything")
    parser.add_argument(
        "--autocast",
        choices=("off", "on", "auto"),
        default="off",
        help="matrix products in bfloat16: faster, rougher ratios; auto: where the processor multiplies them itself",
    )
    parser.add_argument("--clip-alarm", type=float, default=defaults.clip_alarm, help="clipped share (%(default)s)")
    parser.add_argument("--tensorboard", default="", metavar="FOLDER", help="event files of the signals")
    parser.add_argument("--wandb", default="", metavar="PROJECT", help="the signals as a run of Weights & Biases")
    parser.add_argument("--json", action="store_true", help="one JSON object a step instead of a line for people")
    add_objective(parser)
    given = parser.parse_args(arguments)
    learner = LearnerConfig(
        learning_rate=given.lr,
        objective=objective_of(given),
        weight_decay=given.weight_decay,
        grad_norm_max=given.grad_norm_max,
        micro_batch_tokens=given.micro_batch_tokens,
        packing=given.packing,
        clip_alarm=given.clip_alarm,
        autocast=given.autocast == "on" or (given.autocast == "auto" and multiplies_bfloat16()),
    )
    names = ("address", "token", "model", "groups", "steps", "layers", "threads", "dtype", "tensorboard", "wandb")
    return GrpoConfig(**{name: getattr(given, name) for name in names}, learner=learner), given.json


def step_line(report: StepReport) -> str:
    """A step in one line for people."""
    metrics, signals = report.metrics, report.metrics.signals
    reward, clipped = _shown(signals.reward_mean, ".3f"), _shown(signals.clip_fraction, ".1%")
    ratio_max, effective = _shown(signals.ratio_max, ".3f"), _shown(signals.effective_sample, ".1%")
    return (
        f"step {report.step:4d}  reward {reward}  loss {metrics.loss:+.4f}  tokens {signals.tokens_trained}"
        f"  stale {metrics.staleness_mean:.2f}  ratio max {ratio_max}  clipped {clipped}  effective {effective}"
        f"  grad {metrics.grad_norm:.3f}  {report.seconds:.1f} s"
    )


def alarm_lines(report: StepReport) -> list[str]:
    """What operators have to be told of a step, in sentences; mostly nothing."""
    numbers = report.metrics.numbers()
    return [
        f"step {report.step}: {name.removeprefix(ALARM)} {numbers[name.removeprefix(ALARM)]:.3g} is above {bound:g}"
        for name, bound in report.metrics.alarms.items()
    ]


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def step_json(report: StepReport) -> str:
    """A step as one JSON object: ``step``, ``metrics`` (finite numbers), ``group_ids``, ``seconds``, ``waited_s``."""
    return json.dumps({**asdict(report), "metrics": report.metrics.numbers()})


def main(arguments: list[str]) -> int:
    """Exit code 0 when done, 1 where the service or the configuration refused."""
    try:
        config, as_json = parse_arguments(arguments)
        show = step_json if as_json else step_line
        report = asyncio.run(train(config, lambda step: print(show(step), flush=True)))
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not as_json:
        print(f"{len(report.steps)} steps in {report.seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
