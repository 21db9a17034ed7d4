"""Where the parts of an in-process vLLM engine are found."""

from typing import Any


def runner_of(core: Any) -> Any:
    """The model runner of an EngineCore with the "uni" executor."""
    return core.model_executor.driver_worker.worker.model_runner


def model_of(core: Any) -> Any:
    """The torch module that an EngineCore runs."""
    return runner_of(core).get_model()
