"""Writers of a trainer's signals beside the service: TensorBoard and Weights & Biases, both optional packages.

They are loaded only if requested, before the first step, so a missing package is reported at once.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dora.data.extras import install
from dora.errors import DoraError

Writer = Callable[[int, Mapping[str, float]], None]  # a step's number, its metrics by name


def make_writers(tensorboard: str, wandb: str, config: Mapping[str, Any]) -> list[Writer]:
    """Writers for the folder ``tensorboard`` and the project ``wandb``; an empty name requests none.

    ``config`` has the run's settings, for W&B. Raises DoraError if a package is not installed, naming the extra.
    """
    found = [tensorboard_writer(tensorboard)] if tensorboard else []
    return found + ([wandb_writer(wandb, config)] if wandb else [])


def tensorboard_writer(folder: str) -> Writer:
    """Appends to event files in ``folder``, which is created, and flushes them at every step."""
    _package("tensorboard", "--tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(folder)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def wandb_writer(project: str, config: Mapping[str, Any]) -> Writer:
    """Writes to a new run of ``project``. Its destination, if any, is set by W&B's own variables (``WANDB_MODE``)."""
    run = _package("wandb", "--wandb").init(project=project, config=dict(config))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return write


def _package(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DoraError(f"{option} needs {name}. Run {install(name)}.") from error
