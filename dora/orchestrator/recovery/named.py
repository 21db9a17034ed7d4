"""Named checkpoints of a run: versions that stay in its state folder for as long as the operator likes.

STATE/checkpoints/NAME/    the version's complete folder, with the facts in dora-checkpoint.json. It never changes, so a
new run may begin from it while this one goes on; ``best`` alone is replaced by a better one.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dora.errors import Conflict, InvalidValue
from dora.orchestrator.recovery.state_folder import VERSIONS_FOLDER
from dora.system.files import link_or_copy, replace_durably, sync_folder

CHECKPOINTS_FOLDER: Final = "checkpoints"
FACTS_FILE: Final = "dora-checkpoint.json"
BEST: Final = "best"  # the version of the highest mean reward in an evaluation (evaluation.keep_best)
ALLOWED: Final = "1 to 64 letters, digits, '.', '_' and '-', and begin with a letter"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def names_in(state: Path) -> list[str]:
    return sorted(each.name for each in (state / CHECKPOINTS_FOLDER).glob("*") if is_name(each.name))


def check_name(state: Path, name: str) -> None:
    """Raises InvalidValue for a name that an operator may not give, Conflict for one that is taken."""
    if not is_name(name) or name == BEST:
        raise InvalidValue("checkpoint: name", name, f"{ALLOWED}; not '{BEST}', which evaluations keep")
    if (state / CHECKPOINTS_FOLDER / name).exists():
        raise Conflict("checkpoint: name", name, "another name: a checkpoint does not change", why="is taken")


def keep(state: Path, name: str, source: Path, facts: Mapping[str, Any]) -> Path:
    """Keeps the version in ``source``, durably: by hard links where that is possible. Raises OSError.

    It replaces a checkpoint of the same name; a crash leaves the old or the new one.
    """
    prepared = prepare(state, name, source)
    return finish(prepared, name, facts)


def prepare(state: Path, name: str, source: Path) -> Path:
    """Takes the version's files, under a hidden name: they stay although the version retires. Raises OSError."""
    checkpoints = state / CHECKPOINTS_FOLDER
    checkpoints.mkdir(mode=0o700, exist_ok=True)
    unfinished = checkpoints / f".{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        for file in sorted(source.iterdir()):
            if file.is_symlink():  # the user's file, which may be edited
                shutil.copyfile(file, unfinished / file.name)
            elif file.is_file():
                link_or_copy(file, unfinished / file.name)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return unfinished


def source_of(state: Path, store: Path, version: int) -> Path:
    """Returns a live version's folder in the state folder, which is on the same disk, or else in the weight store."""
    kept = state / VERSIONS_FOLDER / str(version)
    return kept if kept.is_dir() else store


def finish(prepared: Path, name: str, facts: Mapping[str, Any]) -> Path:
    """Gives a prepared checkpoint its name and facts. Raises OSError."""
    checkpoints = prepared.parent
    target, replaced = checkpoints / name, checkpoints / f".{name}.replaced"
    replace_durably(prepared / FACTS_FILE, json.dumps(dict(facts)))
    sync_folder(prepared)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(prepared, target)
    sync_folder(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def tidy(state: Path) -> None:
    """Removes what an earlier incarnation left unfinished, and puts back a checkpoint whose replacement failed."""
    for hidden in (state / CHECKPOINTS_FOLDER).glob(".*"):
        name = hidden.name[1:].removesuffix(".replaced")
        if hidden.name.endswith(".replaced") and not (target := hidden.parent / name).exists():
            os.rename(hidden, target)
        else:
            shutil.rmtree(hidden)


def facts_of(state: Path, name: str) -> dict[str, Any]:
    """Returns the facts of a checkpoint, or none if it does not exist."""
    try:
        found = json.loads((state / CHECKPOINTS_FOLDER / name / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
