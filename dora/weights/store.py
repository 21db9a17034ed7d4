"""The weight store: every live version on the service's host, in a folder that should lie in memory (tmpfs).

    FOLDER/proof                            random bytes: a trainer that can read them shares this host
    FOLDER/incoming/<epoch>-<version>/      files being written by a trainer, or uploaded; one being uploaded is hidden
    FOLDER/versions/<version>/              published: a loadable Hugging Face folder, complete or absent

Synchronous and not for concurrent calls about one version, but for uploads; the shell calls it in a thread.
"""

import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora.errors import Conflict, InvalidValue, NotFound
from dora.types import Canary
from dora.weights.canary import check_canary
from dora.weights.files import SUFFIX, WeightFile, check_file_name, examine_file
from dora.weights.reference import (
    INDEX_FILE,
    WEIGHTS_FILE,
    Reference,
    TensorHeader,
    check_tensors,
    read_reference,
)
from dora.weights.upload import Upload

log = logging.getLogger("dora.weights")

MANIFEST_FILE: Final = "dora-manifest.json"
CANARY_FILE: Final = "dora-canary.json"
_METADATA_BYTES: Final = 1 << 20  # what all safetensors headers of a version may hold beside the tensors' entries
_ENTRY_BYTES: Final = 1 << 10  # of one tensor in a header
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


