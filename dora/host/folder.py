"""The folder of a host, in shared memory: the model, live versions, shared memory for KV, logs.

FOLDER/model/        the service's model; FOLDER/model.digest once it is complete FOLDER/weights/      the store of live
versions (weights/store.py) FOLDER/kv/           shared memory of the host's workers (kvtransfer/transports/segments.py)
FOLDER/logs/         logs of its processes
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue
from dora.system.ownership import hold, hold_new, is_abandoned, owner_of
from dora.system.private import is_own_folder, private_files, private_folder
from dora.weights.files import SUFFIX
from dora.weights.host_store import size_here

log = logging.getLogger("dora.host")

MODEL: Final = "model"
DIGEST: Final = "model.digest"
WEIGHTS: Final = "weights"
SNAPSHOTS: Final = "kv"
LOGS: Final = "logs"
_MADE_PREFIX: Final = "dora-host-"
_LOCK: Final = "made.lock"
_NAMED_LOCK: Final = "dora-host.lock"


def kept_bytes(folder: Path, *, has_model: bool) -> int:
    """Returns the bytes that an earlier epoch left in an agent's folder and that need no new room: versions, and the
    model.

    If ``has_model``, the machine has the model elsewhere, so a model in the folder is unused.
    """
    used = [WEIGHTS] if has_model else [WEIGHTS, MODEL]
    found = (Path(path, name) for each in used for path, _, names in os.walk(folder / each) for name in names)
    return sum(size_here(file) for file in found if file.suffix == SUFFIX)


@contextlib.contextmanager
def host_folder(named: str) -> Iterator[Path]:
    """Opens the folder for this process: ``named``, whose content is kept, or a temporary one that is removed at the
    end. Folders of killed agents are removed. New files of this process are private meanwhile. Raises InvalidValue if
    no folder can be had.
    """
    with private_files(), _kept(Path(named)) if named else _made() as folder:
        yield folder


@contextlib.contextmanager
def _made() -> Iterator[Path]:
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_MADE_PREFIX}*"):
        if is_own_folder(left) and is_abandoned(left / _LOCK):
            log.warning("%s is removed: its agent was killed", left)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_MADE_PREFIX, dir=parent))
    try:
        held = hold_new(folder / _LOCK)
        try:
            (folder / SNAPSHOTS).mkdir()
            yield folder
        finally:
            os.close(held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[Path]:
    try:
        private_folder(folder, "--folder")
        held = hold(folder / _NAMED_LOCK)
        if held is not None:
            shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)
            (folder / SNAPSHOTS).mkdir()
    except OSError as error:
        raise InvalidValue("--folder", str(folder), f"a folder to write in ({error.strerror})") from error
    if held is None:
        raise InvalidValue(
            "--folder",
            str(folder),
            "a folder that no other agent has",
            why=f"is in use by {owner_of(folder / _NAMED_LOCK)}",
        )
    try:
        yield folder
    finally:
        held.close()
