"""Begins a run with a version of another run as its version 0: ``service.begin_from``, STATE@VERSION.

VERSION is a number, or the name of a checkpoint, whose run may still go on (named.py).

NEW/model/    the complete Hugging Face folder of that version, which is the new run's model from then on
"""

import contextlib
import shutil
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.errors import InvalidValue
from dora.journal.log import LOG_FOLDER
from dora.orchestrator.recovery import named
from dora.orchestrator.recovery.state_folder import LOCK_FILE, VERSIONS_FOLDER, StateFolder
from dora.system.files import link_or_copy, sync_folder
from dora.system.ownership import hold, is_held, owner_of
from dora.weights.whole import is_sound

FIELD: Final = "service.begin_from"
MODEL_FOLDER: Final = "model"
OWN_PREFIX: Final = "dora-"  # of a store's own files, which are no part of a model


def begun_from(config: Config, state: StateFolder | None) -> Config:
    """Returns the configuration with the run's own model, if it began from another run; copies it for a new run.

    Raises InvalidValue if the other run does not have the version, or this run has begun otherwise.
    """
    _check_has_state(config)
    if state is None:
        return config
    own, began = state.folder, state.identity.begun_from
    if _is_to_copy(config, own, state.found.is_new, began):
        other, version = _parsed(config.service.begin_from)
        _copy(config.service.begin_from, other, version, own)
        began = _name(other, version)
        state.remember(begun_from=began)
    return _with_model(config, own / MODEL_FOLDER) if began else config


def check_from(config: Config, state: StateFolder | None) -> Config:
    """Checks like ``begun_from``, and changes nothing. Returns the configuration with the model that it would have."""
    _check_has_state(config)
    if state is None:
        return config
    requested, own, began = config.service.begin_from, state.folder, state.identity.begun_from
    if not _is_to_copy(config, own, state.found.is_new, began):
        return _with_model(config, own / MODEL_FOLDER) if began else config
    other, version = _parsed(requested)
    _check_other(requested, other, own)
    if not named.is_name(version) and is_held(other / LOCK_FILE):
        raise _in_use(requested, other)
    return _with_model(config, _kept(requested, other, version))


def _with_model(config: Config, model: Path) -> Config:
    return config.model_copy(update={"model": str(model.resolve())})


def _is_to_copy(config: Config, own: Path, is_new: bool, began: str) -> bool:
    """Returns whether the run in ``own`` lacks its model. The run remembers ``began``.

    Raises InvalidValue if it has begun otherwise than ``service.begin_from`` says.
    """
    requested = config.service.begin_from
    if not requested:
        return False
    name = _name(*_parsed(requested))
    if not is_new and began != name:
        allowed = f"left out, or {began}" if began else "left out, or with a new folder as service.state"
        raise InvalidValue(FIELD, requested, allowed, why=f"is not how the run in {own} began")
    return began != name


def _name(other: Path, version: str) -> str:
    return f"{other.resolve()}@{version}"


def _has_run(folder: Path) -> bool:
    return any((folder / LOG_FOLDER).glob("[0-9]*"))


def _check_has_state(config: Config) -> None:
    if config.service.begin_from and not config.service.state:
        allowed = "with a new folder as service.state, which gets a copy of the weights"
        raise InvalidValue(FIELD, config.service.begin_from, allowed)


def _parsed(requested: str) -> tuple[Path, str]:
    folder, _, version = requested.rpartition("@")
    is_number = version.isascii() and version.isdigit()
    if not folder or not (is_number or named.is_name(version)):
        allowed = "STATE@VERSION: a state folder, and the number of a version or the name of a checkpoint in it"
        raise InvalidValue(FIELD, requested, allowed)
    return Path(folder), str(int(version)) if is_number else version


def _check_other(requested: str, other: Path, own: Path) -> None:
    if not _has_run(other):
        raise InvalidValue(FIELD, requested, f"the state folder of a run: {other} has none")
    if other.resolve() == own.resolve():
        raise InvalidValue(FIELD, requested, "the state folder of another run than service.state")


def _in_use(requested: str, other: Path) -> InvalidValue:
    why = f"is in use by {owner_of(other / LOCK_FILE)}"
    return InvalidValue(FIELD, requested, "the state folder of a run whose service has been stopped", why=why)


def _kept(requested: str, other: Path, version: str) -> Path:
    versions = other / VERSIONS_FOLDER
    kept = (other / named.CHECKPOINTS_FOLDER if named.is_name(version) else versions) / version
    if not kept.is_dir():
        there = [*sorted(int(each.name) for each in versions.glob("[0-9]*")), *named.names_in(other)]
        allowed = f"a version that {other} has: {', '.join(map(str, there)) or 'none'}. "
        raise InvalidValue(FIELD, requested, allowed + "A record has all of them: --model RECORD/versions/N")
    for file in kept.iterdir():
        if not file.exists():
            raise InvalidValue(FIELD, requested, f"a version whose files exist: {file} links to one that is gone")
    is_model = named.facts_of(other, version).get("version") == 0  # not published: it has no manifest
    if not (is_model or is_sound(kept)):
        raise InvalidValue(FIELD, requested, f"a version with undamaged weights: those in {kept} are not as published")
    return kept


def _copy(requested: str, other: Path, version: str, own: Path) -> None:
    """Copies the version's model. An earlier attempt that was cut short is replaced. Raises InvalidValue."""
    _check_other(requested, other, own)
    target, unfinished = own / MODEL_FOLDER, own / f".{MODEL_FOLDER}"
    try:
        with contextlib.ExitStack() as stack:
            if not named.is_name(version):  # a number's folder goes when the version retires
                held = hold(other / LOCK_FILE)
                if held is None:
                    raise _in_use(requested, other)
                stack.enter_context(contextlib.closing(held))
            kept = _kept(requested, other, version)
            for left in (unfinished, target):
                shutil.rmtree(left, ignore_errors=True)
            unfinished.mkdir(mode=0o700)
            for file in sorted(kept.iterdir()):
                if file.name.startswith((OWN_PREFIX, ".")) or not file.is_file():
                    continue
                if file.is_symlink():  # the user's file, which may be edited
                    shutil.copyfile(file, unfinished / file.name)
                else:
                    link_or_copy(file, unfinished / file.name)
            sync_folder(unfinished)
            unfinished.rename(target)
            sync_folder(own)
    except OSError as error:
        raise InvalidValue(FIELD, requested, f"a run that can be copied to {own} ({error.strerror})") from error
