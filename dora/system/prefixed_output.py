"""Output of user code: written at once, each line after the name of what wrote it."""

import io
import sys
from collections.abc import Callable


class PrefixedOutput(io.TextIOWrapper):
    """A text stream to a file descriptor. ``name`` names the present writer."""

    def __init__(self, descriptor: int, name: Callable[[], str]) -> None:
        raw = io.FileIO(descriptor, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._name_now = name
        self._open = ""  # whose line has no end yet

    def write(self, text: str) -> int:
        name = self._name_now()
        begun, other = self._open == name, self._open not in ("", name)
        lines = text.splitlines(keepends=True)
        shown = "".join(line if begun and not number else f"{name}: {line}" for number, line in enumerate(lines))
        if lines:
            super().write("\n" * other + shown)
            self._open = "" if shown.endswith("\n") else name
        return len(text)


def prefix_output(name: Callable[[], str]) -> None:
    """Sends stdout and stderr of this process's Python code to stderr, with prefixes."""
    sys.stdout = sys.stderr = PrefixedOutput(2, name)
