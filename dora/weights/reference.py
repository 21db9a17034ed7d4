"""Tensor names and shapes of a model, read from safetensors headers without torch and without loading tensors.

Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the tensors' bytes.
Source: the safetensors format specification.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import MISSING, InvalidValue
from dora.models.text_part import text_part
from dora.weights.derived import is_derived, is_skipped

# Bytes of one element, by safetensors' name of the dtype.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
_NAME_CHARACTERS_MAX: Final = 1000
_DIMENSIONS_MAX: Final = 64
_ELEMENTS_MAX: Final = 1 << 63
HEAD: Final = "lm_head.weight"  # the output layer, which may be tied to the embedding
_EMBEDDING: Final = "embed_tokens.weight"  # the end of its name


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint. If ``optional``, it may be omitted, such as a head that is tied to the embedding."""

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
    """A Hugging Face model folder, the template for every published version."""

    folder: Path
    files: tuple[str, ...]  # its safetensors files
    tensors: tuple[TensorHeader, ...]  # sorted by name
    vocab_size: int

    @property
    def content_bytes(self) -> int:
        return sum(tensor.content_bytes for tensor in self.tensors)


def read_reference(folder: Path) -> Reference:
    """The tensors of a Hugging Face folder, sharded or not. Raises InvalidValue if it is not one."""
    files = weight_files(folder)
    config = json_object(folder / "config.json", "model")
    tied = bool(is_tied(config))
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, tensor in read_header(folder / file).items():
            optional = (tied and name == HEAD) or is_derived(name, tensor.shape) or is_skipped(name, config)
            tensors[name] = TensorHeader(name, tensor.dtype, tensor.shape, optional)
    vocab_size = config.get("vocab_size", text_part(config).get("vocab_size", 0))
    return Reference(folder, files, tuple(tensors[name] for name in sorted(tensors)), int(vocab_size))


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Returns whether a model's config.json ties its head to the embedding, or None if it does not say."""
    said = config.get("tie_word_embeddings", text_part(config).get("tie_word_embeddings"))
    return None if said is None else bool(said)


def embedding_of_tied(expected: Mapping[str, TensorHeader]) -> str | None:
    """Returns the name of the embedding to which a model's head is tied, or None if its head has weights of its own."""
    if HEAD in expected and not expected[HEAD].optional:
        return None
    return min((name for name in expected if f".{name}".endswith(f".{_EMBEDDING}")), key=len, default=None)


def weight_files(folder: Path) -> tuple[str, ...]:
    """Returns the safetensors files that a loader reads: those of the folder's index, else the usual one, else all."""
    if (folder / INDEX_FILE).is_file():
        weight_map = json_object(folder / INDEX_FILE, "model").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidValue(f"{INDEX_FILE}: weight_map", weight_map, "an object of file names")
        return tuple(sorted(set(weight_map.values())))
    if (folder / WEIGHTS_FILE).is_file():
        return (WEIGHTS_FILE,)
    files = tuple(sorted(file.name for file in folder.glob("*.safetensors")))
    if not files:
        raise InvalidValue("model", str(folder), "a folder with safetensors files")
    return files


def open_regular(file: Path) -> BufferedReader:
    """Opens a file for reading. Raises InvalidValue for a pipe, a device or a folder, which might never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidValue("weights file", str(file), "a regular file")
    return os.fdopen(descriptor, "rb")


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, by name. Raises InvalidValue unless the file is complete and valid."""
    return {tensor.name: tensor for tensor in read_layout(file)[1]}


