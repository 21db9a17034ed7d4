"""Whether `dora profile` sees what a mixture of experts costs: a random one, larger than a processor's cache.

    python perf/mixture.py --experts 32 --per-token 4

Makes a Qwen3-MoE with random weights in a temporary folder (231 million parameters as above, 0.9 GB) and profiles it.
What a token reads is known of it: `expert_fraction` should be near per-token / experts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

from dora.models.checkpoint_names import to_checkpoint
from dora.models.tiny_vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, write_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dora-mixture-") as folder:
        make(Path(folder), options.experts, options.per_token, options.layers)
        out = Path(folder) / "cost.toml"
        argv = [sys.executable, "-m", "dora", "profile", "--model", folder, "--clock", options.clock, "--force"]
        argv += ["--slots", str(options.slots), "--rounds", str(options.rounds), "--out", str(out)]
        argv += ["--json"] if options.json else []
        done = subprocess.run(argv, stdout=subprocess.PIPE if options.json else None)
        if options.json and out.exists():
            cost = tomllib.loads(out.read_text())["cluster"]["cost"]
            print(json.dumps({**json.loads(done.stdout), "expert_fraction": cost.get("expert_fraction", 1.0)}))
        sys.exit(done.returncode)


def make(folder: Path, experts: int, per_token: int, layers: int) -> None:
    """Weights far from flat, so that tokens differ in the experts they choose, as in the tiny models."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=per_token,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True)
    generation.save_pretrained(folder)
    save_file(to_checkpoint(model.state_dict(), config.to_dict()), folder / "model.safetensors")
    write_tokenizer(folder)


if __name__ == "__main__":
    main()
