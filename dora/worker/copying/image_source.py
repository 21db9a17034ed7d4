"""The way of weights from an image in the trainer's memory (dora.weights.image) to an engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dora.errors import InvalidValue, NotFound
from dora.weights.files import typed_view
from dora.weights.image import ImageNote, ImageRefused, Place
from dora.weights.load_time import LoadDeadline
from dora.weights.reference import TensorHeader, read_layout
from dora.weights.whole import manifest_in
from dora.weights.words import checksum

if TYPE_CHECKING:
    from dora.engine_patches.mapped_weights import Source, Tensors

Open = Callable[[Place, int], torch.Tensor]  # the memory of an image, (bytes,) uint8; raises ImageRefused
TIME_SHARE = 3  # an image may take this part of a load's time, so that the file can still be loaded


def image_source(note: ImageNote, opened: Open, device: torch.device) -> "Source":
    """Returns the source that reads the image of ``note`` in place of the version's one file.

    Its generator raises ImageRefused, also after it has yielded tensors, and DeadlineExceeded.
    """

    def tensors(files: Sequence[str], limit_s: float) -> "Tensors":
        headers = _checked(note, files)
        deadline = LoadDeadline(limit_s / TIME_SHARE, note.image_bytes)
        image, at = opened(note.place, note.image_bytes), 0
        for header, expected in zip(headers, note.sums, strict=True):
            # memory of its own: what is checked can no longer change
            memory = torch.empty(header.content_bytes, dtype=torch.uint8, device=device)
            memory.copy_(image[at : at + header.content_bytes])
            if checksum(memory) != expected:
                raise ImageRefused(header.name, "another checksum", "unchanged until it is read")
            at += header.content_bytes
            deadline.loaded(header.content_bytes)
            yield header.name, typed_view(memory, header)
            del memory  # before the next is allocated

    return tensors


def _checked(note: ImageNote, files: Sequence[str]) -> tuple[TensorHeader, ...]:
    """Returns the tensors of the version's one file. Raises ImageRefused for a note of other files."""
    if len(files) != 1:
        raise ImageRefused("files", len(files), "1: a version of several files has no image")
    file = Path(files[0])
    try:
        announced = {each.name: each.blake3.hex() for each in manifest_in(file.parent).files}
    except (NotFound, InvalidValue) as error:
        raise ImageRefused("file", str(file), f"one of a published version ({error})") from error
    headers = read_layout(file)[1]
    size_bytes = sum(header.content_bytes for header in headers)
    if announced.get(file.name) != note.blake3:
        raise ImageRefused("blake3", note.blake3, f"that of {file.name}")
    if (note.image_bytes, len(note.sums)) != (size_bytes, len(headers)):
        raise ImageRefused("bytes", note.image_bytes, f"the {size_bytes} of {len(headers)} tensors")
    return headers
