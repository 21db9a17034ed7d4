"""The Megatron trainer's settings and command line: those of any trainer, and the layout of the model over ranks."""

import argparse
from dataclasses import dataclass, field, fields
from typing import get_args

from dora.trainers.megatron.architecture import Layers
from dora.trainers.megatron.layout import Layout
from dora.trainers.objectives.presets import add_objective
from dora.trainers.options import GrpoConfig, add_common, common_of

_SIZES = {
    "tp": "tensor parallelism: ranks that share each layer",
    "pp": "pipeline parallelism: stages of layers",
    "ep": "expert parallelism: ranks that share a layer's experts",
    "cp": "context parallelism: ranks that share each sequence",
    "etp": "expert tensor parallelism: ranks that share each expert",
}


@dataclass(frozen=True, slots=True)
class MegatronConfig(GrpoConfig):
    layout: Layout = field(default_factory=Layout)
    transformer: Layers = "auto"
    distributed_optimizer: bool = False
    scratch: str = ""  # folder visible to all ranks, for the files of a version; empty: the system's


def parse_arguments(arguments: list[str]) -> tuple[MegatronConfig, bool]:
    """Returns the configuration, and whether to print each step as a JSON line."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m dora.trainers.megatron",
        description="Megatron-core trainer for a running 'dora serve'; one process for each GPU.",
        epilog="example: torchrun --nproc-per-node 8 -m dora.trainers.megatron --tp 2 --pp 2 --groups 64 --lr 1e-6",
    )
    add_common(parser)
    layout = parser.add_argument_group("layout", "the remaining ranks hold copies (data parallelism)")
    for each in fields(Layout):
        layout.add_argument(f"--{each.name}", type=int, default=1, metavar="N", help=_SIZES[each.name])
    parser.add_argument(
        "--transformer",
        choices=get_args(Layers),
        default="auto",
        help="layers of Megatron or of Transformer Engine; auto: the latter if it is installed",
    )
    parser.add_argument(
        "--distributed-optimizer", action="store_true", help="shard optimiser states over data-parallel ranks"
    )
    parser.add_argument("--scratch", default="", metavar="FOLDER", help="visible to all ranks, for a version's files")
    add_objective(parser)
    options = parser.parse_args(arguments)
    config = MegatronConfig(
        **common_of(options),
        layout=Layout(**{each.name: getattr(options, each.name) for each in fields(Layout)}),
        transformer=options.transformer,
        distributed_optimizer=options.distributed_optimizer,
        scratch=options.scratch,
    )
    return config, options.json
