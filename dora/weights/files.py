"""Weights files: their identity, and writing them from torch tensors or numpy arrays, hashed and checked in one pass.

Tensors are copied to host memory one at a time, so writing needs little more memory than the largest tensor. This
module never imports torch: if a torch tensor is given, torch is loaded already.
"""

import json
import mmap
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from blake3 import blake3

from dora.errors import InvalidValue
from dora.weights.finite import FiniteCheck, not_finite
from dora.weights.reference import DTYPE_BYTES, TensorHeader, open_regular

SUFFIX: Final = ".safetensors"
CHUNK_BYTES: Final = 4 << 20  # per chunk of a file; the last may be shorter
SUM_BYTES: Final = 16  # per chunk
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


@dataclass(frozen=True, slots=True)
class Examined:
    """A file that was read completely and is valid. ``sums`` has the checksum of each chunk."""

    identity: WeightFile
    sums: tuple[bytes, ...]
    tensors_at: int  # offset of the first tensor in bytes
    tensors: tuple[TensorHeader, ...]  # in file order, without gaps

    @property
    def by_name(self) -> dict[str, TensorHeader]:
        return {tensor.name: tensor for tensor in self.tensors}


def sum_of(content: bytes | bytearray | memoryview) -> bytes:
    """The checksum of one chunk: 128-bit xxh3, at a tenth of BLAKE3's cost."""
    return xxhash.xxh3_128_digest(content)


def check_file_name(name: str) -> str:
    """Returns ``name``. Raises InvalidValue unless it is a plain name ending in .safetensors."""
    plain = name.isprintable() and len(name.encode()) <= _NAME_BYTES_MAX and not name.startswith(".")
    if not plain or "/" in name or "\\" in name or not name.endswith(SUFFIX):
        raise InvalidValue("weights: file name", name, "a plain name ending in .safetensors, without a folder")
    return name


def hash_file(file: Path) -> WeightFile:
    """Returns size and BLAKE3 of a file. Raises InvalidValue if it cannot be read."""
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


def header_of(name: str, tensor: Any, shape_only: bool = False) -> TensorHeader:
    """The header of ``tensor`` (torch or numpy) in its own dtype. Raises InvalidValue for anything else.

    With ``shape_only``, accepts a tensor without values (on the device meta) in place of one that has them.
    """
    names = _NUMPY_NAMES if isinstance(tensor, np.ndarray) else _TORCH_NAMES
    if not isinstance(tensor, np.ndarray) and not is_torch_tensor(tensor):
        raise InvalidValue(f"weights: {name}", type(tensor).__name__, "a torch tensor or a numpy array")
    if isinstance(tensor, np.ma.MaskedArray) or not (shape_only or _has_elements(tensor)):
        kind = getattr(tensor, "layout", type(tensor).__name__)
        found = "a tensor on the device meta" if getattr(tensor, "is_meta", False) else str(kind)
        raise InvalidValue(f"weights: {name}", found, "a dense tensor with a value for every element")
    dtype = names.get(str(tensor.dtype))
    if dtype is None:
        raise InvalidValue(f"weights: {name}: dtype", str(tensor.dtype), f"one of {', '.join(names)}")
    return TensorHeader(name, dtype, tuple(int(extent) for extent in tensor.shape))


def _has_elements(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return True
    return not tensor.is_meta and str(tensor.layout) == "torch.strided"


def published_header(found: TensorHeader, expected: TensorHeader | None) -> TensorHeader:
    """Returns ``found`` in its published dtype: floating point is converted to the dtype that the service expects."""
    if expected is None or found.dtype not in _FLOATING or expected.dtype not in _FLOATING:
        return found
    return TensorHeader(found.name, expected.dtype, found.shape)


def write_weights(file: Path, tensors: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> WeightFile:
    """Writes ``tensors`` as one safetensors file, each in the dtype of its header. Returns the file's identity.

    Raises InvalidValue if numpy lacks the dtype, or for the first tensor that is not finite before or after conversion;
    OSError if the file cannot be written. After an error no file is left.
    """
    ordered = laid_out(headers.values())
    head, check = preamble(ordered), FiniteCheck()
    digest = blake3(head)
    try:
        with file.open("wb") as stream:
            stream.write(head)
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


def laid_out(headers: Iterable[TensorHeader]) -> list[TensorHeader]:
    """Tensors in the order in which they are written, which keeps each one aligned."""
    return sorted(headers, key=lambda header: (-DTYPE_BYTES[header.dtype], header.name))


def copy_tensor(tensor: Any, header: TensorHeader, target: mmap.mmap, offset: int) -> None:
    """Converts a tensor into a mapped file at its offset, in one pass. Raises InvalidValue if numpy lacks the dtype."""
    if not header.content_bytes:
        return
    count = header.content_bytes // DTYPE_BYTES[header.dtype]
    if isinstance(tensor, np.ndarray):
        dtype = _numpy_dtype(tensor, header)
        with np.errstate(over="ignore", invalid="ignore"):  # the check for finite numbers detects it
            np.frombuffer(target, dtype, count, offset).reshape(header.shape)[...] = tensor
    else:
        torch = sys.modules["torch"]
        place = torch.frombuffer(target, dtype=getattr(torch, _TORCH_OF[header.dtype]), count=count, offset=offset)
        place.view(header.shape).copy_(tensor.detach())


def tensor_at(content: memoryview, offset: int, header: TensorHeader) -> Any:
    """A read-only torch tensor that shares a file's own bytes."""
    torch = sys.modules["torch"]
    dtype, count = getattr(torch, _TORCH_OF[header.dtype]), header.content_bytes // DTYPE_BYTES[header.dtype]
    if not count:
        return torch.empty(header.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns that the tensor is writable; nothing writes to it
        return torch.frombuffer(content, dtype=dtype, count=count, offset=offset).view(header.shape)


def typed_view(memory: Any, header: TensorHeader) -> Any:
    """The torch tensor whose bytes are ``memory``, (n,) uint8 on any device, which begins at a whole element."""
    torch = sys.modules["torch"]
    return memory.view(getattr(torch, _TORCH_OF[header.dtype])).view(header.shape)


def bytes_at(content: memoryview) -> Any:
    """Returns ``content``, which is read-only and not empty, as a torch tensor, (n,) uint8."""
    torch = sys.modules["torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as above
        return torch.frombuffer(content, dtype=torch.uint8)


def preamble(headers: Iterable[TensorHeader]) -> bytes:
    """The beginning of a safetensors file that holds these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    start = 0
    for header in headers:
        stop = start + header.content_bytes
        entries[header.name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _numpy_dtype(tensor: Any, header: TensorHeader) -> Any:
    if header.dtype not in _NUMPY_OF:
        allowed = f"{header.dtype}, which numpy lacks: use torch"
        raise InvalidValue(f"weights: {header.name}: dtype", str(tensor.dtype), allowed)
    return np.dtype(_NUMPY_OF[header.dtype]).newbyteorder("<")


def _content(tensor: Any, header: TensorHeader) -> memoryview:
    """Returns the tensor's bytes, row-major, little-endian."""
    if isinstance(tensor, np.ndarray):
        dtype = _numpy_dtype(tensor, header)
        with np.errstate(over="ignore", invalid="ignore"):  # the check for finite numbers detects it
            array = np.ascontiguousarray(tensor, dtype)
    else:
        torch = sys.modules["torch"]
        host = tensor.detach().to("cpu", getattr(torch, _TORCH_OF[header.dtype])).resolve_neg().contiguous()
        array = host.reshape(-1).view(torch.uint8).numpy()
    content: memoryview = array.reshape(-1).view(np.uint8).data
    return content
