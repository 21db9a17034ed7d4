"""Worlds of two ranks on this host, with what Megatron needs to run on a CPU.

Ranks are forked from a process that has loaded all of it, so they start at once. One world does all cases of a job, one
after another.
"""

import dataclasses
import json
import multiprocessing
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.megatron.cpu import fix_up
from tests.trainer_ranks import Rank, ended, start_ranks

WORLD = 2
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["transformers.models.qwen3.modeling_qwen3", "tests.megatron.loaded"]
)  # of all contexts: it is one process


def start(folder: Path, work: Callable[..., object], *arguments: Any) -> list[Rank]:
    """``work(*arguments)`` on two ranks; what they write goes to files in ``folder``."""
    return start_ranks(WORLD, folder, _fixed, work, *arguments)


def run(cases: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Of each case the metrics of its steps, and its canary; ``folder`` has what was exported, and the last step's
    logprobs.
    """
    ranks = start(folder / "ranks", train_record, dict(cases), str(folder))
    assert ended(ranks) == [0] * WORLD, "\n".join(rank.text() for rank in ranks)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


def _fixed(work: Callable[..., object], *arguments: Any) -> object:
    fix_up()
    return work(*arguments)


def learner_config(settings: Mapping[str, Any]) -> Any:
    """``settings`` of a learner, ``kl_coefficient`` being its objective's."""
    from dora.trainers.learner import LearnerConfig

    kl_coefficient = settings.get("kl_coefficient", 0.0)
    found = LearnerConfig(**{name: value for name, value in settings.items() if name != "kl_coefficient"})
    return dataclasses.replace(found, objective=dataclasses.replace(found.objective, kl_coefficient=kl_coefficient))


def train_record(cases: Mapping[str, Any], folder: str) -> None:
    """One rank: for each case the record's steps, an export, and the logprobs of the last step's responses."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    from dora.trainers.megatron.layout import Layout
    from dora.trainers.megatron.options import MegatronConfig
    from dora.trainers.megatron.start import make_learner
    from dora.trainers.objectives.batch import Row
    from dora.trainers.ranks import joined
    from dora.trainers.start import Start
    from tests.megatron.record import read_record

    answer: dict[str, Any] = {}
    with joined(120.0) as ranks:
        for name, case in cases.items():
            layout, settings = Layout(**case["layout"]), learner_config(case["learner"])
            config = MegatronConfig("", "", layout=layout, learner=settings, **case["options"])
            reference = case["model"] if settings.objective.needs_reference else ""
            learner = make_learner(config, Start(0, case["model"], "", reference, 0), ranks)
            steps = list(read_record(Path(case["record"])))[: case["steps"]]
            if ranks.leads:
                metrics = []
                for groups in steps:
                    for group in groups:
                        learner.add_group(group)
                    metrics.append(learner.finish_step().numbers())
                answer[name] = {"steps": metrics}
                shutil.copytree(learner.weights()[0].parent, Path(folder) / name)
                canary = learner.canary()
                answer[name]["canary"] = dataclasses.asdict(canary) if canary is not None else None
                ranks.tell("end")
            else:
                learner.follow()
            found = learner.part.logprobs([[Row(each, 0.0) for each in group.trajectories] for group in steps[-1]])
            if learner.part.built.place.speaks and learner.part.built.place.dp == 0:
                save_file(
                    {str(index): each.contiguous() for index, each in enumerate(found)}, Path(folder) / f"{name}.bin"
                )
            dist.barrier()
            parallel_state.destroy_model_parallel()
        if ranks.leads:
            (Path(folder) / "answer.json").write_text(json.dumps(answer))
