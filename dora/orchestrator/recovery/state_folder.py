"""The state folder of a service: its content, the settings that must fit it, and the restart from it.

FOLDER/dora.lock       held while a service runs FOLDER/service.json    its address and token; readable by its owner
alone FOLDER/processes.json  the processes that it has started; readable by its owner alone FOLDER/log/, the journal
(dora/journal) FOLDER/versions/       the weights of every version in the window
"""

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.config import Config, validated
from dora.errors import MISSING, InvalidValue
from dora.journal.finding import Found, find
from dora.journal.log import LOG_FOLDER, Sizes
from dora.journal.versions import PersistedVersions
from dora.orchestrator.recording.storage import check_room
from dora.orchestrator.recovery.changed_settings import check_changes, settings_before
from dora.system.files import replace_durably, try_folder
from dora.system.ownership import check_locks, hold, is_held, owner_of, place_of
from dora.system.private import check_owner, private_folder
from dora.weights.whole import is_sound

SETTING: Final = "service.state"
LOCK_FILE: Final = "dora.lock"
SERVICE_FILE: Final = "service.json"
LIVING_FILE: Final = "processes.json"
VERSIONS_FOLDER: Final = "versions"
UNDAMAGED: Final = "undamaged weights"


_KV_SECRET: Final = re.compile("[0-9a-f]{64}")


@dataclass(slots=True)
class ServiceIdentity:
    address: str = ""
    token: str = field(default="", repr=False)
    kv_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    session_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    run: str = field(default_factory=lambda: secrets.token_hex(16))  # of this run; its record has the same
    place: str = ""  # of the state folder: a copy is at another one
    record: str = ""  # the folder of the last incarnation's record
    content: dict[str, str] = field(default_factory=dict)  # digests of what the run depends on (binding.py)
    begun_from: str = ""  # STATE@VERSION of the run whose weights are version 0; empty: the model's (begin_from.py)
    source: str = ""  # the prompts that one of them is of (source_of); empty: those of the last configuration
    has_begun: bool = False  # the log has been written
    workers: int = -1  # of the service's own host, as operators scaled it; -1: they did not
    workers_set: int = -1  # ``workers.count`` at that time: another one holds instead

    def __post_init__(self) -> None:
        """Raises ValueError for a file that no service wrote."""
        named = (self.address, self.token, self.kv_secret, self.session_secret, self.run, self.place)
        texts = (*named, self.record, self.begun_from, self.source)
        if not (all(isinstance(text, str) for text in texts) and isinstance(self.content, dict)):
            raise ValueError("a field has another type")
        if not all(isinstance(text, str) for text in self.content.values()):
            raise ValueError("a digest is no text")
        if not (type(self.workers) is type(self.workers_set) is int and isinstance(self.has_begun, bool)):
            raise ValueError("a number of workers is no whole number, or has_begun neither true nor false")
        bytes.fromhex(self.kv_secret)
        bytes.fromhex(self.session_secret)


@dataclass(slots=True)
class StateFolder:
    """Holds an open state folder, which this process has locked."""

    folder: Path
    found: Found
    versions: PersistedVersions
    identity: ServiceIdentity
    place: str = ""  # of its lock file: a copy of the folder has another one

    def check_settings(self, config: Config) -> None:
        """Raises InvalidValue for the first setting whose change the run does not allow."""
        if not self.found.is_new:
            check_changes(settings_before(self.found), config, self.found, str(self.folder))

    def check(self) -> None:
        """Raises InvalidValue if the log, or the weights of a version that may be needed, are missing."""
        if self.found.is_new and self.identity.has_begun:
            allowed = f"with its {LOG_FOLDER}/, which was removed; restore it from a copy, or begin in a new folder"
            raise InvalidValue(SETTING, str(self.folder), allowed, why="cannot be carried on")
        self._check_lacks(self.versions.lacking(self.found.durable.versions), "the weights")

    def drop_others(self) -> None:
        """Drops the weights of versions that were never acknowledged."""
        self.versions.only(self.found.durable.versions)

    def bring_back_versions(self, store: Path) -> None:
        """Copies the versions into a store's folder. Raises OSError, and InvalidValue if one differs from its
        publication.
        """
        damaged = self.versions.bring_back(self.found.durable.versions, store, is_sound)
        self._check_lacks(damaged, UNDAMAGED)

    def check_brings_back(self, store: Path) -> None:
        """Raises InvalidValue if ``bring_back_versions`` would; changes nothing."""
        self._check_lacks(self.versions.damaged(self.found.durable.versions, store, is_sound), UNDAMAGED)

    def _check_lacks(self, versions: Sequence[int], what: str) -> None:
        if versions:
            allowed = f"with {what} of version {', '.join(map(str, versions))}; restore them from a copy"
            raise InvalidValue(SETTING, str(self.folder), allowed, why="cannot be carried on")

    def carried_on(self, config: Config) -> Config:
        """Returns the configuration with the service's earlier address and token, unless it names others, and with the
        number of workers to which operators scaled it, unless ``workers.count`` has changed.

        A copy of the folder leaves the address to the original, because workers of that one may look for it there.
        """
        identity, host = self.identity, config.service.listen.rpartition(":")[0]
        changes: dict[str, Any] = {}
        if identity.workers_set != config.workers.count:
            identity.workers, identity.workers_set = -1, config.workers.count
        if identity.token and not config.service.token:
            changes["token"] = identity.token
        is_copy = identity.place not in ("", self.place)
        here = identity.address and identity.address.rpartition(":")[0] == host
        if config.service.listen.endswith(":0") and here and not is_copy:
            changes["listen"] = identity.address
        if not changes and identity.workers < 0:
            return config
        tree = config.model_dump()
        tree["service"] |= changes
        if identity.workers >= 0:
            tree["workers"]["count"] = identity.workers
        return validated(tree)

    def remember(self, **values: Any) -> None:
        """Stores values for a later start. Raises OSError."""
        for name, value in values.items():
            setattr(self.identity, name, value)
        replace_durably(self.folder / SERVICE_FILE, json.dumps(asdict(self.identity)))


