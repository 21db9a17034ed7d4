"""What the tensors of a model are called and shaped, read from safetensors headers: no torch, no tensor is loaded.

Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the tensors' bytes.
Source: the safetensors format specification.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.errors import InvalidValue

# Bytes of one element, by the name that safetensors gives a dtype.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
_TIED_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint. ``optional``: it may be left out, as a head that is tied to the embedding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    optional: bool = False

    @property
    def content_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Reference:
    """A Hugging Face model folder, as every published version must look."""

    folder: Path
    files: tuple[str, ...]  # its safetensors files
    tensors: tuple[TensorHeader, ...]  # sorted by name
    vocab_size: int

    @property
    def content_bytes(self) -> int:
        return sum(tensor.content_bytes for tensor in self.tensors)


def read_reference(folder: Path) -> Reference:
    """The tensors of a Hugging Face folder, sharded or not. Raises InvalidValue where it is none."""
    files = weight_files(folder)
    config = _json(folder / "config.json")
    tied = bool(config.get("tie_word_embeddings", False))
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, tensor in read_header(folder / file).items():
            optional = tied and name == _TIED_HEAD
            tensors[name] = TensorHeader(name, tensor.dtype, tensor.shape, optional)
    vocab_size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", 0))
    return Reference(folder, files, tuple(tensors[name] for name in sorted(tensors)), int(vocab_size))


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that a loader reads from ``folder``: of its index, else the one, else all."""
    if (folder / INDEX_FILE).is_file():
        return tuple(sorted(set(_json(folder / INDEX_FILE).get("weight_map", {}).values())))
    if (folder / WEIGHTS_FILE).is_file():
        return (WEIGHTS_FILE,)
    files = tuple(sorted(file.name for file in folder.glob("*.safetensors")))
    if not files:
        raise InvalidValue("model", str(folder), "a folder with safetensors files")
    return files


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, by name. Raises InvalidValue for anything but a whole, sound file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _HEADER_BYTES_MAX:
                raise InvalidValue(f"{file.name}: header bytes", length, f"at most {_HEADER_BYTES_MAX}")
            header = json.loads(stream.read(length))
            total_bytes = file.stat().st_size - 8 - length
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error
    except ValueError as error:
        raise InvalidValue("weights file", str(file), f"in safetensors format ({error})") from error
    tensors = {}
    ranges = []
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name], offsets = _entry(file, name, entry)
            ranges.append(offsets)
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            raise InvalidValue(f"{file.name}: data_offsets", start, f"contiguous: {end}")
        end = stop
    if end != total_bytes:
        raise InvalidValue(f"{file.name}: bytes of tensors", total_bytes, f"as its header says, {end}")
    return tensors


def check_tensors(found: Mapping[str, TensorHeader], expected: Iterable[TensorHeader]) -> None:
    """Raises InvalidValue for the first tensor (by name) that is misshapen, of another dtype, unknown or missing."""
    wanted = {tensor.name: tensor for tensor in expected}
    for name in sorted(found.keys() | wanted.keys()):
        if name not in wanted:
            raise InvalidValue(
                "weights: tensor", name, f"a tensor of the model, such as {min(wanted, default='(none)')}"
            )
        if name not in found:
            if wanted[name].optional:
                continue
            shape = list(wanted[name].shape)
            raise InvalidValue(f"weights: {name}", None, f"present, shape {shape}, dtype {wanted[name].dtype}")
        if found[name].shape != wanted[name].shape:
            raise InvalidValue(f"weights: {name}: shape", list(found[name].shape), str(list(wanted[name].shape)))
        if found[name].dtype != wanted[name].dtype:
            raise InvalidValue(f"weights: {name}: dtype", found[name].dtype, wanted[name].dtype)


def _entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, tuple[int, int]]:
    try:
        dtype, (start, stop) = str(entry["dtype"]), entry["data_offsets"]
        shape = tuple(int(extent) for extent in entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"{file.name}: {name}", str(entry)[:80], "dtype, shape and data_offsets") from error
    if dtype not in DTYPE_BYTES:
        raise InvalidValue(f"{file.name}: {name}: dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    tensor = TensorHeader(name, dtype, shape)
    if min(shape, default=0) < 0 or stop - start != tensor.content_bytes:
        raise InvalidValue(f"{file.name}: {name}: data_offsets", [start, stop], f"{tensor.content_bytes} bytes")
    return tensor, (start, stop)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue("model", str(file), f"a readable file ({error.strerror})") from error
    except ValueError as error:
        raise InvalidValue("model", str(file), f"a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise InvalidValue("model", str(file), "a JSON object")
    return content