class WeightStore:
    """Keeps what every live version is made of. See the module's docstring for the layout."""

    def __init__(self, folder: Path, reference: Path) -> None:
        """Opens or makes the store; version 0 is the model folder ``reference``, linked, not copied.

        Versions that an earlier process published are kept. Raises InvalidValue where ``reference`` is no model.
        """
        self.root = folder
        self.reference: Reference = read_reference(reference)
        self.proof = folder / "proof"
        self._incoming = folder / "incoming"
        self._versions = folder / "versions"
        for made in (self._incoming, self._versions):
            made.mkdir(parents=True, exist_ok=True)
        for unfinished in (*self._versions.glob(".*"), *self._incoming.iterdir()):
            shutil.rmtree(unfinished)
        self._uploading: dict[Path, int] = {}  # files on their way in, with their announced bytes
        self._uploads = threading.Lock()
        self._canaries: dict[int, Canary] = {}  # what the first workers have reproduced
        self.proof_bytes = secrets.token_bytes(32)
        self.proof.write_bytes(self.proof_bytes)
        if not (self._versions / "0").is_dir():
            self._link_reference()

    def versions(self) -> tuple[int, ...]:
        """The versions that are held, ascending."""
        return tuple(sorted(int(entry.name) for entry in self._versions.iterdir() if entry.name.isdigit()))

    def folder(self, version: int) -> Path:
        """A loadable Hugging Face folder. Raises NotFound for a version that is not held."""
        folder = self._versions / str(version)
        if not folder.is_dir():
            held = ", ".join(map(str, self.versions()))
            raise NotFound("version", version, f"one of those held: {held or '(none)'}", why="is not held")
        return folder

    def canary(self, version: int) -> Canary | None:
        """The canary published with ``version``; None where there was none. Raises NotFound."""
        kept = self._canaries.get(version)
        if kept is not None:
            return kept
        file = self.folder(version) / CANARY_FILE
        if not file.is_file():
            return None
        stored = json.loads(file.read_text())
        return Canary(tuple(stored["token_ids"]), tuple(stored["logprobs"]))

    def keep_canary(self, version: int, canary: Canary) -> None:
        """Remembers the canary of a version that came without, as its first worker reproduced it. Raises NotFound.

        Where it cannot be written (OSError) this process remembers it all the same.
        """
        folder = self.folder(version)
        self._canaries[version] = canary
        _write_canary(folder, canary)

    def begin(self, epoch: int, version: int) -> Path:
        """The folder in which this trainer's files of ``version`` belong; made where it is absent."""
        folder = self._incoming_folder(epoch, version)
        folder.mkdir(exist_ok=True)
        return folder

    def upload(self, epoch: int, version: int, file_name: str, file_bytes: int) -> Upload:
        """Opens one incoming file; once it is whole, an earlier one of the same name is replaced.

        Raises InvalidValue for a name that is not plain, or where the files, those on their way included, would
        outgrow the model; Conflict where a file of this name is on its way.
        """
        check_file_name(file_name)
        with self._uploads:
            folder = self.begin(epoch, version)
            file = folder / file_name
            if file in self._uploading:
                raise Conflict("file_name", file_name, "a file that is not in upload", why="is being uploaded already")
            sizes = {held: held.stat().st_size for held in folder.glob(f"[!.]*{SUFFIX}")}
            sizes |= {held: size for held, size in self._uploading.items() if held.parent == folder}
            sizes.pop(file, None)
            room_bytes = self.reference.content_bytes + self._header_bytes_max - sum(sizes.values())
            if not 0 < file_bytes <= room_bytes:
                raise InvalidValue("file_bytes", file_bytes, f"1 to {room_bytes}, by the model's own size")
            if len(sizes) >= self._files_max:
                raise InvalidValue(
                    "file_name", file_name, f"one of at most {self._files_max} files, as the model's tensors"
                )
            upload = Upload(file, file_bytes, self._upload_ended)
            self._uploading[file] = file_bytes
        return upload

    def _upload_ended(self, file: Path) -> None:
        with self._uploads:
            del self._uploading[file]

    def publish(
        self, epoch: int, version: int, files: Sequence[WeightFile], canary: Canary | None, *, anew: bool = False
    ) -> Path:
        """Verifies the incoming files and makes them ``version``, in one rename; returns its folder.

        Repeating it with the same files changes nothing. ``anew``: they take the place of what is held of it; whoever
        looks sees one or the other whole, or none for a moment. Raises Conflict where ``version`` is held with other
        files, InvalidValue for a missing, damaged or incomplete file, or the first tensor that does not fit the model.
        Where something cannot be written (OSError) nothing new is left, and the files have to be brought again.
        """
        self._check_announced(files)
        if canary is not None:
            check_canary(canary, self.reference.vocab_size)
        manifest = _manifest(files)
        target = self._versions / str(version)
        if target.is_dir() and not anew:
            if _read_manifest(target) != manifest:
                raise Conflict("version", version, "a new version", why="is published already, with other files")
            self._forget_incoming(version)
            return target
        incoming = self._incoming_folder(epoch, version)
        tensors = self._verified(incoming, files)
        unfinished = self._versions / f".{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        replaced = self._versions / f".{version}.replaced"
        try:
            unfinished.mkdir()
            for file in files:
                os.rename(incoming / file.name, unfinished / file.name)
            self._complete(unfinished, tensors, manifest, canary)
            if target.is_dir():
                os.rename(target, replaced)
            os.rename(unfinished, target)
        except OSError:
            for half in (unfinished, incoming):
                shutil.rmtree(half, ignore_errors=True)
            if replaced.is_dir():
                os.rename(replaced, target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        self._canaries.pop(version, None)
        self._forget_incoming(version)
        return target

    def take_back(self, epoch: int, version: int) -> None:
        """A version that was published is not committed after all: its files are as before, for the commit to be
        repeated. Where that is not possible they have to be brought again."""
        held = self._versions / str(version)
        try:
            names = [file["name"] for file in _read_manifest(held)]
            incoming = self.begin(epoch, version)
            for name in names:
                os.rename(held / name, incoming / name)
        except OSError:
            log.warning("the files of version %d have to be brought again", version, exc_info=True)
        self.retire(version)

    def retire(self, version: int) -> None:
        """Frees a version that left the window, or that no step committed. An unknown one is ignored."""
        held = self._versions / str(version)
        self._canaries.pop(version, None)
        if held.is_dir():
            gone = self._versions / f".{version}"
            os.rename(held, gone)  # a reader sees the whole folder or none
            shutil.rmtree(gone)

    def discard(self, epoch: int) -> None:
        """Frees what the trainers up to ``epoch`` had begun to write: they are fenced."""
        for entry in self._incoming.iterdir():
            if int(entry.name.partition("-")[0]) <= epoch:
                shutil.rmtree(entry, ignore_errors=True)  # its writer may still be at it

    def _forget_incoming(self, version: int) -> None:
        """Frees what was written for a version that is published, by whichever trainer, and for those before."""
        for entry in self._incoming.iterdir():
            if int(entry.name.partition("-")[2]) <= version:
                shutil.rmtree(entry, ignore_errors=True)

    @property
    def _header_bytes_max(self) -> int:
        """Of all files of a version: what their headers may take."""
        return _METADATA_BYTES + _ENTRY_BYTES * len(self.reference.tensors)

    @property
    def _files_max(self) -> int:
        """Each file has to hold a tensor."""
        return len(self.reference.tensors)

    def _incoming_folder(self, epoch: int, version: int) -> Path:
        return self._incoming / f"{epoch:d}-{version:d}"

    def _check_announced(self, files: Sequence[WeightFile]) -> None:
        if not files:
            raise InvalidValue("files", [], "at least one safetensors file")
        if len(files) > self._files_max:
            raise InvalidValue("files", f"{len(files)} files", f"at most {self._files_max}, as the model's tensors")
        names = [check_file_name(file.name) for file in files]
        if len(set(names)) < len(names):
            raise InvalidValue("files", sorted(names), "every name once")

    def _verified(self, incoming: Path, files: Sequence[WeightFile]) -> dict[str, dict[str, TensorHeader]]:
        """Tensor headers by file name, of files that are what was announced and fit the model."""
        tensors: dict[str, dict[str, TensorHeader]] = {}
        merged: dict[str, TensorHeader] = {}
        for file in files:
            path = incoming / file.name
            if path.is_symlink() or not path.is_file():
                raise InvalidValue("files", file.name, "written or uploaded before the commit")
            _, tensors[file.name] = examine_file(path, file, self._header_bytes_max)
            for name in sorted(tensors[file.name].keys() & merged.keys()):
                raise InvalidValue(f"{file.name}: tensor", name, "in one file only")
            merged |= tensors[file.name]
        check_tensors(merged, self.reference.tensors)
        return tensors

    def _complete(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, TensorHeader]],
        manifest: list[dict[str, Any]],
        canary: Canary | None,
    ) -> None:
        """Adds to the weights what makes ``folder`` loadable, and what the store itself needs."""
        self._link_side_files(folder)
        if set(tensors) != {WEIGHTS_FILE}:
            weight_map = {name: file for file, names in tensors.items() for name in names}
            total_bytes = sum(tensor.content_bytes for names in tensors.values() for tensor in names.values())
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index))
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
        if canary is not None:
            _write_canary(folder, canary)

    def _link_reference(self) -> None:
        unfinished = self._versions / ".0"
        unfinished.mkdir()
        names = [*self.reference.files]
        if (self.reference.folder / INDEX_FILE).is_file():
            names.append(INDEX_FILE)
        for name in names:
            (unfinished / name).symlink_to((self.reference.folder / name).resolve())
        self._link_side_files(unfinished)
        os.rename(unfinished, self._versions / "0")

    def _link_side_files(self, folder: Path) -> None:
        """Links config, tokenizer and the like: everything of the reference that is no weights."""
        for file in self.reference.folder.iterdir():
            if file.is_file() and not file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json")):
                (folder / file.name).symlink_to(file.resolve())


def _manifest(files: Sequence[WeightFile]) -> list[dict[str, Any]]:
    return [
        {"name": file.name, "file_bytes": file.file_bytes, "blake3": file.blake3.hex()}
        for file in sorted(files, key=lambda file: file.name)
    ]


def _read_manifest(folder: Path) -> Any:
    file = folder / MANIFEST_FILE
    return json.loads(file.read_text()) if file.is_file() else None


def _write_canary(folder: Path, canary: Canary) -> None:
    unfinished = folder / f".{CANARY_FILE}"
    unfinished.write_text(json.dumps({"token_ids": canary.token_ids, "logprobs": canary.logprobs}))
    os.rename(unfinished, folder / CANARY_FILE)