def read_layout(file: Path, header_bytes_max: int = HEADER_BYTES_MAX) -> tuple[int, tuple[TensorHeader, ...]]:
    """The offset of a safetensors file's tensors in bytes, and the tensors in file order, without gaps.

    Raises InvalidValue for any file that the safetensors library would refuse, and for a header over
    ``header_bytes_max``.
    """
    try:
        with open_regular(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            most_bytes = min(header_bytes_max, max(0, file_bytes - 8))
            if length > most_bytes:
                raise InvalidValue(f"{file.name}: header bytes", length, f"at most {most_bytes} in this file")
            text = stream.read(length)
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error
    return 8 + length, _placed(file.name, text, file_bytes - 8 - length)


def layout_of(content: memoryview) -> tuple[int, tuple[TensorHeader, ...]]:
    """Returns what ``read_layout`` does, from a valid file's bytes."""
    length = int.from_bytes(content[:8], "little")
    return 8 + length, _placed("weights", bytes(content[8 : 8 + length]), len(content) - 8 - length)


def _placed(name: str, text: bytes, tensor_bytes: int) -> tuple[TensorHeader, ...]:
    header = _header(name, text)
    _check_metadata(name, header.pop("__metadata__", {}))
    placed = sorted((_entry(name, tensor, entry) for tensor, entry in header.items()), key=lambda each: each[1:])
    end = 0
    for tensor, start, stop in placed:
        if start != end:
            raise InvalidValue(f"{name}: {tensor.name}: data_offsets", [start, stop], f"contiguous, from {end} on")
        end = stop
    if end != tensor_bytes:
        raise InvalidValue(f"{name}: bytes of tensors", tensor_bytes, f"{end}, the number in its header")
    return tuple(tensor for tensor, _, _ in placed)


def check_tensors(found: Mapping[str, TensorHeader], expected: Iterable[TensorHeader]) -> None:
    """Raises InvalidValue for the first tensor (by name) with a wrong shape or dtype, or that is unknown or missing.

    Tensors that the configuration determines (``is_derived``) and a tied head may be there or not.
    """
    required = {tensor.name: tensor for tensor in expected}
    if (embedding := embedding_of_tied(required)) is not None:
        required[HEAD] = replace(required[embedding], name=HEAD, optional=True)
    for name in sorted(found.keys() | required.keys()):
        if is_derived(name, found[name].shape if name in found else required[name].shape) and (
            name not in required or name not in found or is_derived(name, required[name].shape)
        ):
            continue
        if name not in required:
            raise InvalidValue(
                "weights: tensor", name, f"a tensor of the model, such as {min(required, default='(none)')}"
            )
        if name not in found:
            if required[name].optional:
                continue
            shape = list(required[name].shape)
            raise InvalidValue(f"weights: {name}", MISSING, f"present, shape {shape}, dtype {required[name].dtype}")
        if found[name].shape != required[name].shape:
            raise InvalidValue(f"weights: {name}: shape", list(found[name].shape), str(list(required[name].shape)))
        if found[name].dtype != required[name].dtype:
            raise InvalidValue(f"weights: {name}: dtype", found[name].dtype, required[name].dtype)


def _header(file_name: str, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"the key {name!r} occurs twice")
            found[name] = value
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidValue(f"{file_name}: header", text[:80], f"in safetensors format ({reason})") from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise InvalidValue(f"{file_name}: header", text[:80], "in safetensors format (a JSON object)")
    return header


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _check_metadata(file_name: str, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidValue(f"{file_name}: __metadata__", metadata, "an object of strings")


def _entry(file_name: str, name: str, entry: Any) -> tuple[TensorHeader, int, int]:
    if not name.isprintable() or len(name) > _NAME_CHARACTERS_MAX:
        raise InvalidValue(
            f"{file_name}: tensor", name, f"a printable name of at most {_NAME_CHARACTERS_MAX} characters"
        )
    place = f"{file_name}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InvalidValue(place, entry, "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidValue(f"{place}: dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    if not _are_counts(shape) or len(shape) > _DIMENSIONS_MAX:
        raise InvalidValue(f"{place}: shape", shape, f"at most {_DIMENSIONS_MAX} integers of 0 or more")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise InvalidValue(f"{place}: data_offsets", offsets, "two integers of 0 or more")
    tensor = TensorHeader(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != tensor.content_bytes:
        raise InvalidValue(f"{place}: data_offsets", offsets, f"{tensor.content_bytes} bytes apart, by dtype and shape")
    return tensor, offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _ELEMENTS_MAX for value in values)
