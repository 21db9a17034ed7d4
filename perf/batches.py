"""Measures the costs of an early begun step and of micro-batches: ratios within one run.

    python perf/batches.py --groups 16 --json

A random model trains on one step of random responses whose lengths have a long tail. Groups come when their longest
response would be sampled, at one pace. Only the trainer's work is real, measured in CPU time of one thread; its waits
are counted, not waited for. So other processes on the machine change little.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import SamplingParams
from dora.models.tiny import make_tiny
from dora.trainers.batches import packed_batches, packed_tokens
from dora.trainers.learner import Learner, LearnerConfig

PROMPT_TOKENS = 24
GROUP_SIZE = 8
LONGEST = 384
PACES = (0.5, 1.0, 2.0)  # seconds of generation for a second of training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dora-batches-") as folder:
        found = measured(Path(folder), options.groups, options.micro_batch_tokens, options.seed)
    if options.json:
        print(json.dumps(found))
        return
    table = Table(title="One step of training")
    table.add_column("")
    table.add_column("ratio", justify="right")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}")
    Console().print(table)


def measured(folder: Path, groups: int, tokens_max: int, seed: int) -> dict[str, float]:
    """Ratios by name; below 1 the first of the two that are named is the better one."""
    module = AutoModelForCausalLM.from_pretrained(make_tiny("dense", folder / "model"), dtype=torch.float32)
    step = [group(index, random.Random(f"{seed}-{index}")) for index in range(groups)]
    whole = Learner(module, LearnerConfig(micro_batch_tokens=tokens_max))
    padded = Learner(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        LearnerConfig(micro_batch_tokens=tokens_max, packing=False),
    )
    for learner in (whole, padded):  # whatever is done at first only
        ended(learner, step[:2], [0.0, 0.0])
    packed_s = min(ended(whole, step, [0.0] * groups) for _ in range(2))
    padded_s = min(ended(padded, step, [0.0] * groups) for _ in range(2))
    longest = [int(each.lengths.max()) for each in step]
    ratios = {"packed_vs_padded": packed_s / padded_s, **balance(seed)}
    for pace in PACES:
        last_s = pace * packed_s
        arrivals = [last_s * tokens / max(longest) for tokens in longest]
        streamed_s = ended(whole, step, arrivals)
        ratios[f"streamed_vs_whole_pace_{pace:g}"] = streamed_s / (last_s + packed_s)
        ratios[f"after_last_group_pace_{pace:g}"] = (streamed_s - last_s) / packed_s
    return ratios


def ended(learner: Learner, step: Sequence[TrajectoryGroup], arrivals_s: Sequence[float]) -> float:
    """When the step's last gradient is there, if groups come at ``arrivals_s`` and work takes its CPU time."""
    coming = sorted(range(len(step)), key=lambda index: arrivals_s[index])
    now_s = 0.0
    while True:
        while coming and arrivals_s[coming[0]] <= now_s:
            learner.add_group(step[coming.pop(0)])
        began_s = time.process_time()
        worked = learner.work_once()
        now_s += time.process_time() - began_s
        if not worked:
            if not coming:
                break
            now_s = max(now_s, arrivals_s[coming[0]])
    learner.finish_step()
    return now_s


def balance(seed: int) -> dict[str, float]:
    """The largest micro-batch by their mean, for 128 groups: divided by size, and filled in order of arrival."""
    objective = LearnerConfig().objective
    groups = [objective.rows(group(index, random.Random(f"{seed}-{index}"))) for index in range(128)]
    sizes = {rows[0].trajectory.group_id: packed_tokens(rows) for rows in groups}
    tokens_max = 8 * max(sizes.values())
    balanced = [
        sum(sizes[name] for name in {row.trajectory.group_id for row in batch})
        for batch in packed_batches([row for rows in groups for row in rows], tokens_max)
    ]
    in_order = [0]
    for tokens in sizes.values():
        if in_order[-1] + tokens > tokens_max:
            in_order.append(0)
        in_order[-1] += tokens
    return {
        "largest_vs_mean_micro_batch": max(balanced) * len(balanced) / sum(balanced),
        "largest_vs_mean_in_order": max(in_order) * len(in_order) / sum(in_order),
    }


def group(index: int, drawn: random.Random) -> TrajectoryGroup:
    """Lengths are lognormal, of median 64 and up to LONGEST; rewards are drawn, and differ."""
    members = []
    prompt = [drawn.randrange(3, 60) for _ in range(PROMPT_TOKENS)]
    for sample in range(GROUP_SIZE):
        tokens = min(int(drawn.lognormvariate(4.16, 0.8)) + 1, LONGEST)
        members.append(
            Trajectory(
                trajectory_id=f"g{index}-{sample}",
                group_id=f"g{index}",
                prompt_id=f"p{index}",
                task_id="",
                sample_index=sample,
                group_size=GROUP_SIZE,
                behaviour_version=0,
                reference_version=0,
                trained_step=0,
                staleness=0,
                prompt_token_ids=prompt,
                response_token_ids=[drawn.randrange(3, 60) for _ in range(tokens)],
                logprobs=[-4.0] * tokens,
                loss_mask=[1] * tokens,
                sampling=SamplingParams(max_tokens=LONGEST),
                reward=float(sample % 2),
                reward_valid=True,
                reward_components={},
                verifier_log="",
                finish_reason="stop",
                started_at=0.0,
                finished_at=0.0,
                worker_history=(),
                length_tokens=tokens,
            )
        )
    return TrajectoryGroup(f"g{index}", tuple(members))


if __name__ == "__main__":
    main()
