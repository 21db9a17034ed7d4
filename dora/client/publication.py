"""Transfer of a new version's weights to the service: as files in shared memory, or uploaded in chunks.

All functions but :func:`upload` block. The trainer's client runs them in a thread.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

from dora.client.all_ranks import AllRanks
from dora.client.connection import Connection
from dora.client.deltas import Delta, Uploaded
from dora.client.device_image import Images
from dora.client.modules import (
    config_of,
    is_module,
    is_sharded,
    plain_name,
    renamed,
    state_of,
    unwrapped,
    whole,
    without_tied_head,
)
from dora.client.taking import Spare, Taken, take_files, take_tensors
from dora.data.types import Canary
from dora.errors import InvalidValue, NotFound, is_full
from dora.models.checkpoint_names import to_checkpoint
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import WEIGHT_CHUNK_BYTES
from dora.rpc.errors import LimitExceeded
from dora.weights.canary import compute_canary
from dora.weights.files import WeightFile, check_file_name, header_of, published_header
from dora.weights.reference import HEAD, WEIGHTS_FILE, TensorHeader, check_tensors, read_header, weight_files
from dora.weights.tied_head import check_tied_head

if TYPE_CHECKING:
    import numpy as np
    import torch

Weights: TypeAlias = Union[
    "torch.nn.Module",
    Mapping[str, "torch.Tensor"],
    Mapping[str, "np.ndarray[Any, Any]"],
    str,
    Path,
    Sequence[Path],
    AllRanks,
]
_CHUNK_OVERHEAD_BYTES: Final = 1024


def place_weights(weights: Weights, expected: Sequence[TensorHeader], folder: Path) -> tuple[WeightFile, ...]:
    """Writes ``weights`` to ``folder`` as safetensors files, examines them, and returns their identities.

    Raises as :func:`take_weights`, and InvalidValue for the first tensor that is not finite. After an error no file is
    left.
    """
    taken = take_weights(weights, expected, folder)
    try:
        return taken.examine()
    except InvalidValue:
        taken.remove(folder)
        raise
    finally:
        taken.close()


def take_weights(
    weights: Weights,
    expected: Sequence[TensorHeader],
    folder: Path,
    spare: Spare | None = None,
    images: Images | None = None,
) -> Taken:
    """Copies ``weights`` into ``folder`` as safetensors files. The caller may change them once this returns.

    With ``images``, tensors on a GPU get an image there too.

    A module's tensors get their checkpoint names, whatever wraps it. Floating point tensors are written in the dtypes
    of ``expected``. Raises InvalidValue for the first tensor that does not match ``expected`` (if that is not empty),
    LimitExceeded if ``folder`` has no room. After an error no file is left.
    """
    try:
        if isinstance(weights, str | Path) or _are_paths(weights):
            return _take_files(weight_paths(weights), expected, folder)
        if isinstance(weights, AllRanks):
            return _take_gathered(weights, expected, folder, spare, images)
        tensors, headers = _fitting(weights, expected)
        return take_tensors(tensors.items(), headers, folder, WEIGHTS_FILE, spare, images)
    except OSError as error:
        if not is_full(error):
            raise
        size_bytes = sum(header.content_bytes for header in expected)
        allowed = f"at most the free space of {folder} ({error.strerror}); free some and retry"
        raise LimitExceeded("weights", f"{size_bytes:,} bytes", allowed) from error


def _take_gathered(
    weights: AllRanks, expected: Sequence[TensorHeader], folder: Path, spare: Spare | None, images: Images | None
) -> Taken:
    by_name = {header.name: header for header in expected}
    was_read = False

    def tensors() -> Iterator[tuple[str, Any]]:
        nonlocal was_read
        was_read = True
        yield from weights.gather(headers)

    try:
        headers = weights.headers(by_name)
        if by_name:
            check_tensors(headers, expected)
        return take_tensors(tensors(), headers, folder, WEIGHTS_FILE, spare, images)
    finally:
        if not was_read:
            weights.refuse()


def _fitting(weights: object, expected: Sequence[TensorHeader]) -> tuple[Mapping[str, Any], Mapping[str, TensorHeader]]:
    by_name = {header.name: header for header in expected}
    tensors = without_tied_head(_checkpoint(weights, by_name), by_name)
    headers = _headers(tensors, by_name)
    if by_name:
        check_tensors(headers, expected)
    return tensors, headers


def check_module(module: Any, expected: Sequence[TensorHeader]) -> None:
    """Checks the names, shapes and dtypes of a whole module. Raises InvalidValue as :func:`place_weights`."""
    if expected:
        _fitting(module, expected)


def weight_paths(weights: object) -> tuple[Path, ...]:
    """The safetensors files of a file, a folder, or several files. Raises InvalidValue if there are none."""
    if isinstance(weights, str | Path):
        path = Path(weights)
        if not path.exists() and not path.suffix[1:].isalpha():  # .safetensors or .pt is a file's name
            raise InvalidValue("weights", str(path), "a safetensors file or a folder of them (no such folder)")
        try:
            paths = tuple(path / name for name in weight_files(path)) if path.is_dir() else (path,)
        except InvalidValue as error:  # of the folder, which is no model's here
            raise InvalidValue("weights", str(path), error.allowed) from error
    else:
        paths = tuple(weights) if isinstance(weights, Sequence) else ()
    if not paths:
        raise InvalidValue("weights", str(weights)[:80], "at least one safetensors file")
    names = [check_file_name(path.name) for path in paths]
    if len(set(names)) < len(names):
        raise InvalidValue("weights", sorted(names), "files with different names")
    return paths


def canary_of(weights: Weights, expected: Sequence[TensorHeader]) -> Canary | None:
    """Returns a module's canary as published; None for weights that cannot run: named tensors, files, FSDP1 shards."""
    if not is_module(weights) or is_sharded(weights):
        return None
    module = unwrapped(weights)
    dtypes = {header.name: header.dtype for header in expected}
    config = config_of(module)
    published = {}
    for name, parameter in module.named_parameters():
        for checkpoint_name in to_checkpoint({plain_name(name): parameter}, config):
            published[name] = dtypes.get(checkpoint_name, "")
    return compute_canary(module, published)


