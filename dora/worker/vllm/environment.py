"""Prepares the process for vLLM, which reads its environment while it is imported."""

import logging
import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue
from dora.system.environment import BATCH_INVARIANT

# Set unless the operator has set them.
_DEFAULTS: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is looked up
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # A rank is killed at the end, and Python's tracker removes what shared memory it had: nothing to warn of.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}
# Required by this engine, whatever the operator has set.
_REQUIRED: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler must be in reach between steps
}
# A step releases Python's lock hundreds of times, and may wait this long for it while the data plane's threads run.
# With Python's default of 5 ms a moving request cost its engine 6 ms of steps, with this 3.5 ms.
NAME_MAX: Final = 200  # characters of a folder's name
_SWITCH_S: Final = 0.0002


def _cache_of(visible: str, environment: Mapping[str, str]) -> Path:
    """Returns a cache folder for engines on these GPUs alone. vLLM writes to its compile cache in place, so engines
    that start at once must not share it.
    """
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm" / f"gpus-{visible.replace(',', '-')}"[:NAME_MAX]


def prepare(
    of_device: Mapping[str, str],
    environment: MutableMapping[str, str] = os.environ,
    *,
    batch_invariant: bool | None = None,
) -> None:
    """Sets the environment for vLLM in this process and reduces its logging. May be repeated.

    ``of_device`` has the device's defaults (``Device.environment``). ``batch_invariant`` sets vLLM's mode; None keeps
    it. Raises InvalidValue for another mode than that with which vLLM was imported.
    """
    if batch_invariant is not None:
        mode = str(int(batch_invariant))
        if "vllm" in sys.modules and environment.get(BATCH_INVARIANT, "0") != mode:
            allowed = f"{not batch_invariant} in this process, which imported vLLM without {BATCH_INVARIANT}={mode}"
            raise InvalidValue("workers.batch_invariant", batch_invariant, allowed)
        environment[BATCH_INVARIANT] = mode
    for name, value in {**_DEFAULTS, **of_device}.items():
        environment.setdefault(name, value)
    if visible := environment.get("CUDA_VISIBLE_DEVICES"):
        environment.setdefault("VLLM_CACHE_ROOT", str(_cache_of(visible, environment)))
    environment.update(_REQUIRED)
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("vllm").setLevel(environment["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|vllm)\.")
