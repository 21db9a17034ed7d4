"""The weight store of the service's host, into which the trainer publishes. See host_store.py for what every host has.

    FOLDER/proof                            random bytes: a trainer that can read them shares this host
    FOLDER/incoming/<epoch>-<version>/      files written by a trainer, or uploaded; a file in upload is hidden
    FOLDER/spare/                           a file of a retired version, which a trainer on this host overwrites

Synchronous; only uploads may run concurrently for one version. The service calls it in a thread.
"""

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, LimitExceeded, NotFound
from dora.weights.canary import check_canary
from dora.weights.examining import examine_file
from dora.weights.files import SUFFIX, Examined, WeightFile, check_file_name
from dora.weights.host_store import MANIFEST_FILE, HostStore, header_bytes_of, weights_bytes
from dora.weights.image import NOTE_FILE
from dora.weights.manifest import manifest_of
from dora.weights.reference import WEIGHTS_FILE, TensorHeader
from dora.weights.tied_head import check_tied_head
from dora.weights.upload import DeltaUpload, Upload

log = logging.getLogger("dora.weights")

INCOMING_FOLDER: Final = "incoming"
SPARE_FOLDER: Final = "spare"  # a file of a retired version, whose pages a trainer on this host overwrites


class WeightStore(HostStore):
    """A host's store to which a trainer can publish. See the module's docstring for the layout."""

    def __init__(self, folder: Path, reference: Path, kept_version: int | None = None, bound_bytes: int = 0) -> None:
        super().__init__(folder, reference, kept_version, bound_bytes)
        self.proof = folder / "proof"
        self._incoming = folder / INCOMING_FOLDER
        self._spare = folder / SPARE_FOLDER
        self._incoming.mkdir(exist_ok=True)
        for unfinished in self._incoming.iterdir():
            shutil.rmtree(unfinished)
        shutil.rmtree(self._spare, ignore_errors=True)
        self._spare.mkdir()
        self._uploaded = False  # the trainer is on another host and writes nothing here itself
        self._uploading: dict[Path, int] = {}  # files being uploaded, with their announced sizes
        self._uploads = threading.RLock()
        self.proof_bytes = secrets.token_bytes(32)
        self.proof.write_bytes(self.proof_bytes)

    def begin(self, epoch: int, version: int) -> Path:
        """The folder for this trainer's files of ``version``, created if missing."""
        folder = self._incoming_folder(epoch, version)
        folder.mkdir(exist_ok=True)
        return folder

    def upload(
        self,
        epoch: int,
        version: int,
        file_name: str,
        file_bytes: int,
        base: tuple[int, bytes] | None = None,
        piece_bytes: int = 0,
    ) -> Upload:
        """Opens one incoming file. Once complete, it replaces an earlier one of the same name.

        ``base`` has version and BLAKE3 of the stored file of this name against which a delta is sent, in pieces of
        ``piece_bytes``. Raises NotFound if that file is not stored; InvalidValue if the name is not plain, or the
        files, including those in upload, would exceed the model's size; Conflict if a file of this name is being
        uploaded; LimitExceeded if the store has no room; OSError if it cannot be written, in which case it may be sent
        again.
        """
        check_file_name(file_name)
        with self._uploads:
            self._uploaded = True
            folder = self.begin(epoch, version)
            file = folder / file_name
            if file in self._uploading:
                raise Conflict("file_name", file_name, "a file that is not in upload", why="is being uploaded already")
            sizes = {held: held.stat().st_size for held in folder.glob(f"[!.]*{SUFFIX}")}
            sizes |= {held: size for held, size in self._uploading.items() if held.parent == folder}
            sizes.pop(file, None)
            room_bytes = self.reference.content_bytes + self.header_bytes_max - sum(sizes.values())
            if not 0 < file_bytes <= room_bytes:
                raise InvalidValue("file_bytes", file_bytes, f"1 to {room_bytes}, limited by the model's own size")
            if len(sizes) >= self._files_max:
                raise InvalidValue(
                    "file_name", file_name, f"one of at most {self._files_max} files, limited by the model's tensors"
                )
            if base is None:
                upload = Upload(file, file_bytes, self._upload_ended)
            else:
                try:
                    based_on = self._base_of(file_name, *base)
                    upload = DeltaUpload(file, file_bytes, self._upload_ended, based_on, piece_bytes)
                except FileNotFoundError:  # retired meanwhile
                    raise NotFound("base_version", base[0], "a stored version") from None
            self._uploading[file] = file_bytes
        return upload

    def _base_of(self, file_name: str, version: int, blake3: bytes) -> Path:
        for file in self.manifest(version).files:
            if (file.name, file.blake3) == (file_name, blake3):
                return self.folder(version) / file_name
        raise NotFound("base_version", version, "a version with exactly this file", why="has another file of this name")

    def _upload_ended(self, file: Path) -> None:
        with self._uploads:
            self._uploading.pop(file, None)

    def publish(
        self,
        epoch: int,
        version: int,
        files: Sequence[WeightFile],
        canary: Canary | None,
        *,
        anew: bool = False,
        name: str = "",
    ) -> Path:
        """Verifies the incoming files and makes them ``version`` by one rename. Returns its folder.

        Repeating it with the same files has no effect. With ``anew``, they replace the stored files of the version;
        readers see one or the other completely, or for a moment neither. The files must produce ``name``.

        Raises Conflict if they do not, or if ``version`` is stored with other files; InvalidValue for a missing,
        damaged or incomplete file, or the first tensor that does not fit the model; LimitExceeded if the store would
        exceed its limit, which may succeed later. If a write fails (OSError), nothing new is left, and the files must
        be sent again.
        """
        self._check_announced(files)
        if canary is not None:
            check_canary(canary, self.reference.vocab_size)
        if version in self.versions() and not anew:
            folder = self.folder(version)
            if not self._is_made_of(version, files):
                raise Conflict("version", version, "a new version", why="is published already, with other files")
            self._forget_incoming(version)
            return folder
        incoming = self._incoming_folder(epoch, version)
        self.check_room(f"weights: version {version}", 0)
        manifest = manifest_of(version, self._verified(incoming, files), canary)
        if name and manifest.name != name:
            allowed = f"{name}, byte for byte: there are responses that were sampled under it"
            raise Conflict("version", manifest.name, allowed, why="has other weights")
        unfinished = self._versions / f".{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            for file in files:
                os.rename(incoming / file.name, unfinished / file.name)
            with suppress(FileNotFoundError):
                os.rename(incoming / NOTE_FILE, unfinished / NOTE_FILE)
            folder = self._admit(unfinished, manifest)
        except OSError:
            for half in (unfinished, incoming):
                shutil.rmtree(half, ignore_errors=True)
            raise
        self._forget_incoming(version)
        return folder

    def take_back(self, epoch: int, version: int) -> None:
        """Reverts a published version whose commit failed: its files are incoming again, for the commit to be repeated.
        If that is not possible, they must be sent again.
        """
        try:
            incoming = self.begin(epoch, version)
            for file in self.manifest(version).files:
                os.rename(self.folder(version) / file.name, incoming / file.name)
        except (OSError, InvalidValue):
            log.warning("the files of version %d must be sent again", version, exc_info=True)
        self._remove(version)

    def withdraw(self, version: int) -> None:
        """Frees a version whose commit failed, even ``kept_version``, so that other files may be sent for it."""
        self._remove(version)

    def discard(self, epoch: int) -> None:
        """Frees the incoming files of all trainers up to ``epoch``, which are fenced."""
        for entry in self._incoming.iterdir():
            if int(entry.name.partition("-")[0]) <= epoch:
                shutil.rmtree(entry, ignore_errors=True)  # its writer may still be writing

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights here, including a trainer's incoming files."""
        return super().held_bytes + weights_bytes(self._incoming)

    def check_room(self, what: str, file_bytes: int) -> None:
        """Checks as the base class does, but deletes the spare file first if needed."""
        try:
            super().check_room(what, file_bytes)
        except LimitExceeded:
            for spare in self._spare.iterdir():
                spare.unlink(missing_ok=True)
            super().check_room(what, file_bytes)

    def free(self, gone: Path) -> None:
        """Keeps one file as spare, as a trainer writes faster to memory that was used before. A file with other hard
        links, such as one from a run record on the same disk, is not used.
        """
        kept = gone / WEIGHTS_FILE
        if not self._uploaded and kept.is_file() and not kept.is_symlink() and kept.stat().st_nlink == 1:
            os.rename(kept, self._spare / WEIGHTS_FILE)
        super().free(gone)

    def _forget_incoming(self, version: int) -> None:
        for entry in self._incoming.iterdir():
            if int(entry.name.partition("-")[2]) <= version:
                shutil.rmtree(entry, ignore_errors=True)

    @property
    def header_bytes_max(self) -> int:
        return header_bytes_of(self.reference)

    @property
    def _files_max(self) -> int:
        return len(self.reference.tensors)

    def _incoming_folder(self, epoch: int, version: int) -> Path:
        return self._incoming / f"{epoch:d}-{version:d}"

    def _is_made_of(self, version: int, files: Sequence[WeightFile]) -> bool:
        if not (self.folder(version) / MANIFEST_FILE).is_file():
            return False
        held = [WeightFile(file.name, file.file_bytes, file.blake3) for file in self.manifest(version).files]
        return sorted(held, key=lambda file: file.name) == sorted(files, key=lambda file: file.name)

    def _check_announced(self, files: Sequence[WeightFile]) -> None:
        if not files:
            raise InvalidValue("files", [], "at least one safetensors file")
        if len(files) > self._files_max:
            raise InvalidValue("files", f"{len(files)} files", f"at most {self._files_max}, as many as tensors")
        names = [check_file_name(file.name) for file in files]
        if len(set(names)) < len(names):
            raise InvalidValue("files", sorted(names), "every name once")

    def _verified(self, incoming: Path, files: Sequence[WeightFile]) -> list[Examined]:
        examined: list[Examined] = []
        merged: dict[str, TensorHeader] = {}
        for file in files:
            path = incoming / file.name
            if path.is_symlink() or not path.is_file():
                raise InvalidValue("files", file.name, "written or uploaded before the commit")
            examined.append(examine_file(path, file, self.header_bytes_max))
            found = examined[-1].by_name
            for name in sorted(found.keys() & merged.keys()):
                raise InvalidValue(f"{file.name}: tensor", name, "in one file only")
            merged |= found
        self.check_tensors(merged)
        check_tied_head((incoming / file.name for file in files), self.reference.tensors)
        return examined
