"""The Megatron-core trainer: one process for each GPU, started by torchrun.

torchrun --nproc-per-node 8 -m dora.trainers.megatron --address HOST:7070 --tp 2 --pp 2 --groups 64 --lr 1e-6
"""

import sys

from dora.trainers.grpo import run
from dora.trainers.megatron.options import parse_arguments
from dora.trainers.megatron.start import make_learner


def main(arguments: list[str]) -> int:
    """Returns exit code 0 when done, 1 if the service or the configuration is refused, or another rank failed."""
    return run(parse_arguments, arguments, make_learner)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
