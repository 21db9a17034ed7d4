"""The check of a user's model folder before an engine starts."""

from pathlib import Path

from dora.config import Config
from dora.models import NAMES
from dora.models.loadable import check_loadable
from dora.orchestrator.device_sizes import placement_for
from dora.weights.contradictions import check_folder


def check_model(config: Config, model: Path) -> tuple[str, ...]:
    """Returns warnings about the folder. Raises InvalidValue if it contradicts itself, or the engine refuses it."""
    if config.model in NAMES:
        return ()
    workers = config.workers
    if workers.count and workers.engine == "vllm":
        check_loadable(model, placement_for(workers).kind)
    return check_folder(model)
