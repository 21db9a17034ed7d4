"""The trainer's end of an image (dora.weights.image): a second copy of the weights, which stays on their GPU.

One image at a time: each version overwrites the one before. A version has none if its tensors are not on one GPU, if
that GPU lacks room, or if an engine still reads the image before.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.weights import cuda_image
from dora.weights.files import WeightFile, bytes_at, is_torch_tensor, typed_view
from dora.weights.image import ImageNote, Place, void, write_note
from dora.weights.reference import TensorHeader, layout_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger("dora.client")

Make = Callable[[int, Any], "tuple[torch.Tensor, Place] | None"]  # as cuda_image.made


class Images:
    """The image of one trainer, which is allocated for the first version and kept."""

    def __init__(self, make: Make = cuda_image.made) -> None:
        self._make = make
        self._memory: torch.Tensor | None = None
        self._place: Place = {}
        self._note = -1  # descriptor of the note that engines may read by; -1: none
        self._has_refused = False

    def begin(self, image_bytes: int) -> "Image | None":
        """Begins the image of another version. Returns None while an engine reads the one before."""
        if not self._void():
            self._refuse("an engine still reads the one before")
            return None
        return Image(self, image_bytes)

    def memory(self, image_bytes: int, device: "torch.device") -> "torch.Tensor | None":
        """Returns memory for an image of tensors on ``device``, or None if there can be none."""
        if self._memory is not None and (len(self._memory), self._memory.device) != (image_bytes, device):
            self._memory = None
        if self._memory is None:
            found = self._make(image_bytes, device)
            if found is None:
                self._refuse(f"{device} has no room for {image_bytes:,} bytes more, or shares none")
                return None
            self._memory, self._place = found
        return self._memory

    def offer(self, folder: Path, file: WeightFile, sums: Sequence[bytes]) -> None:
        """Writes the note of the image beside the version's file. Raises OSError."""
        assert self._memory is not None
        note = ImageNote(self._place, file.blake3.hex(), len(self._memory), tuple(sums))
        written = write_note(folder, note)
        if self._note >= 0:
            os.close(self._note)  # of the same image: the commit is repeated
        self._note = written

    def close(self) -> None:
        """Ends the image. An engine that reads it notices by the checksums. May be repeated."""
        self._void()
        if self._note >= 0:
            os.close(self._note)
        self._note, self._memory = -1, None

    def _void(self) -> bool:
        if self._note < 0:
            return True
        if not void(self._note):
            return False
        os.close(self._note)
        self._note = -1
        return True

    def _refuse(self, reason: str) -> None:
        if not self._has_refused:
            log.info("engines read weights from files, not from the trainer's memory: %s", reason)
        self._has_refused = True


class Image:
    """The image of one version, as it is copied."""

    def __init__(self, images: Images, image_bytes: int) -> None:
        self._images = images
        self._image_bytes = image_bytes
        self._memory: torch.Tensor | None = None
        self._is_whole = True
        self._sums: tuple[bytes, ...] = ()

    def copy(self, tensor: Any, header: TensorHeader, offset: int) -> None:
        """Copies a tensor to its place, in the dtype of its header."""
        if not self._is_whole or not header.content_bytes:
            return
        if self._memory is None and is_torch_tensor(tensor):
            self._memory = self._images.memory(self._image_bytes, tensor.device)
        if self._memory is None or tensor.device != self._memory.device:
            self._is_whole = False
            return
        typed_view(self._memory[offset : offset + header.content_bytes], header).copy_(tensor.detach())

    def finish(self) -> None:
        """Waits until all copies are complete: the tensors may change then."""
        if self._memory is not None and self._memory.device.type != "cpu":
            import torch

            torch.cuda.synchronize(self._memory.device)

    def check(self, content: memoryview) -> None:
        """Compares the image with the file's ``content``; without agreement it is not offered."""
        if self._memory is None or not self._is_whole:
            return
        from dora.weights.words import checksum

        begin, tensors = layout_of(content)
        of_file, sums, at = bytes_at(content), [], 0
        for header in tensors:
            end = at + header.content_bytes
            own = checksum(self._memory[at:end])
            if own != checksum(of_file[begin + at : begin + end]):
                log.warning("the weights on the trainer's GPU and in its file differ in %s", header.name)
                return
            sums.append(own)
            at = end
        self._sums = tuple(sums)

    def offer(self, folder: Path, file: WeightFile) -> None:
        """Offers the image to engines, beside the file in ``folder``, if it is whole and checked."""
        if self._sums:
            with suppress(OSError):  # the file is there all the same
                self._images.offer(folder, file, self._sums)
