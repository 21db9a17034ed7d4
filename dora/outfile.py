"""Files that a command writes at its end: what can be refused is refused before the work, not after it."""

from pathlib import Path

from dora.errors import InvalidValue


def check_folder(option: str, path: Path) -> None:
    """Raises InvalidValue where the folder that ``path`` is to be written to does not exist."""
    if not path.parent.is_dir():
        raise InvalidValue(option, str(path), f"a file in a folder that exists, and {path.parent} does not")