@contextlib.contextmanager
def state_folder_of(config: Config, sizes: Sizes) -> Iterator[StateFolder | None]:
    """Opens the folder that ``service.state`` names, or yields None if it names none.

    Raises InvalidValue if the folder cannot be used, a running service has it, or its content cannot be carried on.
    """
    _check_keeps(config)
    if not config.service.state:
        yield None
        return
    folder = Path(config.service.state)
    try:
        private_folder(folder, SETTING)
        check_locks(folder)
        held = hold(folder / LOCK_FILE)
    except OSError as error:
        raise _unusable(folder, error) from error
    if held is None:
        raise _in_use(folder)
    try:
        try:
            identity, versions = _identity(folder), PersistedVersions(folder / VERSIONS_FOLDER)
            state = StateFolder(folder, find(folder, sizes), versions, identity, held.place)
            if state.found.is_new:
                check_room(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        state.check()
        state.drop_others()
        yield state
    finally:
        held.close()


@contextlib.contextmanager
def reading_state(config: Config, sizes: Sizes) -> Iterator[StateFolder | None]:
    """Yields what ``state_folder_of`` would, but changes and locks nothing. Raises InvalidValue in the same cases."""
    _check_keeps(config)
    if not config.service.state:
        yield None
        return
    folder = Path(config.service.state)
    check_owner(folder, SETTING)
    try:
        for each in (folder, *(inner for name in (LOG_FOLDER, VERSIONS_FOLDER) if (inner := folder / name).exists())):
            try_folder(each)
        if folder.exists():
            check_locks(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if is_held(folder / LOCK_FILE):
        raise _in_use(folder)
    try:
        identity, versions = _identity(folder), PersistedVersions(folder / VERSIONS_FOLDER, repairs=False)
        found = find(folder, sizes, repairs=False)
    except OSError as error:
        raise _unusable(folder, error) from error
    state = StateFolder(folder, found, versions, identity, place_of(folder / LOCK_FILE))
    state.check()
    yield state


def _check_keeps(config: Config) -> None:
    if config.service.keep_events and not config.service.state:
        raise InvalidValue(SETTING, "", "a folder, because service.keep_events is set")


def _identity(folder: Path) -> ServiceIdentity:
    file = folder / SERVICE_FILE
    if not file.exists():
        return ServiceIdentity()
    try:
        identity = ServiceIdentity(**json.loads(file.read_text(encoding="utf-8")))
        if not _KV_SECRET.fullmatch(identity.kv_secret):
            raise ValueError("kv_secret is not 64 hexadecimal digits")
        return identity
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(
            str(file), MISSING, f"as a service leaves it ({error}); remove it for a new token"
        ) from error


def _unusable(folder: Path, error: OSError) -> InvalidValue:
    return InvalidValue(SETTING, str(folder), f"a folder to write in, with locks and fsync ({error.strerror})")


def _in_use(folder: Path) -> InvalidValue:
    return InvalidValue(
        SETTING, str(folder), "a folder that no running service has", why=f"is in use by {owner_of(folder / LOCK_FILE)}"
    )
