"""How far logprobs of engine and trainer are apart: a mixture of experts with router replay, without it, and dense.

    python perf/router_replay.py

vLLM samples in bfloat16, with routed experts; then the trainer computes the logprobs of these tokens in fp32, from the
same weights (random, rounded to bfloat16). The dense model is as large as what one token uses of the mixture. Prints
mean and 99th percentile of the absolute difference over all response tokens, and in how many of its choices the
trainer's own routers differ from the engine's.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig

from dora.data.trajectory import Trajectory
from dora.data.trajectory_fields import expert_rows
from dora.data.types import RequestSpec, SamplingParams
from dora.models import routing
from dora.models.checkpoint_names import to_checkpoint
from dora.models.tiny_vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, write_tokenizer
from dora.trainers.packing import Pack, packed_logprobs, prepare
from dora.trainers.router_replay import RouterReplay

PROMPT_TOKENS: Final = 24
EXPERTS: Final = 32
TOP_K: Final = 4
EXPERT_SIZE: Final = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each response (%(default)s)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (%(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dora-router-replay-") as folder:
        for kind in ("dense", "moe"):  # one process has one engine
            made = make(Path(folder) / kind, kind, options.layers, options.seed)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
                found |= processes.submit(measure, made, options.responses, options.tokens, options.seed).result()
    if options.json:
        print(json.dumps(found))
        return
    for name, title in (("moe_replay", "MoE, router replay"), ("moe", "MoE, own routers"), ("dense", "dense")):
        gap = found[name]
        print(f"{title:<20} logprob gap: mean {gap['mean']:.5f}   p99 {gap['p99']:.5f}   of {gap['tokens']} tokens")
    print(f"of the trainer's own choices of {TOP_K} experts, {found['moe']['differ']:.2%} differ from the engine's")


def make(folder: Path, kind: str, layers: int, seed: int) -> Path:
    shared: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    config: Any
    if kind == "dense":
        config = Qwen3Config(intermediate_size=TOP_K * EXPERT_SIZE, **shared)
    else:
        config = Qwen3MoeConfig(
            intermediate_size=TOP_K * EXPERT_SIZE,
            moe_intermediate_size=EXPERT_SIZE,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
            **shared,
        )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(folder)
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in model.state_dict().items()}
    save_file(to_checkpoint(rounded, config.to_dict()), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def measure(folder: Path, responses: int, tokens: int, seed: int) -> dict[str, Any]:
    """By what was measured: the gap's numbers."""
    replays = "moe" in folder.name
    trajectories = sampled(folder, responses, tokens, seed, replays)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prepare(module)
    with torch.no_grad():
        if not replays:
            return {"dense": gap(trajectories, packed_logprobs(module, trajectories))}
        chosen: list[torch.Tensor] = []
        gates = [each for name, each in module.named_modules() if name.endswith("mlp.gate")]
        hooks = [gate.register_forward_hook(lambda _gate, _inputs, output: chosen.append(output[2])) for gate in gates]
        own = gap(trajectories, packed_logprobs(module, trajectories))
        for hook in hooks:
            hook.remove()
        routed = Pack.of(trajectories, "cpu").routed
        assert routed is not None
        differ = (torch.stack(chosen, dim=1).sort(dim=-1)[0] != routed.sort(dim=-1)[0]).any(dim=-1)
        led = gap(trajectories, packed_logprobs(module, trajectories, RouterReplay(module)))
    return {"moe": {**own, "differ": float(differ.float().mean())}, "moe_replay": led}


def gap(trajectories: Sequence[Trajectory], logprobs: torch.Tensor) -> dict[str, float]:
    recorded = np.concatenate([each.logprobs for each in trajectories])
    apart = np.abs(logprobs.numpy() - recorded)
    return {"mean": float(apart.mean()), "p99": float(np.quantile(apart, 0.99)), "tokens": len(apart)}


def sampled(folder: Path, responses: int, tokens: int, seed: int, replays: bool) -> list[Trajectory]:
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    drawn = np.random.default_rng(seed)
    prompts = drawn.integers(PAD_ID + 3, len(VOCABULARY), (responses, PROMPT_TOKENS))
    longest = PROMPT_TOKENS + tokens
    engine = VllmEngine(
        folder,
        EngineSettings(
            slots=responses, kv_tokens=responses * (longest + 32), max_model_len_tokens=longest, dtype="bfloat16"
        ),
        router_replay=replays,
    )
    engine.load_weights(0, folder, None)
    for index, prompt in enumerate(prompts.tolist()):
        sampling = SamplingParams(temperature=1.0, seed=seed * responses + index, max_tokens=tokens, ignore_eos=True)
        engine.add(RequestSpec(f"t{index}", 0, tuple(prompt), sampling))
    found: dict[str, tuple[list[int], list[float], bytearray]] = {
        f"t{i}": ([], [], bytearray()) for i in range(responses)
    }
    left = responses
    while left:
        for delta in engine.step():
            token_ids, logprobs, routed = found[delta.request_id]
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            routed += delta.routed_experts
            left -= delta.finish_reason is not None
    engine.close()
    return [
        trajectory(f"t{index}", prompt, *found[f"t{index}"], folder if replays else None)
        for index, prompt in enumerate(prompts.tolist())
    ]


def trajectory(
    name: str, prompt: list[int], token_ids: list[int], logprobs: list[float], rows: bytearray, folder: Path | None
) -> Trajectory:
    shape = routing(folder) if folder is not None else None
    return Trajectory(
        trajectory_id=name,
        group_id=name,
        prompt_id=name,
        task_id="",
        sample_index=0,
        group_size=1,
        behaviour_version=0,
        reference_version=0,
        trained_step=0,
        staleness=0,
        prompt_token_ids=np.array(prompt, np.int32),
        response_token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        loss_mask=np.ones(len(token_ids), np.uint8),
        sampling=SamplingParams(),
        reward=0.0,
        reward_valid=True,
        reward_components={},
        verifier_log="",
        finish_reason="length",
        started_at=0.0,
        finished_at=0.0,
        worker_history=(),
        length_tokens=len(token_ids),
        routed_experts=None if shape is None else expert_rows(rows, shape.layers, shape.top_k, shape.id_bytes),
    )


if __name__ == "__main__":
    main()
