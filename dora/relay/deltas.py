"""Deltas over a link between zones: a chunk crosses as its difference from a version that both ends have."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from dora.errors import InvalidValue, TransferFailed
from dora.relay.holding import Find, Holding, Reader
from dora.weights.delta import element_bytes_at, element_bytes_of, encode
from dora.weights.manifest import Manifest


@contextmanager
def base_of(manifest: Manifest, name: str, find: Find) -> Iterator[Reader | None]:
    """Holds the version ``name`` within the context, as the base of another version's deltas.

    Yields None, so that chunks cross whole, unless it is here, complete, readable and of the same layout.
    """
    with ExitStack() as stack:
        base = None
        with suppress(InvalidValue, OSError, TransferFailed):  # retired meanwhile, or damaged
            holding = find(name, 0.0) if name else None
            if holding is not None and holding.is_whole and holding.manifest.is_laid_out_as(manifest):
                base = stack.enter_context(holding.reader())
        yield base


class Encoder:
    """Encodes a version's chunks against ``base``, which has the same layout."""

    def __init__(self, holding: Holding, base: Reader) -> None:
        self._holding, self._base = holding, base
        self._elements: dict[str, list[tuple[int, int]]] = {}  # by file: a tensor's end, and the bytes of its elements
        for each in sorted(holding.manifest.tensors, key=lambda tensor: tensor.offset):
            end = each.offset + each.header.content_bytes
            self._elements.setdefault(each.file, []).append((end, element_bytes_of(each.header)))

    def encoded(self, number: int, content: memoryview) -> memoryview:
        """Returns a chunk as ``dora.weights.delta.decode`` takes it: at most one byte longer than ``content``."""
        file, index = self._holding.numbering.place(number)
        offset, _ = self._holding.manifest.file(file).chunk(index)
        element_bytes = element_bytes_at(self._elements.get(file, []), offset)
        return memoryview(encode(content, self._base.chunk(number), element_bytes))
