"""Where a trainer's signals go beside the service: TensorBoard and Weights & Biases, both optional packages.

They are loaded only where they are asked for, before the first step, so what is missing is said at once.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dora.errors import DoraError

Writer = Callable[[int, Mapping[str, float]], None]  # a step's number, its metrics by name


def make_writers(tensorboard: str, wandb: str, config: Mapping[str, Any]) -> list[Writer]:
    """For the folder ``tensorboard`` and the project ``wandb``; an empty name asks for none.

    ``config``: what W&B shows of the run. Raises DoraError where a package is not installed, naming the extra.
    """
    found = [tensorboard_writer(tensorboard)] if tensorboard else []
    return found + ([wandb_writer(wandb, config)] if wandb else [])


def tensorboard_writer(folder: str) -> Writer:
    """Appends to event files in ``folder``, which is made, and brings them to disk at every step."""
    _package("tensorboard", "--tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(folder)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def wandb_writer(project: str, config: Mapping[str, Any]) -> Writer:
    """A new run of ``project``. Where it goes, and whether at all, is what W&B's own variables say (``WANDB_MODE``)."""
    run = _package("wandb", "--wandb").init(project=project, config=dict(config))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return write


def _package(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DoraError(f"{option} needs {name}: pip install 'dora-rollout[{name}]'") from error
