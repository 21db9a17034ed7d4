"""The rule for a head that is tied to the embedding, the same for each way in which weights come.

the model      the head in the weights      the weights are
tied           none                         taken
tied           equal to the embedding       taken; the client publishes them without it
tied           differs from the embedding   refused
not tied       none                         refused, as without any other tensor
not tied       any                          taken
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue
from dora.weights.reference import HEAD, TensorHeader, embedding_of_tied, open_regular, read_layout

_PIECE_BYTES: Final = 1 << 24


def differing_head(embedding: str) -> InvalidValue:
    allowed = f"left out, or equal to {embedding}, as tie_word_embeddings is true in the model's config.json"
    return InvalidValue(f"weights: {HEAD}", "(other numbers)", allowed, f"differs from {embedding}")


def check_tied_head(files: Iterable[Path], expected: Iterable[TensorHeader]) -> bool:
    """Returns whether the files hold a head that is tied. Raises InvalidValue if it differs from their embedding."""
    embedding = embedding_of_tied({tensor.name: tensor for tensor in expected})
    if embedding is None or HEAD not in (found := placed_tensors(files)):
        return False
    if not are_equal(found[HEAD], found.get(embedding)):
        raise differing_head(embedding)
    return True


Placed = tuple[Path, int, TensorHeader]  # a tensor, its file, and its offset there


def placed_tensors(files: Iterable[Path]) -> dict[str, Placed]:
    found = {}
    for file in files:
        start, layout = read_layout(file)
        for tensor in layout:
            found[tensor.name] = (file, start, tensor)
            start += tensor.content_bytes
    return found


def are_equal(one: Placed, other: Placed | None) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if other is None or one[2] != replace(other[2], name=one[2].name):
        return False
    with open_regular(one[0]) as left, open_regular(other[0]) as right:
        left.seek(one[1])
        right.seek(other[1])
        for at in range(0, one[2].content_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one[2].content_bytes - at)
            if left.read(size) != right.read(size):
                return False
    return True
