"""The manifest of a version: its files, down to the checksum of each chunk. It is sent before the weights.

A version is named by its number and its manifest's digest (``name``); orders and relays use this name, never a path. A
version published again has another digest. The digest covers every byte of the weights through the chunks' checksums.
It covers neither the canary, which may become known later, nor the base, which is a hint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from blake3 import blake3

from dora.data.strict_json import read_json
from dora.data.types import Canary
from dora.errors import InvalidValue
from dora.weights.files import CHUNK_BYTES, SUM_BYTES, Examined, check_file_name
from dora.weights.reference import DTYPE_BYTES, TensorHeader

DIGEST_CHARACTERS: Final = 32  # of a manifest's digest: 128 bits in hexadecimal
MANIFEST_BYTES_MAX: Final = 256 << 20  # in JSON, enough for 30 TB of weights
_FORMAT: Final = 1
_BLAKE3_BYTES: Final = 32
_FILES_MAX: Final = 1 << 20
_BYTES_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One safetensors file of a version. ``sums``: the checksum of each chunk, in order."""

    name: str  # plain, ending in .safetensors
    file_bytes: int
    blake3: bytes  # of the whole file; 32 bytes
    sums: tuple[bytes, ...]

    @property
    def chunks(self) -> int:
        return len(self.sums)

    def chunk(self, index: int) -> tuple[int, int]:
        """Offset and length of a chunk in bytes. Raises InvalidValue if there is no such chunk."""
        if not 0 <= index < len(self.sums):
            raise InvalidValue(f"{self.name}: chunk", index, f"0 to {len(self.sums) - 1}")
        offset = index * CHUNK_BYTES
        return offset, min(CHUNK_BYTES, self.file_bytes - offset)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor and its location: ``offset`` bytes from the beginning of ``file``."""

    header: TensorHeader
    file: str
    offset: int


@dataclass(frozen=True)
class Manifest:
    """A complete version. ``base``: the name of an earlier version with which it shares most chunks, if known."""

    version: int
    files: tuple[ManifestFile, ...]  # by name
    tensors: tuple[PlacedTensor, ...]  # by name
    canary: Canary | None = None
    base: str = ""

    @cached_property
    def digest(self) -> str:
        """The digest of the weights' bytes and this version's number: 32 hexadecimal characters."""
        found = blake3(f"dora-manifest {_FORMAT} {self.version} {CHUNK_BYTES}".encode())
        for file in self.files:
            found.update(f"\n{len(file.name)} {file.name} {file.file_bytes}\n".encode())
            found.update(file.blake3)
            found.update(b"".join(file.sums))
        return found.hexdigest()[:DIGEST_CHARACTERS]

    @property
    def name(self) -> str:
        """E.g. ``v17-3f2a...``, used in orders and by relays."""
        return version_name(self.version, self.digest)

    @property
    def total_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)

    def file(self, name: str) -> ManifestFile:
        """Raises InvalidValue for a file that is not of this version."""
        for file in self.files:
            if file.name == name:
                return file
        raise InvalidValue(f"{self.name}: file", name, f"one of {', '.join(file.name for file in self.files)}")

    def with_canary(self, canary: Canary | None) -> "Manifest":
        """The same weights, and so the same name, with this canary."""
        return replace(self, canary=canary)

    def changed_chunks(self, base: "Manifest") -> Iterator[tuple[str, int]]:
        """File and index of each chunk that differs from ``base`` at the same offset."""
        known = {file.name: file for file in base.files}
        for file in self.files:
            other = known.get(file.name)
            sums = other.sums if other is not None else ()
            for index, own in enumerate(file.sums):
                if index >= len(sums) or sums[index] != own:
                    yield file.name, index

    def to_json(self) -> str:
        canary = None if self.canary is None else [list(self.canary.token_ids), list(self.canary.logprobs)]
        tree = {
            "format": _FORMAT,
            "version": self.version,
            "chunk_bytes": CHUNK_BYTES,
            "digest": self.digest,
            "base": self.base,
            "canary": canary,
            "files": [
                {
                    "name": file.name,
                    "file_bytes": file.file_bytes,
                    "blake3": file.blake3.hex(),
                    "sums": b"".join(file.sums).hex(),
                }
                for file in self.files
            ],
            "tensors": [
                [each.header.name, each.header.dtype, list(each.header.shape), each.file, each.offset]
                for each in self.tensors
            ],
        }
        return json.dumps(tree, separators=(",", ":"))


def version_name(version: int, digest: str) -> str:
    return f"v{version}-{digest}"


def parsed_name(name: str) -> tuple[int, str]:
    """Version and digest of a manifest's name. Raises InvalidValue for other text."""
    number, _, digest = name.removeprefix("v").partition("-")
    plain = name.startswith("v") and number.isascii() and number.isdigit() and len(number) < 20
    if not plain or len(digest) != DIGEST_CHARACTERS or not set(digest) <= set("0123456789abcdef"):
        raise InvalidValue("version's name", name, f"v, a number, -, and {DIGEST_CHARACTERS} hexadecimal characters")
    return int(number), digest


