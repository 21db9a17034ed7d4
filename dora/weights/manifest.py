"""The manifest of a version: its files, down to the checksum of each chunk. It is sent before the weights.

A version is named by its number and its manifest's digest (``name``); orders and relays use this name, never a path. A
version published again has another digest. The digest covers every byte of the weights through the chunks' checksums.
It does not cover the canary, which may become known later.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final, Literal

from annotated_types import Ge, Lt, MaxLen, MinLen
from blake3 import blake3
from pydantic import AfterValidator, BaseModel, BeforeValidator, Strict, ValidationError

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
    """One safetensors file of a version. ``sums`` has the checksum of each chunk, in order."""

    name: str  # plain, ending in .safetensors
    file_bytes: int
    blake3: bytes  # of the whole file; 32 bytes
    sums: tuple[bytes, ...]

    @property
    def chunks(self) -> int:
        return len(self.sums)

    def chunk(self, index: int) -> tuple[int, int]:
        """Returns offset and length of a chunk in bytes. Raises InvalidValue if there is no such chunk."""
        if not 0 <= index < len(self.sums):
            raise InvalidValue(f"{self.name}: chunk", index, f"0 to {len(self.sums) - 1}")
        offset = index * CHUNK_BYTES
        return offset, min(CHUNK_BYTES, self.file_bytes - offset)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor and its location, ``offset`` bytes from the beginning of ``file``."""

    header: TensorHeader
    file: str
    offset: int


@dataclass(frozen=True)
class Manifest:
    """A complete version."""

    version: int
    files: tuple[ManifestFile, ...]  # by name
    tensors: tuple[PlacedTensor, ...]  # by name
    canary: Canary | None = None

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
        """The name in orders and relays, e.g. ``v17-3f2a...``."""
        return version_name(self.version, self.digest)

    @property
    def total_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)

    def file(self, name: str) -> ManifestFile:
        """Returns a file. Raises InvalidValue for one that is not of this version."""
        for file in self.files:
            if file.name == name:
                return file
        raise InvalidValue(f"{self.name}: file", name, f"one of {', '.join(file.name for file in self.files)}")

    def is_laid_out_as(self, other: "Manifest") -> bool:
        """Returns whether the files have the same sizes, and all tensors the same places in them."""
        sizes, others = ({file.name: file.file_bytes for file in each.files} for each in (self, other))
        return sizes == others and self.tensors == other.tensors

    def with_canary(self, canary: Canary | None) -> "Manifest":
        """Returns the same weights, and so the same name, with this canary."""
        return replace(self, canary=canary)

    def changed_chunks(self, base: "Manifest") -> Iterator[tuple[str, int]]:
        """Yields file and index of each chunk that differs from ``base`` at the same offset."""
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
    """Returns version and digest of a manifest's name. Raises InvalidValue for other text."""
    number, _, digest = name.removeprefix("v").partition("-")
    plain = name.startswith("v") and number.isascii() and number.isdigit() and len(number) < 20
    if not plain or len(digest) != DIGEST_CHARACTERS or not set(digest) <= set("0123456789abcdef"):
        raise InvalidValue("version's name", name, f"v, a number, -, and {DIGEST_CHARACTERS} hexadecimal characters")
    return int(number), digest


def manifest_of(version: int, files: Iterable[Examined], canary: Canary | None = None) -> Manifest:
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
    )


_Whole = Annotated[int, Strict(), Ge(0), Lt(_BYTES_MAX)]
_Text = Annotated[str, Strict()]
_Hex = Annotated[bytes, BeforeValidator(lambda value: bytes.fromhex(value if isinstance(value, str) else "no text"))]


class _File(BaseModel):
    name: Annotated[_Text, AfterValidator(check_file_name)]
    file_bytes: _Whole
    blake3: _Hex
    sums: _Hex

    def checked(self) -> ManifestFile:
        whole, digest = -(-self.file_bytes // CHUNK_BYTES) * SUM_BYTES, len(self.blake3)
        if not self.file_bytes or digest != _BLAKE3_BYTES or len(self.sums) != whole:
            found = f"{self.file_bytes} bytes, {digest} of blake3, {len(self.sums)} of sums"
            allowed = f"1 byte or more, {_BLAKE3_BYTES}, and {SUM_BYTES} for each chunk"
            raise InvalidValue(f"manifest: {self.name}", found, allowed)
        sums = tuple(self.sums[at : at + SUM_BYTES] for at in range(0, whole, SUM_BYTES))
        return ManifestFile(self.name, self.file_bytes, self.blake3, sums)


class _Tree(BaseModel):
    version: _Whole
    digest: _Text
    canary: tuple[list[_Whole], list[Annotated[float, Strict()]]] | None = None
    files: Annotated[list[_File], MinLen(1), MaxLen(_FILES_MAX)]
    tensors: list[tuple[_Text, Literal[tuple(DTYPE_BYTES)], list[_Whole], _Text, _Whole]]  # type: ignore[valid-type]


def read_manifest(text: str) -> Manifest:
    """Parses the output of :meth:`Manifest.to_json`. Raises InvalidValue for anything else, naming the fault."""
    tree = read_json(text, "manifest", MANIFEST_BYTES_MAX)
    if not isinstance(tree, dict):
        raise InvalidValue("manifest", text[:80], "a JSON object")
    if tree.get("format") != _FORMAT or tree.get("chunk_bytes") != CHUNK_BYTES:
        found = {key: tree.get(key) for key in ("format", "chunk_bytes")}
        raise InvalidValue("manifest: format", found, f"{_FORMAT}, chunks of {CHUNK_BYTES} bytes: use the same DORA")
    try:
        read = _Tree.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidValue(f"manifest: {field}", str(first["input"])[:80], f"valid ({first['msg']})") from error
    files = tuple(each.checked() for each in read.files)
    if [file.name for file in files] != sorted({file.name for file in files}):
        raise InvalidValue("manifest: files", [file.name for file in files][:20], "by name, without duplicates")
    sizes = {file.name: file.file_bytes for file in files}
    tensors = tuple(_placed(each, sizes) for each in read.tensors)
    canary = None if read.canary is None else Canary(tuple(read.canary[0]), tuple(read.canary[1]))
    manifest = Manifest(read.version, files, tensors, canary)
    if read.digest != manifest.digest:
        raise InvalidValue("manifest: digest", read.digest, f"{manifest.digest}, the digest of its files")
    return manifest


def _placed(entry: tuple[str, str, list[int], str, int], sizes: Mapping[str, int]) -> PlacedTensor:
    name, dtype, shape, file, offset = entry
    placed = PlacedTensor(TensorHeader(name, dtype, tuple(shape)), file, offset)
    if placed.offset + placed.header.content_bytes > sizes.get(placed.file, 0):
        raise InvalidValue(f"manifest: {name}", entry, "within a file of the version")
    return placed
