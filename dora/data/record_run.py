"""To which run a record belongs, and how it is brought back to an earlier step.

DIR/record.json            {"run": id of the run, "since": the first step whose time the run's state has, too}
DIR/set-aside-<n>/         what a deliberate start has moved out of the record: nothing is deleted
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import CANCELLED_FILE, EVALUATIONS_FILE, STEPS_FILE, TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.errors import MISSING, InvalidValue
from dora.system.files import replace_durably, sync_folder

RUN_FILE: Final = "record.json"
SET_ASIDE: Final = "set-aside"


@dataclass(frozen=True, slots=True)
class RecordRun:
    run: str
    since: int


def run_of(folder: Path) -> RecordRun | None:
    """Returns the run of a record, or None if it says none: it is new, or of an older DORA. Raises InvalidValue."""
    file = folder / RUN_FILE
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        found = RecordRun(**tree)
        if not (isinstance(found.run, str) and type(found.since) is int):
            raise ValueError("a field has another type")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(str(file), MISSING, f"as a service wrote it ({error}); restore it from a copy") from error
    return found


def write_run(folder: Path, run: RecordRun) -> None:
    """Binds a record to a run, durably. Raises OSError."""
    replace_durably(folder / RUN_FILE, json.dumps(asdict(run)))


def set_aside(folder: Path, first: int, until: float) -> Path:
    """Moves what the record has of the steps from ``first`` on into a new folder within it, and returns that folder.

    ``until`` is the time of the commit before; groups cancelled later are moved, too. The record must not be open. If a
    crash ends this early, it may be repeated. Raises OSError, and InvalidValue for a line that is no JSON object.
    """
    number = 1
    while (aside := folder / f"{SET_ASIDE}-{number}").exists():
        number += 1
    aside.mkdir()
    later = False

    def of_later_step(line: dict[str, Any]) -> bool:
        nonlocal later
        later = later or line.get("step", -1) >= first
        return later

    for name, moves in (
        (STEPS_FILE, of_later_step),
        (TRAJECTORIES_FILE, lambda line: line["trained_step"] >= first),
        (CANCELLED_FILE, lambda line: line["cancelled_at"] > until),
    ):
        _divide(folder / name, aside / name, moves)
    if (folder / EVALUATIONS_FILE).exists():
        _divide(folder / EVALUATIONS_FILE, aside / EVALUATIONS_FILE, lambda line: line["version"] > first)
    (aside / VERSIONS_FOLDER).mkdir()
    for version in (folder / VERSIONS_FOLDER).iterdir():
        if version.name.isdigit() and int(version.name) > first:
            version.rename(aside / VERSIONS_FOLDER / version.name)
    for changed in (aside, aside / VERSIONS_FOLDER, folder / VERSIONS_FOLDER, folder):
        sync_folder(changed)
    return aside


def _divide(file: Path, moved: Path, moves: Callable[[dict[str, Any]], bool]) -> None:
    rest = file.with_name(f".{file.name}")
    with file.open("rb") as lines, rest.open("wb") as stay, moved.open("wb") as go:
        for number, line in enumerate(lines, start=1):
            try:
                goes = moves(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidValue(f"{file.name} line {number}", line[:80], "a line of a record") from error
            (go if goes else stay).write(line)
        for stream in (go, stay):
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(rest, file)
