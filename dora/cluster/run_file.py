"""The file of a run on a cluster: the configuration of the service, and one table for the scheduler."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.config import Config, load_config
from dora.config.reading import schedulers, settings_tree
from dora.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class RunFile:
    path: Path
    config: Config
    scheduler: str
    table: dict[str, Any] = field(default_factory=dict)


def read_run_file(path: Path, scheduler: str = "") -> RunFile:
    """Reads the table of ``scheduler``, which may lack. Without one, the file has exactly one scheduler's table.

    Raises InvalidValue otherwise, and for a file that the service would refuse.
    """
    tree = settings_tree(path, (), "--file")
    known = sorted(schedulers())
    tables = [scheduler] if scheduler else [name for name in known if name in tree]
    if len(tables) != 1:
        allowed = f"with exactly one of the tables [{'], ['.join(known)}]"
        raise InvalidValue("--file", str(path), allowed, why=f"has {', '.join(tables) or 'none'}")
    if not isinstance(table := tree.get(tables[0], {}), dict):
        raise InvalidValue(tables[0], table, "a table")
    return RunFile(path, load_config(path), tables[0], table)
