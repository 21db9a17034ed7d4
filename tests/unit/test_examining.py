"""The examination of a weights file: the same with any number of threads, and exact where elements cross chunks."""

import json
from pathlib import Path

import numpy as np
import pytest

from dora.errors import InvalidValue
from dora.weights.examining import examine_file
from dora.weights.files import CHUNK_BYTES, WeightFile, hash_file, sum_of
from tests.refusals import refused
from tests.sweeps import some_of


def written(file: Path, tensors: dict[str, np.ndarray], pad: int) -> Path:
    """A safetensors file whose tensors begin at an offset of ``pad`` modulo 8."""
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        dtype = {"float32": "F32", "float16": "F16", "uint8": "U8"}[str(tensor.dtype)]
        entries[name] = {"dtype": dtype, "shape": [tensor.size], "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * ((pad - len(text)) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values()))
    return file


def some_tensors() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(3)
    return {
        "a": chance.integers(0, 255, 17, np.uint8),
        "b": chance.standard_normal(CHUNK_BYTES // 4 + 5, np.float32),
        "empty": np.empty(0, np.float16),
        "c": chance.standard_normal(CHUNK_BYTES // 4, np.float32).astype(np.float16),
        "d": chance.standard_normal(CHUNK_BYTES // 3, np.float32),
    }


@pytest.mark.parametrize("pad", [0, 3, 6])
@pytest.mark.parametrize("threads", [1, 3])
def test_identity_sums_and_tensors(tmp_path: Path, threads: int, pad: int) -> None:
    file = written(tmp_path / "model.safetensors", some_tensors(), pad)
    found = examine_file(file, hash_file(file), threads=threads)
    content = file.read_bytes()
    sums = tuple(sum_of(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES))
    assert (found.identity, found.sums) == (hash_file(file), sums)
    assert [each.name for each in found.tensors] == ["a", "b", "empty", "c", "d"]
    assert found.tensors_at % 8 == pad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pad", some_of(range(8), 0, 3))
def test_the_first_tensor_that_is_not_finite_is_named_wherever_its_number_lies(
    tmp_path: Path, threads: int, pad: int
) -> None:
    """The numbers at the chunks' borders, some of which lie in two chunks, one after the other."""
    clean = some_tensors()
    file = written(tmp_path / "model.safetensors", clean, pad)
    at = examine_file(file, threads=threads).tensors_at
    borders = {("b", 0), ("b", -1), ("c", 0), ("c", -1), ("d", 0), ("d", -1)}
    for name, tensor in clean.items():
        if tensor.size > CHUNK_BYTES // 8:
            for border in range(CHUNK_BYTES, at + tensor.nbytes, CHUNK_BYTES):
                index = (border - at) // tensor.itemsize
                borders |= {(name, each) for each in (index - 1, index) if 0 <= each < tensor.size}
        at += tensor.nbytes
    for name, index in sorted(borders):
        bad = {each: tensor.copy() for each, tensor in clean.items()}
        bad[name][index] = np.inf
        bad["d"][7] = np.nan  # a later one
        with refused(InvalidValue, field=f"weights: {name}"):
            examine_file(written(file, bad, pad), threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_another_file_than_announced(tmp_path: Path, threads: int) -> None:
    file = written(tmp_path / "model.safetensors", some_tensors(), 0)
    announced = hash_file(file)
    with refused(InvalidValue, field="model.safetensors: bytes"):
        examine_file(file, WeightFile(announced.name, announced.file_bytes + 1, announced.blake3), threads=threads)
    with refused(InvalidValue, field="model.safetensors: blake3"):
        examine_file(file, WeightFile(announced.name, announced.file_bytes, bytes(32)), threads=threads)
