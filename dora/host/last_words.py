"""The reason why a process ended, from the end of its log."""

import re
from pathlib import Path
from typing import Final

LOG_TAIL_BYTES: Final = 16_000
WORDS_MAX: Final = 600  # characters
# DORA's own refusal, or the last line of a traceback, which some libraries log behind a prefix such as "(pid=7) ".
_REFUSAL: Final = re.compile(r"^error: (?P<said>.+)$")
_RAISED: Final = re.compile(
    r"^(?:.*?[\]|)] )?(?P<said>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failed|Exit)(?:: .*)?)$"
)
_DETAIL: Final = re.compile(r"^\s+(?P<said>(?:Value|Assertion) error, .+?)(?: \[type=.*)?$")  # of pydantic


def last_words(log: Path) -> str:
    """Returns the line of a dead process's log that says why it ended, else its last line."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            text = stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)
    return reason_in(text)


def reason_in(text: str) -> str:
    """Returns the reason in a log's text. A refusal by DORA precedes an exception, the last of a kind first."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for pattern in (_REFUSAL, _DETAIL, _RAISED):
        found = [match["said"] for line in lines if (match := pattern.match(line)) is not None]
        if found:
            return _cut(found[-1])
    return _cut(lines[-1].strip()) if lines else "it wrote nothing"


def _cut(words: str) -> str:
    return words if len(words) <= WORDS_MAX else f"{words[:WORDS_MAX]}..."
