"""Folders that are made once and reused: written elsewhere, then renamed, so they are complete or absent.

A folder contains ``recipe.json``, its inputs; a folder with another recipe is refused, never overwritten.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dora.errors import Conflict

RECIPE_FILE = "recipe.json"


def prepare_once(folder: Path, recipe: Mapping[str, str | int], make: Callable[[Path], None]) -> Path:
    """Returns ``folder``, filled by ``make(empty folder)`` unless a folder of the same recipe exists.

    Several processes may prepare the same folder at once: the first rename wins, and the others use its result. Raises
    Conflict if ``folder`` exists with another recipe or none.
    """
    if folder.exists():
        return _existing(folder, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made = unfinished / "made"  # a subfolder: mkdtemp's own is private to the user, this one follows the umask
        made.mkdir()
        make(made)
        (made / RECIPE_FILE).write_text(json.dumps(dict(recipe), indent=2) + "\n", encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            return _existing(folder, recipe)
    finally:
        shutil.rmtree(unfinished)
    return folder


def _existing(folder: Path, recipe: Mapping[str, str | int]) -> Path:
    file = folder / RECIPE_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found != dict(recipe):
        allowed = f"a folder that does not exist yet, or one with {RECIPE_FILE} = {dict(recipe)}"
        raise Conflict("folder", str(folder), allowed, why="holds something else")
    return folder
