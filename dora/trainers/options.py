"""The reference trainer's settings and command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from dora.client.replay import ReplayBuffer, ReplayBy
from dora.errors import InvalidValue
from dora.system.environment import taken
from dora.system.secret_file import read_token
from dora.tls import Tls
from dora.tls.options import add_options, tls_of
from dora.trainers.learner import LearnerConfig
from dora.trainers.objectives.presets import add_objective, objective_of

_COMMON: Final = (
    *("address", "model", "groups", "steps", "threads", "dtype", "reference", "take_over"),
    *("checkpoints", "checkpoint_every", "begin_from", "tensorboard", "wandb"),
    *("replay_share", "replay_by"),
)  # fields with an option of the same name


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    address: str
    token: str | Path = field(repr=False)  # or the file that has it, which is read again
    model: str = ""  # Hugging Face folder; empty: the service's newest version, which requires a shared host
    groups: int = 0  # prompt groups per step; 0: the service's setting
    steps: int = 0  # 0: until the prompts are exhausted
    threads: int = 1  # CPU threads of the forward and backward passes
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: int = 0  # train only this many last decoder layers; 0: the whole model
    device: str = "cpu"  # "cuda": this rank's GPU
    reference: str = ""  # folder of the reference version's weights; empty: the service's
    checkpoints: str = ""  # folder; empty: checkpoints are neither written nor read
    checkpoint_every: int = 1  # in steps
    begin_from: str = ""  # checkpoint of another run, for the first step; empty: none
    take_over: bool = False  # replace a trainer that lives
    replay_share: float = 0.0  # of the groups trained on; 0: none is trained on once more
    replay_by: ReplayBy = "age"
    reconnect_s: float = 60.0
    rank_timeout_s: float = 120.0  # how long one of several ranks may take for a micro-batch
    tensorboard: str = ""  # folder for event files; empty: none
    wandb: str = ""  # project; empty: none
    tls: Tls | None = None  # None: that of DORA_TLS and the like
    learner: LearnerConfig = field(default_factory=LearnerConfig)

    def __post_init__(self) -> None:
        for name, least in (("groups", 0), ("steps", 0), ("layers", 0), ("threads", 1), ("checkpoint_every", 1)):
            if getattr(self, name) < least:
                raise InvalidValue(name, getattr(self, name), f"{least} or more")
        self.replay_buffer()

    def replay_buffer(self) -> ReplayBuffer | None:
        """Returns a new buffer of earlier groups, or None without replays. Raises InvalidValue for its options."""
        return ReplayBuffer(self.replay_share, self.replay_by) if self.replay_share else None


def parse_arguments(arguments: list[str]) -> tuple[GrpoConfig, bool]:
    """Returns the configuration, and whether to print each step as a JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m dora.trainers.grpo",
        description="Reference trainer for a running 'dora serve'.",
        epilog="example: python -m dora.trainers.grpo --address 127.0.0.1:7070 --token-file FILE --groups 16 --lr 1e-5",
    )
    add_common(parser)
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True, help="pack rows together")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPU of this rank")
    parser.add_argument("--layers", type=int, default=0, help="train only this many last decoder layers; 0: all")
    parser.add_argument(
        "--autocast",
        choices=("off", "on", "auto"),
        default="off",
        help="matrix products in bfloat16: faster, less exact ratios; auto: if the processor supports them natively",
    )
    add_objective(parser)
    options = parser.parse_args(arguments)
    autocast = options.autocast == "on" or (options.autocast == "auto" and multiplies_bfloat16())
    return GrpoConfig(**common_of(options, packing=options.packing, autocast=autocast), device=options.device,
                      layers=options.layers), options.json  # fmt: skip


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options common to all trainers; those of the objective are added separately."""
    defaults = LearnerConfig()
    parser.add_argument("--address", default="127.0.0.1:7070", help="host:port of the service (%(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help="readable by its owner only; default: $DORA_TOKEN")
    add_options(parser)
    parser.add_argument("--token", action=_RefuseSecret, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help="Hugging Face folder; default: the service's newest version")
    parser.add_argument("--groups", type=int, default=0, help="prompt groups per step; 0: the service's setting")
    parser.add_argument("--steps", type=int, default=0, help="0: until the prompts are exhausted")
    parser.add_argument("--lr", type=float, default=defaults.learning_rate, help="AdamW's rate (%(default)s)")
    parser.add_argument("--grad-norm-max", type=float, default=defaults.grad_norm_max)
    parser.add_argument("--weight-decay", type=float, default=defaults.weight_decay)
    parser.add_argument("--micro-batch-tokens", type=int, default=defaults.micro_batch_tokens)
    parser.add_argument(
        "--router-replay",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send tokens to the recorded experts, if any",
    )
    parser.add_argument(
        "--replay-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the groups trained on, those of earlier steps within their staleness bound; at most 0.5 (%(default)s)",
    )
    parser.add_argument(
        "--replay-by",
        choices=get_args(ReplayBy),
        default="age",
        help="the order of replays: newest version first, or largest mean absolute advantage first (%(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--reference", default="", help="folder of the KL reference; default: the service's version")
    parser.add_argument("--checkpoints", default="", metavar="FOLDER", help="where to save and resume, by step")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="STEPS")
    parser.add_argument(
        "--begin-from", default="", metavar="CHECKPOINT", help="of another run, for a service at step 0"
    )
    parser.add_argument("--rank-timeout", type=float, default=120.0, metavar="S", help="timeout of one rank")
    parser.add_argument("--clip-alarm", type=float, default=defaults.clip_alarm, help="clipped share (%(default)s)")
    parser.add_argument("--tensorboard", default="", metavar="FOLDER", help="event files of the signals")
    parser.add_argument("--wandb", default="", metavar="PROJECT", help="the signals as a run of Weights & Biases")
    parser.add_argument("--take-over", action="store_true", help="replace a trainer that lives")
    parser.add_argument("--json", action="store_true", help="print one JSON object per step instead of a text line")


def common_of(options: argparse.Namespace, **learner: Any) -> dict[str, Any]:
    """Returns fields of GrpoConfig from the options of :func:`add_common` and the objective, and ``learner`` fields."""
    config = LearnerConfig(
        learning_rate=options.lr,
        objective=objective_of(options),
        weight_decay=options.weight_decay,
        grad_norm_max=options.grad_norm_max,
        micro_batch_tokens=options.micro_batch_tokens,
        router_replay=options.router_replay,
        clip_alarm=options.clip_alarm,
        **learner,
    )
    token = taken("DORA_TOKEN") if options.token_file is None else Path(options.token_file)
    if isinstance(token, Path):
        read_token(token)  # it is refused before the model is loaded
    return {name: getattr(options, name) for name in _COMMON} | {
        "token": token,
        "tls": tls_of(options),
        "rank_timeout_s": options.rank_timeout,
        "learner": config,
    }


class _RefuseSecret(argparse.Action):
    """Refuses a secret on the command line without repeating it: every user of the machine can read it there."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error("--token shows the secret to every user of this machine; set DORA_TOKEN or use --token-file FILE")


def multiplies_bfloat16(capability: str | None = None) -> bool:
    """Whether this processor multiplies bfloat16 matrices natively. ``capability`` is torch's name of it.

    torch requires AVX-512 or better for it, and emulates it otherwise: with AVX2 alone, a product of the size of a
    SmolLM2 layer's took 58 times as long as in fp32.
    """
    return (capability or torch.backends.cpu.get_cpu_capability()).startswith("AVX512")
