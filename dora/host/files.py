"""The model's files, which a host fetches from the service and verifies."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

from blake3 import blake3

from dora.errors import InvalidValue
from dora.weights.files import WeightFile, hash_file
from dora.weights.reference import INDEX_FILE, Reference

FILE_CHUNK_BYTES: Final = 1 << 20
_NAME_MAX: Final = 200

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".index.json")

Fetch = Callable[[str], AsyncIterator[bytes]]  # the content of a file, by its name


def model_files(reference: Reference) -> tuple[WeightFile, ...]:
    """Returns the model's files that a host needs, weights included. Reads every byte of them."""
    weights = {*reference.files, INDEX_FILE}
    names = sorted(
        file.name
        for file in reference.folder.iterdir()
        if file.is_file()
        and (file.name in weights or (not file.name.startswith(".") and not file.name.endswith(_WEIGHTS)))
    )
    return tuple(hash_file(reference.folder / name) for name in names)


def digest_of(files: Iterable[WeightFile]) -> str:
    """Returns a digest of names and checksums: equal for models that are equal byte for byte."""
    found = blake3(b"dora-files")
    for file in sorted(files, key=lambda file: file.name):
        found.update(f"\n{len(file.name)} {file.name} {file.file_bytes}\n".encode() + file.blake3)
    return found.hexdigest()[:32]


def check_plain(name: str) -> str:
    """Returns ``name``. Raises InvalidValue if its path would leave the folder."""
    plain = name.isprintable() and 0 < len(name.encode()) <= _NAME_MAX and not name.startswith(".")
    if not plain or "/" in name or "\\" in name:
        raise InvalidValue("file name", name, "a plain name, without a folder")
    return name


def keep_only(folder: Path, files: Iterable[WeightFile]) -> None:
    """Removes all other files from ``folder``: another model's, or incomplete ones. Raises OSError."""
    names = {file.name for file in files}
    for entry in folder.iterdir():
        if entry.name not in names:
            entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)


def _is_whole(target: Path, file: WeightFile) -> bool:
    try:
        return target.is_file() and hash_file(target) == file
    except InvalidValue:  # unreadable
        return False


async def bring(folder: Path, files: Iterable[WeightFile], fetch: Fetch) -> None:
    """Fetches ``files`` into ``folder``, except those that are already complete there. Raises InvalidValue if one
    differs from its announcement, OSError if one cannot be written.
    """
    for file in files:
        target = folder / check_plain(file.name)
        if await asyncio.to_thread(_is_whole, target, file):
            continue
        unfinished = folder / f".{file.name}"
        digest, size_bytes = blake3(), 0
        with unfinished.open("wb") as written:
            async for content in fetch(file.name):
                size_bytes += len(content)
                if size_bytes > file.file_bytes:
                    break
                digest.update(content)
                await asyncio.to_thread(written.write, content)
        if size_bytes != file.file_bytes or digest.digest() != file.blake3:
            unfinished.unlink()
            raise InvalidValue(file.name, f"{size_bytes} bytes", f"{file.file_bytes} bytes of its checksum")
        os.replace(unfinished, target)
