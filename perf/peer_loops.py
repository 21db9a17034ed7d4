"""Two loops around vLLM, as people write them: one waits for all responses of a step, one lets them go on.

    python -m perf.peer_loops FOLDER waiting
    python -m perf.peer_loops FOLDER partial

Both train with DORA's learner, so that they differ from DORA in rollouts alone. FOLDER has the task of
``perf/peers.py`` and gets a run record.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}

import torch
from transformers import AutoModelForCausalLM

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import Prompt
from dora.trainers.learner import Learner, LearnerConfig
from perf.peer_record import (
    CONTEXT_TOKENS,
    RECORD_FOLDER,
    Prompts,
    Record,
    Response,
    Task,
    model_of,
    read_task,
    trajectories_of,
)

KV_BYTES = 256 << 20
MICRO_BATCH_TOKENS = 1024
Sampled = tuple[Prompt, list[Response], list[float]]  # with the rewards


class Reloading:
    """A part of vLLM's worker: replaces the weights in place.

    On a CPU vLLM keeps the tied head of the first weights, so it is packed again as in DORA's engine.
    """

    def reload(self, folder: str) -> None:
        from dora.engine_patches.cpu import tied_head

        runner = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(weights_path=folder)
        tied_head.PATCH.after_reload(runner.get_model())


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, model: Path, slots: int) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._names = itertools.count()
        self._llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                dtype="float32",
                max_model_len=CONTEXT_TOKENS,
                max_num_seqs=slots,
                kv_cache_memory_bytes=KV_BYTES,
                enforce_eager=True,
                enable_prefix_caching=False,
                enable_chunked_prefill=False,
                max_num_batched_tokens=CONTEXT_TOKENS + slots,
                worker_extension_cls="perf.peer_loops.Reloading",
                disable_log_stats=True,
            )
        )

    async def responses(self, prompt: Prompt, count: int) -> list[Response]:
        """Samples ``count`` responses to the prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            n=count, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **prompt.sampling
        )
        asked = {"prompt_token_ids": list(prompt.token_ids)}
        ended = [each async for each in self._llm.generate(asked, sampling, str(next(self._names)))]
        return [_response(each) for each in sorted(ended[-1].outputs, key=lambda each: each.index)]

    async def load(self, version: int, folder: Path) -> None:
        """Replaces the weights between two steps of the engine. Running responses keep their KV and go on."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.collective_rpc("reload", args=(str(folder),))
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    def close(self) -> None:
        self._llm.shutdown()


def _response(output: Any) -> Response:
    logprobs = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
    spans = [(int(span.version), span.start, span.end - 1) for span in output.weight_versions]
    return Response(output.token_ids, logprobs, spans)


class Loop:
    """Engine, learner, prompts and record of one run."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.task = task
        self._began_s = time.monotonic()
        model = model_of(folder)
        self.prompts = Prompts(task, model)
        self.record = Record(folder / RECORD_FOLDER)
        self.engine = Engine(model, task.slots)
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        config = LearnerConfig(learning_rate=task.learning_rate, micro_batch_tokens=MICRO_BATCH_TOKENS)
        self._learner = Learner(module, config)
        self._thread = ThreadPoolExecutor(1, "learner")
        self._publish(0)

    def steps(self) -> range:
        return range(self.task.steps)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._began_s > self.task.limit_s

    async def group(self, index: int) -> Sampled:
        prompt = self.prompts[index]
        responses = await self.engine.responses(prompt, self.task.group_size)
        return prompt, responses, [self.prompts.reward(prompt, each.token_ids) for each in responses]

    async def train(self, step: int, groups: list[list[Trajectory]]) -> None:
        """Trains one step, and gives the engine the new weights."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._train, step, groups)
        await self.engine.load(step + 1, self.record.version_folder(step + 1))
        self.record.commit(step)
        print(f"step {step}", flush=True)

    def _train(self, step: int, groups: list[list[Trajectory]]) -> None:
        for group in groups:
            self._learner.add_group(TrajectoryGroup(group[0].group_id, tuple(group)))
            self.record.keep(group)
        self._learner.finish_step()
        self._publish(step + 1)

    def _publish(self, version: int) -> None:
        self._learner.module.save_pretrained(self.record.version_folder(version))


@asynccontextmanager
async def loop_in(folder: Path) -> AsyncIterator[Loop]:
    loop = Loop(folder, read_task(folder))
    try:
        await loop.engine.load(0, loop.record.version_folder(0))
        yield loop
    finally:
        loop.engine.close()


async def waiting(folder: Path) -> None:
    """Samples a step's groups, waits for all of them, trains, and begins the next step."""
    async with loop_in(folder) as loop:
        for step in loop.steps():
            first = step * loop.task.groups
            indexes = range(first, first + loop.task.groups)
            sampled = await asyncio.gather(*(loop.group(index) for index in indexes))
            groups = [trajectories_of(str(index), *each, step) for index, each in zip(indexes, sampled, strict=True)]
            await loop.train(step, groups)
            if loop.is_late:
                break


async def partial(folder: Path) -> None:
    """Keeps at most two steps' groups under way or sampled, and trains on those that end first.

    Responses go on while the weights are replaced, so several versions may have sampled one.
    """
    async with loop_in(folder) as loop, asyncio.TaskGroup() as tasks:
        indexes = itertools.count()
        ended: asyncio.Queue[tuple[int, Sampled]] = asyncio.Queue(loop.task.groups)

        async def sample() -> None:
            for index in indexes:
                await ended.put((index, await loop.group(index)))

        samplers = [tasks.create_task(sample()) for _ in range(loop.task.groups)]
        for step in loop.steps():
            taken = [await ended.get() for _ in range(loop.task.groups)]
            await loop.train(step, [trajectories_of(str(index), *each, step) for index, each in taken])
            if loop.is_late:
                break
        for sampler in samplers:
            sampler.cancel()


LOOPS = {each.__name__: each for each in (waiting, partial)}

if __name__ == "__main__":
    asyncio.run(LOOPS[sys.argv[2]](Path(sys.argv[1])))