def files_to_wire(files: Sequence[WeightFile]) -> list[pb.WeightFile]:
    return [pb.WeightFile(name=file.name, file_bytes=file.file_bytes, blake3=file.blake3) for file in files]


async def upload(
    connection: Connection, method: Any, epoch: int, version: int, taken: Taken, base: Uploaded | None = None
) -> Uploaded:
    """Uploads the copied weights, or their difference from ``base`` if faster. Raises as the connection's calls."""
    chunk_bytes = min(WEIGHT_CHUNK_BYTES, connection.max_message_bytes - _CHUNK_OVERHEAD_BYTES)
    bytes_per_s = base.bytes_per_s if base is not None else math.inf
    for file in taken.identities:
        header = pb.WeightFileHeader(
            trainer_epoch=epoch, version=version, file_name=file.name, file_bytes=file.file_bytes
        )
        delta = await asyncio.to_thread(_delta, taken, base, file, chunk_bytes)
        if delta is not None and await _upload_delta(connection, method, header, delta):
            continue
        began_s = time.monotonic()
        await connection.upload(method, _chunks(taken.paths()[file.name], header, chunk_bytes))
        bytes_per_s = min(bytes_per_s, file.file_bytes / max(time.monotonic() - began_s, 1e-6))
    return Uploaded(version, taken, bytes_per_s)


def _delta(taken: Taken, base: Uploaded | None, file: WeightFile, piece_bytes: int) -> Delta | None:
    """Returns None without a base, or if a full upload of the file is faster."""
    if base is None or base.file(file.name) is None:
        return None
    delta = Delta(taken, base, file, piece_bytes)
    return delta if delta.pays() else None


async def _upload_delta(connection: Connection, method: Any, header: pb.WeightFileHeader, delta: Delta) -> bool:
    """Returns False if the service no longer has the base."""
    base = delta.base.file(delta.file.name)
    assert base is not None
    announced = pb.WeightFileHeader()
    announced.CopyFrom(header)
    announced.base_version, announced.base_blake3 = delta.base.version, base.blake3
    announced.piece_bytes = delta.piece_bytes
    try:
        await connection.upload(method, _pieces(announced, delta))
    except NotFound:
        return False
    return True


async def _pieces(header: pb.WeightFileHeader, delta: Delta) -> AsyncIterator[pb.WeightChunk]:
    yield pb.WeightChunk(header=header)
    pieces = delta.pieces()
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield pb.WeightChunk(content=piece)


async def _chunks(file: Path, header: pb.WeightFileHeader, chunk_bytes: int) -> AsyncIterator[pb.WeightChunk]:
    yield pb.WeightChunk(header=header)
    stream = await asyncio.to_thread(file.open, "rb")
    with stream:
        while content := await asyncio.to_thread(stream.read, chunk_bytes):
            yield pb.WeightChunk(content=content)


def _checkpoint(weights: object, by_name: Mapping[str, TensorHeader]) -> Mapping[str, Any]:
    if is_module(weights):
        tie = {"tie_word_embeddings": False} if by_name else {}  # the model decides which head is left out
        return to_checkpoint(_whole(state_of(weights)), {**config_of(unwrapped(weights)), **tie})
    if isinstance(weights, Mapping) and weights:
        return renamed(_whole(weights), by_name)
    raise InvalidValue(
        "weights",
        type(weights).__name__,
        "a torch module, a mapping of names to torch tensors or numpy arrays, or safetensors files",
    )


def _headers(tensors: Mapping[str, Any], by_name: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    return {name: published_header(header_of(name, tensor), by_name.get(name)) for name, tensor in tensors.items()}


def _whole(tensors: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: whole(tensor, name) for name, tensor in tensors.items()}


def _take_files(paths: Sequence[Path], expected: Sequence[TensorHeader], folder: Path) -> Taken:
    found: dict[str, TensorHeader] = {}
    for path in paths:
        found |= read_header(path)
    without = ""
    if expected:
        check_tensors(found, expected)
        without = HEAD if check_tied_head(paths, expected) else ""
    return take_files(paths, folder, without)


def _are_paths(weights: object) -> bool:
    return isinstance(weights, Sequence) and all(isinstance(each, Path) for each in weights)
