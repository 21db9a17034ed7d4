"""Weights files: their identity, and writing one from torch tensors or numpy arrays; hashed and checked in one pass.

One tensor at a time is copied to host memory, so writing needs little more memory than the largest tensor.
torch is never imported here: it is loaded already where a tensor of it is given.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from dora.errors import InvalidValue
from dora.weights.finite import FiniteCheck, not_finite
from dora.weights.reference import DTYPE_BYTES, HEADER_BYTES_MAX, TensorHeader, open_regular, read_layout

SUFFIX: Final = ".safetensors"
_NAME_BYTES_MAX: Final = 200
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
    plain = name.isprintable() and len(name.encode()) <= _NAME_BYTES_MAX and not name.startswith(".")
    if not plain or "/" in name or "\\" in name or not name.endswith(SUFFIX):
        raise InvalidValue("weights: file name", name, "a plain name ending in .safetensors, without a folder")
    return name


def hash_file(file: Path) -> WeightFile:
    """Size and BLAKE3 of a file. Raises InvalidValue where it cannot be read."""
    digest, chunk = blake3(), bytearray(FiniteCheck.CHUNK_BYTES)
    file_bytes = 0
    try:
        with open_regular(file) as stream:
            while read_bytes := stream.readinto(chunk):
                digest.update(memoryview(chunk)[:read_bytes])
                file_bytes += read_bytes
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error
    return WeightFile(file.name, file_bytes, digest.digest())


def examine_file(
    file: Path, announced: WeightFile | None = None, header_bytes_max: int = HEADER_BYTES_MAX
) -> tuple[WeightFile, dict[str, TensorHeader]]:
    """Reads a safetensors file once, a megabyte at a time: its identity, and its tensors by name.

    The file is read, not mapped: a writer that cuts it short would end a process that has it mapped.
    Raises InvalidValue for a file that cannot be read, is not sound, differs from what was ``announced``, or holds a
    tensor that is not finite, which is named.
    """
    tensors_at, tensors = read_layout(file, header_bytes_max)
    total_bytes = tensors_at + sum(tensor.content_bytes for tensor in tensors)
    if announced is not None and total_bytes != announced.file_bytes:
        raise InvalidValue(f"{file.name}: bytes", total_bytes, f"as announced, {announced.file_bytes}")
    digest, check, buffer = blake3(), FiniteCheck(), memoryview(bytearray(FiniteCheck.CHUNK_BYTES))
    infinite: TensorHeader | None = None
    try:
        with open_regular(file) as stream:
            for chunk in _chunks(stream, file.name, tensors_at, buffer):
                digest.update(chunk)
            for tensor in tensors:
                for chunk in _chunks(stream, file.name, tensor.content_bytes, buffer):
                    digest.update(chunk)
                    if infinite is None and not check.is_finite(chunk, tensor.dtype):
                        infinite = tensor
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error
    found = WeightFile(file.name, total_bytes, digest.digest())
    if announced is not None and found.blake3 != announced.blake3:
        raise InvalidValue(f"{file.name}: blake3", found.blake3.hex(), f"as announced, {announced.blake3.hex()}")
    if infinite is not None:
        raise not_finite(infinite.name, infinite.dtype)
    return found, {tensor.name: tensor for tensor in tensors}


def _chunks(stream: BufferedReader, name: str, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """The next ``length`` bytes, in pieces that lie in ``buffer`` until the next one. Raises InvalidValue at an end."""
    while length:
        chunk = buffer[: min(length, len(buffer))]
        if stream.readinto(chunk) != len(chunk):
            raise InvalidValue(f"{name}: bytes", "fewer than a moment ago", "a file that nobody writes any more")
        yield chunk
        length -= len(chunk)


def header_of(name: str, tensor: Any) -> TensorHeader:
    """How ``tensor`` (torch or numpy) would be written as it is. Raises InvalidValue for anything else."""
    names = _NUMPY_NAMES if isinstance(tensor, np.ndarray) else _TORCH_NAMES
    if not isinstance(tensor, np.ndarray) and not is_torch_tensor(tensor):
        raise InvalidValue(f"weights: {name}", type(tensor).__name__, "a torch tensor or a numpy array")
    if isinstance(tensor, np.ma.MaskedArray) or not _has_elements(tensor):
        kind = getattr(tensor, "layout", type(tensor).__name__)
        found = "a tensor on the device meta" if getattr(tensor, "is_meta", False) else str(kind)
        raise InvalidValue(f"weights: {name}", found, "a dense tensor, with a number for every element")
    dtype = names.get(str(tensor.dtype))
    if dtype is None:
        raise InvalidValue(f"weights: {name}: dtype", str(tensor.dtype), f"one of {', '.join(names)}")
    return TensorHeader(name, dtype, tuple(int(extent) for extent in tensor.shape))


def _has_elements(tensor: Any) -> bool:
    """Whether a torch tensor is more than a shape, and laid out as one array; an array of numpy is."""
    if isinstance(tensor, np.ndarray):
        return True
    return not tensor.is_meta and str(tensor.layout) == "torch.strided"


def published_header(found: TensorHeader, expected: TensorHeader | None) -> TensorHeader:
    """``found`` in the dtype it is published in: floating point is converted to what the service expects."""
    if expected is None or found.dtype not in _FLOATING or expected.dtype not in _FLOATING:
        return found
    return TensorHeader(found.name, expected.dtype, found.shape)


def write_weights(file: Path, tensors: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> WeightFile:
    """Writes ``tensors`` as one safetensors file, each in the dtype of its header; returns its identity.

    Raises InvalidValue where numpy lacks the dtype, or for the first tensor that is not finite, in itself or as
    converted, and OSError where it cannot be written; no file is left then.
    """
    ordered = sorted(headers.values(), key=lambda header: (-DTYPE_BYTES[header.dtype], header.name))  # keeps alignment
    preamble, check = _preamble(ordered), FiniteCheck()
    digest = blake3(preamble)
    try:
        with file.open("wb") as stream:
            stream.write(preamble)
            for header in ordered:
                content = _content(tensors[header.name], header)
                if not check.is_finite(content, header.dtype):
                    raise not_finite(header.name, header.dtype)
                digest.update(content)
                stream.write(content)
            file_bytes = stream.tell()
    except (InvalidValue, OSError):
        file.unlink(missing_ok=True)
        raise
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
        with np.errstate(over="ignore", invalid="ignore"):  # the check for finite numbers finds it
            array = np.ascontiguousarray(tensor, np.dtype(_NUMPY_OF[header.dtype]).newbyteorder("<"))
    else:
        torch = sys.modules["torch"]
        host = tensor.detach().to("cpu", getattr(torch, _TORCH_OF[header.dtype])).resolve_neg().contiguous()
        array = host.reshape(-1).view(torch.uint8).numpy()
    content: memoryview = array.reshape(-1).view(np.uint8).data
    return content