def manifest_of(version: int, files: Iterable[Examined], canary: Canary | None = None, base: str = "") -> Manifest:
    """The manifest of examined files."""
    made, placed = [], []
    for file in files:
        identity, offset = file.identity, file.tensors_at
        made.append(ManifestFile(identity.name, identity.file_bytes, identity.blake3, file.sums))
        for header in file.tensors:
            placed.append(PlacedTensor(header, identity.name, offset))
            offset += header.content_bytes
    return Manifest(
        version,
        tuple(sorted(made, key=lambda file: file.name)),
        tuple(sorted(placed, key=lambda each: each.header.name)),
        canary,
        base,
    )


def read_manifest(text: str) -> Manifest:
    """Parses the output of :meth:`Manifest.to_json`. Raises InvalidValue for anything else, naming the fault."""
    tree = read_json(text, "manifest", MANIFEST_BYTES_MAX)
    if not isinstance(tree, dict):
        raise InvalidValue("manifest", text[:80], "a JSON object")
    if tree.get("format") != _FORMAT or tree.get("chunk_bytes") != CHUNK_BYTES:
        found = {key: tree.get(key) for key in ("format", "chunk_bytes")}
        raise InvalidValue("manifest: format", found, f"{_FORMAT}, chunks of {CHUNK_BYTES} bytes: use the same DORA")
    files = tuple(_file(each) for each in _list(tree, "files"))
    if not files or len(files) > _FILES_MAX or [file.name for file in files] != sorted({file.name for file in files}):
        raise InvalidValue(
            "manifest: files", [file.name for file in files][:20], "at least one file, by name, without duplicates"
        )
    sizes = {file.name: file.file_bytes for file in files}
    tensors = tuple(_placed(each, sizes) for each in _list(tree, "tensors"))
    base = tree.get("base", "")
    if base:
        parsed_name(_text(base, "base"))
    manifest = Manifest(_count(tree.get("version"), "version"), files, tensors, _canary(tree.get("canary")), base)
    if tree.get("digest") != manifest.digest:
        raise InvalidValue("manifest: digest", tree.get("digest"), f"{manifest.digest}, the digest of its files")
    return manifest


def _file(entry: Any) -> ManifestFile:
    if not isinstance(entry, dict):
        raise InvalidValue("manifest: file", entry, "an object")
    name = check_file_name(_text(entry.get("name"), "name"))
    file_bytes = _count(entry.get("file_bytes"), f"{name}: file_bytes")
    digest, sums = _bytes(entry.get("blake3"), f"{name}: blake3"), _bytes(entry.get("sums"), f"{name}: sums")
    chunks = -(-file_bytes // CHUNK_BYTES)
    if not file_bytes or len(digest) != _BLAKE3_BYTES or len(sums) != chunks * SUM_BYTES:
        found = f"{file_bytes} bytes, {len(digest)} of blake3, {len(sums)} of sums"
        raise InvalidValue(
            f"manifest: {name}", found, f"1 byte or more, {_BLAKE3_BYTES}, and {SUM_BYTES} for each chunk"
        )
    return ManifestFile(
        name, file_bytes, digest, tuple(sums[at : at + SUM_BYTES] for at in range(0, len(sums), SUM_BYTES))
    )


def _placed(entry: Any, sizes: Mapping[str, int]) -> PlacedTensor:
    if not isinstance(entry, list) or len(entry) != 5:
        raise InvalidValue("manifest: tensor", entry, "a list of name, dtype, shape, file and offset")
    name, dtype, shape, file, offset = entry
    if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidValue("manifest: tensor", entry, f"of one of the dtypes {', '.join(DTYPE_BYTES)}, with a shape")
    shown = _text(name, "tensor")
    header = TensorHeader(shown, dtype, tuple(_count(extent, f"{shown}: shape") for extent in shape))
    placed = PlacedTensor(header, _text(file, f"{shown}: file"), _count(offset, f"{shown}: offset"))
    if placed.offset + header.content_bytes > sizes.get(placed.file, 0):
        raise InvalidValue(f"manifest: {shown}", entry, "within a file of the version")
    return placed


def _canary(entry: Any) -> Canary | None:
    if entry is None:
        return None
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, list) for part in entry):
        raise InvalidValue("manifest: canary", entry, "a list of token ids and a list of logprobs")
    token_ids, logprobs = entry
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in logprobs):
        raise InvalidValue("manifest: canary", logprobs, "a list of numbers")
    return Canary(tuple(_count(each, "canary") for each in token_ids), tuple(float(each) for each in logprobs))


def _list(tree: Mapping[str, Any], key: str) -> list[Any]:
    found = tree.get(key)
    if not isinstance(found, list):
        raise InvalidValue(f"manifest: {key}", found, "a list")
    return found


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"manifest: {field}", value, "a text")
    return value


def _count(value: Any, field: str) -> int:
    if type(value) is not int or not 0 <= value < _BYTES_MAX:
        raise InvalidValue(f"manifest: {field}", value, "an integer of 0 or more")
    return value


def _bytes(value: Any, field: str) -> bytes:
    try:
        return bytes.fromhex(_text(value, field))
    except ValueError as error:
        raise InvalidValue(f"manifest: {field}", str(value)[:80], "in hexadecimal") from error
