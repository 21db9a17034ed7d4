"""The streams on which a device copies KV and weights, and their order against the engine's own stream.

Copies on one stream run in order. The engine's stream and the copies run side by side, unless one waits for the other:
``entered`` makes copies wait for the engine's work so far, and ``hold_up`` makes the engine wait for copies.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, cast

import numpy as np
import torch


class Mark(Protocol):
    """A point in the copies so far."""

    def synchronize(self) -> None:
        """Blocks until all copies before it are complete."""


class Streams(Protocol):
    """The copy stream of a device, beside the stream of the calling engine."""

    def host_memory(self, size_bytes: int) -> np.ndarray:
        """Returns new host memory that the device can copy from and to."""

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Returns memory on the device, in bytes. Work that is queued on the engine's stream may still use it, and once
        it is released, later work there may. Not within ``entered``.
        """

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Copies in this context wait for the work that is already queued on the engine's stream."""

    def run(self, copies: Callable[[], None]) -> None:
        """Queues the copies that ``copies`` calls for. Only within ``entered``."""

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Returns ids on the device, for later copies. Only within ``entered``."""

    def mark(self) -> Mark:
        """Returns the point after all copies so far. Only within ``entered``."""

    def hold_up(self, mark: Mark) -> None:
        """Makes later work on the engine's stream wait for the mark. Does not block the caller."""


class _Done:
    def synchronize(self) -> None:
        pass


DONE: Final[Mark] = _Done()


class HostStreams:
    """A CPU: copies are complete when they were called for."""

    def host_memory(self, size_bytes: int) -> np.ndarray:
        return torch.empty(size_bytes, dtype=torch.uint8).numpy()

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, copies: Callable[[], None]) -> None:
        copies()

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64)

    def mark(self) -> Mark:
        return DONE

    def hold_up(self, mark: Mark) -> None:
        pass


class CudaStreams:
    """A GPU: copies run on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if ``torch.cuda`` is not torch's own: vLLM's CPU modules replace parts of it."""
        if not torch.cuda.Stream.__module__.startswith("torch."):
            kind = f"{torch.cuda.Stream.__module__}.{torch.cuda.Stream.__qualname__}"
            raise RuntimeError(f"torch.cuda.Stream is {kind}: its copies would not be awaited")
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host_memory(self, size_bytes: int) -> np.ndarray:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def run(self, copies: Callable[[], None]) -> None:
        copies()

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        event: Any = self._stream.record_event()
        if event is None:
            raise RuntimeError("torch.cuda records no event: copies would not be awaited")
        return cast(Mark, event)

    def hold_up(self, mark: Mark) -> None:
        if mark is not DONE:
            torch.cuda.current_stream(self._device).wait_event(cast(Any, mark))


def streams_of(device: torch.device) -> Streams:
    """Returns the streams of a device. Raises RuntimeError as ``CudaStreams`` does."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
