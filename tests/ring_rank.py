"""An engine on a CPU whose weights come as on a GPU: through the ring, or from an image in the trainer's memory, which
is this process's. A test can make the disk slow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.engine_patches.mapped_weights import Tensors
from dora.weights.image import ImageNote
from dora.weights.load_time import LoadDeadline
from dora.worker.copying.image_source import image_source
from dora.worker.copying.weight_ring import WeightRing
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.cpu_rank import CpuRank
from tests import host_images


class RingOnCpu(Cpu):
    """``slow_from``: the tensor from which on a load takes too long; None: none does."""

    worker_class = "tests.ring_rank.RingRank"
    slow_from: int | None = None
    images_read: int = 0  # to their ends

    def weight_source(self, device: Any, ranks: int) -> Any:
        ring = WeightRing(device, slots=3, slot_bytes=1000)

        def tensors(files: Sequence[str], limit_s: float) -> Tensors:
            now_s = 0.0
            deadline = LoadDeadline(limit_s, 1, lambda: now_s)
            for number, found in enumerate(ring.tensors([Path(file) for file in files], deadline), 1):
                if number == RingOnCpu.slow_from:
                    now_s = limit_s
                yield found

        return tensors

    def image_source(self, note: ImageNote, device: Any) -> Any:
        source = image_source(note, host_images.opened, device)

        def tensors(files: Sequence[str], limit_s: float) -> Tensors:
            yield from source(files, limit_s)
            RingOnCpu.images_read += 1

        return tensors


class RingRank(CpuRank):
    device_port = RingOnCpu()
