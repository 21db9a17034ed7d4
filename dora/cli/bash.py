"""Completion in bash, which splits words where typer's script does not expect it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO


@contextmanager
def bash_words() -> Iterator[None]:
    """For the duration of a completion in bash: a word is one again where bash splits it.

    bash splits at ``=`` and ``:``, and what it is answered takes the place of the last part alone.
    """
    if os.environ.get("_DORA_COMPLETE") != "complete_bash" or not os.environ.get("COMP_CWORD", "").isdecimal():
        yield
        return
    words, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    before, current, cut = _joined(words[: at + 1])
    os.environ["COMP_WORDS"] = "\n".join((*before, current))
    os.environ["COMP_CWORD"] = str(len(before))
    answered = StringIO()
    try:
        with redirect_stdout(answered):
            yield
    finally:
        sys.stdout.write("".join(line[cut:] for line in answered.getvalue().splitlines(keepends=True)))


def _joined(parts: Sequence[str]) -> tuple[list[str], str, int]:
    """The words before the last one, the last one, and how much of that stands before its last part."""
    words: list[str] = []
    cut, glued = 0, False
    for part in parts:
        separates = bool(part) and not part.strip("=:")
        if words and (separates or glued):
            cut = len(words[-1]) + (len(part) if separates else 0)
            words[-1] += part
        else:
            cut = 0
            words.append(part)
        glued = separates
    return words[:-1], words[-1] if words else "", cut
