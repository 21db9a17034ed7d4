"""Weights of a new version on their way to the service: as files in shared memory, or uploaded in chunks.

Everything here but :func:`upload` blocks; the trainer's client runs it in a thread.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

from dora.client.connection import Connection
from dora.client.modules import (
    is_module,
    is_sharded,
    plain_name,
    renamed,
    state_of,
    unwrapped,
    whole,
    without_tied_head,
)
from dora.errors import InvalidValue, is_full
from dora.models.checkpoint_names import to_checkpoint
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import WEIGHT_CHUNK_BYTES
from dora.rpc.errors import LimitExceeded
from dora.types import Canary
from dora.weights.canary import compute_canary
from dora.weights.files import WeightFile, check_file_name, examine_file, header_of, published_header, write_weights
from dora.weights.reference import WEIGHTS_FILE, TensorHeader, check_tensors, weight_files

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
]
_CHUNK_OVERHEAD_BYTES: Final = 1024


def place_weights(
    weights: Weights, expected: Sequence[TensorHeader], folder: Path, *, link: bool = False
) -> tuple[WeightFile, ...]:
    """Brings ``weights`` into ``folder`` as safetensors files and returns their identities.

    A module's tensors get their checkpoint names, whatever wraps it; floating point tensors are written in the dtype
    that ``expected`` gives them. Files are copied, or only linked where ``link``. Raises InvalidValue for the first
    tensor that does not fit ``expected`` (where that is not empty) or is not finite, LimitExceeded where ``folder`` has
    no room; nothing is left written then.
    """
    try:
        return _placed(weights, expected, folder, link)
    except OSError as error:
        if not is_full(error):
            raise
        size_bytes = sum(header.content_bytes for header in expected)
        allowed = f"what {folder} has room for ({error.strerror}); repeat it later"
        raise LimitExceeded("weights", f"{size_bytes:,} bytes", allowed) from error


def _placed(weights: Weights, expected: Sequence[TensorHeader], folder: Path, link: bool) -> tuple[WeightFile, ...]:
    if isinstance(weights, str | Path) or _are_paths(weights):
        return _place_files(weight_paths(weights), expected, folder, link)
    wanted = {header.name: header for header in expected}
    tensors = without_tied_head(_checkpoint(weights, wanted), wanted)
    headers = {name: published_header(header_of(name, tensor), wanted.get(name)) for name, tensor in tensors.items()}
    if wanted:
        check_tensors(headers, expected)
    folder.mkdir(parents=True, exist_ok=True)
    return (write_weights(folder / WEIGHTS_FILE, tensors, headers),)


def weight_paths(weights: object) -> tuple[Path, ...]:
    """The safetensors files meant by a file, a folder, or several files. Raises InvalidValue for none."""
    if isinstance(weights, str | Path):
        path = Path(weights)
        paths = tuple(path / name for name in weight_files(path)) if path.is_dir() else (path,)
    else:
        paths = tuple(weights) if isinstance(weights, Sequence) else ()
    if not paths:
        raise InvalidValue("weights", str(weights)[:80], "at least one safetensors file")
    names = [check_file_name(path.name) for path in paths]
    if len(set(names)) < len(names):
        raise InvalidValue("weights", sorted(names), "files of different names")
    return paths


def canary_of(weights: Weights, expected: Sequence[TensorHeader]) -> Canary | None:
    """The canary of a module, as published; None for what cannot be run: tensors by name, files, FSDP1's shards."""
    if not is_module(weights) or is_sharded(weights):
        return None
    module = unwrapped(weights)
    dtypes = {header.name: header.dtype for header in expected}
    config = _config(module)
    published = {}
    for name, parameter in module.named_parameters():
        for checkpoint_name in to_checkpoint({plain_name(name): parameter}, config):
            published[name] = dtypes.get(checkpoint_name, "")
    return compute_canary(module, published)


def files_to_wire(files: Sequence[WeightFile]) -> list[pb.WeightFile]:
    return [pb.WeightFile(name=file.name, file_bytes=file.file_bytes, blake3=file.blake3) for file in files]


async def upload(
    connection: Connection, method: Any, epoch: int, version: int, folder: Path, files: Sequence[WeightFile]
) -> None:
    """Streams ``files`` of ``folder`` to the service. Raises as the connection's calls."""
    chunk_bytes = min(WEIGHT_CHUNK_BYTES, connection.max_message_bytes - _CHUNK_OVERHEAD_BYTES)
    for file in files:
        header = pb.WeightFileHeader(
            trainer_epoch=epoch, version=version, file_name=file.name, file_bytes=file.file_bytes
        )
        await connection.upload(method, _chunks(folder / file.name, header, chunk_bytes))


async def _chunks(file: Path, header: pb.WeightFileHeader, chunk_bytes: int) -> AsyncIterator[pb.WeightChunk]:
    yield pb.WeightChunk(header=header)
    stream = await asyncio.to_thread(file.open, "rb")
    with stream:
        while content := await asyncio.to_thread(stream.read, chunk_bytes):
            yield pb.WeightChunk(content=content)


def _checkpoint(weights: object, wanted: Mapping[str, TensorHeader]) -> Mapping[str, Any]:
    if is_module(weights):
        return to_checkpoint(_whole(state_of(weights)), _config(unwrapped(weights)))
    if isinstance(weights, Mapping) and weights:
        return renamed(_whole(weights), wanted)
    raise InvalidValue(
        "weights",
        type(weights).__name__,
        "a torch module, a mapping of names to torch tensors or numpy arrays, or safetensors files",
    )


def _whole(tensors: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: whole(tensor, name) for name, tensor in tensors.items()}


def _place_files(
    paths: Sequence[Path], expected: Sequence[TensorHeader], folder: Path, link: bool
) -> tuple[WeightFile, ...]:
    found: dict[str, TensorHeader] = {}
    examined = []
    for path in paths:
        identity, tensors = examine_file(path)
        examined.append(identity)
        found |= tensors
    if expected:
        check_tensors(found, expected)
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / path.name for path in paths]
    try:
        for path, target in zip(paths, targets, strict=True):
            target.unlink(missing_ok=True)
            if link:
                target.symlink_to(path.resolve())
            else:
                shutil.copyfile(path, target)
    except OSError:
        for target in targets:
            target.unlink(missing_ok=True)
        raise
    return tuple(examined)


def _are_paths(weights: object) -> bool:
    return isinstance(weights, Sequence) and all(isinstance(each, Path) for each in weights)


def _config(module: Any) -> dict[str, Any]:
    """What ``module.config`` says, whatever it is: a transformers configuration, a mapping, or an object."""
    config = getattr(module, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    return dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
