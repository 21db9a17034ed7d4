"""Python's search for cyclic garbage, made rare where many objects live long and few are in cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

COLLECT_OBJECTS: Final = 100_000  # new ones between two searches


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Else Python walks the whole heap again and again: with 131,072 requests it takes a fifth of an admission's time.

    A higher threshold stays as it is, and where nothing is collected, nothing is.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(COLLECT_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
