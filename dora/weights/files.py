"""Weights files: their identity, and writing one from torch tensors or numpy arrays, hashed in the same pass.

One tensor at a time is copied to host memory, so writing needs little more memory than the largest tensor.
torch is never imported here: it is loaded already where a tensor of it is given.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from dora.errors import InvalidValue
from dora.weights.reference import DTYPE_BYTES, TensorHeader

SUFFIX: Final = ".safetensors"
_NAME_CHARACTERS_MAX: Final = 200
_FLOATING: Final = ("F64", "F32", "F16", "BF16")
_NUMPY_NAMES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_TORCH_NAMES: Final[Mapping[str, str]] = {
    **{f"torch.{name}": dtype for name, dtype in _NUMPY_NAMES.items()},
    "torch.bfloat16": "BF16",
}
_NUMPY_OF: Final = {dtype: name for name, dtype in _NUMPY_NAMES.items()}
_TORCH_OF: Final = {dtype: name.removeprefix("torch.") for name, dtype in _TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a version, as announced by its publisher."""

    name: str  # plain, ending in .safetensors
    file_bytes: int
    blake3: bytes  # 32 bytes


def check_file_name(name: str) -> str:
    """``name`` itself; raises InvalidValue unless it is a plain name ending in .safetensors."""
    plain = name.isprintable() and len(name) <= _NAME_CHARACTERS_MAX and not name.startswith(".")
    if not plain or "/" in name or "\\" in name or not name.endswith(SUFFIX):
        raise InvalidValue("weights: file name", name, "a plain name ending in .safetensors, without a folder")
    return name


def hash_file(file: Path) -> WeightFile:
    """Size and BLAKE3 of a file. Raises InvalidValue where it cannot be read."""
    try:
        digest = blake3().update_mmap(file)
        return WeightFile(file.name, file.stat().st_size, digest.digest())
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error


def header_of(name: str, tensor: Any) -> TensorHeader:
    """How ``tensor`` (torch or numpy) would be written as it is. Raises InvalidValue for anything else."""
    names = _NUMPY_NAMES if isinstance(tensor, np.ndarray) else _TORCH_NAMES
    if not isinstance(tensor, np.ndarray) and not is_torch_tensor(tensor):
        raise InvalidValue(f"weights: {name}", type(tensor).__name__, "a torch tensor or a numpy array")
    dtype = names.get(str(tensor.dtype))
    if dtype is None:
        raise InvalidValue(f"weights: {name}: dtype", str(tensor.dtype), f"one of {', '.join(names)}")
    return TensorHeader(name, dtype, tuple(int(extent) for extent in tensor.shape))


def published_header(found: TensorHeader, expected: TensorHeader | None) -> TensorHeader:
    """``found`` in the dtype it is published in: floating point is converted to what the service expects."""
    if expected is None or found.dtype not in _FLOATING or expected.dtype not in _FLOATING:
        return found
    return TensorHeader(found.name, expected.dtype, found.shape)


def write_weights(file: Path, tensors: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> WeightFile:
    """Writes ``tensors`` as one safetensors file, each in the dtype of its header; returns its identity.

    Raises InvalidValue where numpy lacks the dtype.
    """
    ordered = sorted(headers.values(), key=lambda header: (-DTYPE_BYTES[header.dtype], header.name))  # keeps alignment
    preamble = _preamble(ordered)
    digest = blake3(preamble)
    with file.open("wb") as stream:
        stream.write(preamble)
        for header in ordered:
            content = _content(tensors[header.name], header)
            digest.update(content)
            stream.write(content)
        file_bytes = stream.tell()
    return WeightFile(file.name, file_bytes, digest.digest())


def is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _preamble(headers: list[TensorHeader]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    start = 0
    for header in headers:
        stop = start + header.content_bytes
        entries[header.name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Any, header: TensorHeader) -> memoryview:
    """The tensor's bytes, row-major, little-endian."""
    if isinstance(tensor, np.ndarray):
        if header.dtype not in _NUMPY_OF:
            raise InvalidValue(
                f"weights: {header.name}: dtype", str(tensor.dtype), f"{header.dtype}: numpy has none, use torch"
            )
        array = np.ascontiguousarray(tensor, np.dtype(_NUMPY_OF[header.dtype]).newbyteorder("<"))
    else:
        torch = sys.modules["torch"]
        host = tensor.detach().to("cpu", getattr(torch, _TORCH_OF[header.dtype])).contiguous()
        array = host.reshape(-1).view(torch.uint8).numpy()
    content: memoryview = array.reshape(-1).view(np.uint8).data
    return content
