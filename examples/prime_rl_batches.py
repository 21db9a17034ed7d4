"""prime-rl's trainer on rollouts of a service, which takes the place of prime-rl's orchestrator and inference server.

    uv run trainer @ trainer.toml
    uv run python examples/prime_rl_batches.py --folder outputs/run --ranks 2 --groups 16 --seq-len 4096

Both run in prime-rl's environment, into which DORA is installed. Batches and weights go through the run's folder: the
type of ``rollout_transport`` and of ``weight_broadcast`` is ``filesystem``. The token comes from DORA_TOKEN. Prompts
and rewards are the service's. Written against prime-rl's sources of November 2026; it has no package.
"""

import argparse
import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import dora.sync
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError, InvalidValue

POLL_S = 0.1


Sender = Callable[[list[dict[str, Any]]], None]


def train(options: argparse.Namespace, token: str, begin: Callable[[int], Sender]) -> None:
    """Passes on batches and weights until the prompts end, or for ``options.steps`` steps.

    ``begin`` gets the number of prime-rl's first step, and returns the function that sends a step's samples.
    """
    with dora.sync.Trainer(options.address, token=token, name="prime-rl") as trainer:
        version = trainer.attach(groups=options.groups).next_step
        send = begin(version + 1)
        received(options.folder, version)  # what the trainer begins with: the weights of the service's newest version
        for step in trainer.steps():
            samples = [each for group in step for each in samples_of(group, options.task)]
            send(samples)  # prime-rl's step n makes policy n: the service's step n - 1 makes version n
            step.commit(weights=received(options.folder, step.number + 1))
            print(f"step {step.number}: {len(samples)} samples", flush=True)
            if step.number + 1 == options.steps:
                break


def packed(options: argparse.Namespace, step: int) -> Sender:
    """Returns the function that packs samples for the trainer's ranks and sends them, by prime-rl's own code."""
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.transports.batch.filesystem import FileSystemBatchSender
    from prime_rl.transports.batch.types import TrainingSample

    batches = FileSystemBatchSender(options.folder, options.ranks, current_step=step)

    def send(samples: list[dict[str, Any]]) -> None:
        longest = max(len(values["token_ids"]) for values in samples)
        if longest > options.seq_len:
            raise InvalidValue("seq-len", options.seq_len, f"at least {longest}: prime-rl cuts longer responses")
        grid = prepare_batch(
            rollouts=[TrainingSample(**values) for values in samples],
            seq_len=options.seq_len,
            num_train_workers=options.ranks,
            bin_cost=build_bin_cost(None),  # by tokens
        )
        asyncio.run(batches.send(grid))

    return send


def samples_of(group: TrajectoryGroup, task: str) -> Iterator[dict[str, Any]]:
    """The fields of prime-rl's TrainingSample, aligned to the tokens of prompt and response."""
    for each, advantage in zip(group.trajectories, group.advantages(), strict=True):
        prompt = len(each.prompt_token_ids)
        tokens = [*each.prompt_token_ids, *each.response_token_ids]
        yield {
            "token_ids": tokens,
            "mask": [False] * prompt + [bool(value) for value in each.loss_mask],
            "logprobs": [0.0] * prompt + [float(value) for value in each.logprobs],
            "temperatures": [1.0] * len(tokens),  # the service's logprobs are those before temperature
            "env_name": each.task_id or task,
            "advantages": [0.0] * prompt + [float(advantage)] * (len(tokens) - prompt),
        }


def received(folder: Path, version: int) -> dict[str, Any]:
    """Accepts a policy that the trainer offers, waits until it is on the disk, and returns its tensors."""
    offered = folder / "broadcasts" / f"step_{version}"
    until(offered / ".sender_ready")
    (offered / ".receiver_ready").touch()
    until(offered / ".finished")
    return {name: tensor for file in sorted(offered.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder, which the trainer's ranks see")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer (%(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="prompt groups in a step (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="0: until the prompts end")
    parser.add_argument("--task", default="dora", help="prime-rl's env_name where a prompt has no task")
    try:
        options = parser.parse_args()
        train(options, os.environ.get("DORA_TOKEN", ""), functools.partial(packed, options))
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
