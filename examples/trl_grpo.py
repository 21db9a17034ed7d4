"""TRL's GRPOTrainer on rollouts of a service, in ``.venv-trl`` (``make clients``) or where TRL 1.16 is installed.

    python examples/trl_grpo.py --address 127.0.0.1:7070 --groups 16 --steps 100

The token comes from the environment variable DORA_TOKEN. ``--lora RANK`` trains an adapter, and the service gets merged
weights.
"""

import argparse
import os
import tempfile

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from dora.errors import DoraError
from dora.trainers.trl import GRPOTrainer, Rollouts


def train(options: argparse.Namespace, token: str) -> list[dict[str, float]]:
    """Trains ``options.steps`` steps, or until the prompts end. Returns TRL's log."""
    rows = options.groups * options.group_size
    rollouts = Rollouts(options.address, groups=options.groups, token=token)
    with tempfile.TemporaryDirectory() as folder, rollouts:
        trainer = GRPOTrainer(
            model=str(rollouts.model),
            reward_funcs=rollouts.rewards,
            rollout_func=rollouts,
            callbacks=[rollouts.commits],
            train_dataset=Dataset.from_dict({"prompt": [""] * rows}),  # the service has the prompts
            peft_config=LoraConfig(r=options.lora, target_modules="all-linear") if options.lora else None,
            args=GRPOConfig(
                output_dir=folder,
                num_generations=options.group_size,
                per_device_train_batch_size=options.rows,
                gradient_accumulation_steps=rows // options.rows,
                max_steps=options.steps,
                learning_rate=options.lr,
                lr_scheduler_type="constant",
                model_init_kwargs={"dtype": "float32"},
                bf16=False,
                use_cpu=options.cpu,
                save_strategy="no",
                report_to="none",
                logging_steps=1,
                disable_tqdm=True,
            ),
        )
        trainer.train()
        return trainer.state.log_history


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service")
    parser.add_argument("--groups", type=int, default=16, help="prompt groups in a step (%(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="the service's rollout.group_size (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="%(default)s, or until the prompts end")
    parser.add_argument("--rows", type=int, default=16, help="responses in a micro-batch (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0: all weights are trained")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU where there is a GPU")
    try:
        train(parser.parse_args(), os.environ.get("DORA_TOKEN", ""))
    except DoraError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
