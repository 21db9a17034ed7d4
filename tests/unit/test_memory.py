"""Garbage collection is rare, and freed memory is kept."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dora.system.memory import COLLECT_OBJECTS, collecting_rarely

FREED_AND_ASKED_FOR = """
import ctypes, resource, sys
import numpy as np
from dora.system.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc")
    sys.exit()
for round in range(11):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    columns = [np.ones(2**17) for _ in range(8)]  # of 1 MiB
    del columns
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "within"), [(700, COLLECT_OBJECTS), (2 * COLLECT_OBJECTS, 2 * COLLECT_OBJECTS), (0, 0)]
)
def test_garbage_is_looked_for_rarely_and_as_before_in_the_end(before: int, within: int) -> None:
    gc.set_threshold(before, 10, 10)
    with pytest.raises(RuntimeError), collecting_rarely():
        assert gc.get_threshold() == (within, 10, 10)
        raise RuntimeError
    assert gc.get_threshold() == (before, 10, 10)


def faults(how: str) -> str:
    argv = [sys.executable, "-c", FREED_AND_ASKED_FOR, how]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_freed_memory_is_taken_again_without_the_kernel() -> None:
    kept = faults("keep")
    if kept == "no glibc":
        pytest.skip(kept)
    assert int(kept) < 50
    assert int(kept) < int(faults("as ever"))
