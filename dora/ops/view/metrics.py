"""A trainer's metrics of a commit as text, and the alarms among them."""

import re
from collections.abc import Mapping
from typing import Final

from dora.data.types import ALARM
from dora.ops.view.numbers import measured

FIRST: Final = ("loss", "reward")  # prefixes of the metrics shown first
_OF_STALENESS: Final = re.compile(r"staleness_(\d+\+?)/(.+)", re.S)


def metrics(sent: Mapping[str, float]) -> list[tuple[str, str]]:
    """The metrics of a commit as names and texts; losses and rewards first, then by name.

    A ``staleness_1/loss`` is added to ``loss`` in brackets, as "1: 0.25". Alarms are excluded (:func:`alarms`).
    """
    parts: dict[str, list[str]] = {}
    for name in sorted(sent):
        found = _OF_STALENESS.fullmatch(name)
        if found and found[2] in sent:
            parts.setdefault(found[2], []).append(f"{found[1]}: {measured(sent[name])}")

    def place(name: str) -> tuple[int, str]:
        first = (at for at, word in enumerate(FIRST) if name.lower().startswith(word))
        return next(first, len(FIRST)), name

    def text(name: str) -> str:
        return measured(sent[name]) + (f"  ({', '.join(parts[name])})" if name in parts else "")

    return [(name, text(name)) for name in sorted(sent, key=place) if not _elsewhere(name, sent)]


def alarms(sent: Mapping[str, float]) -> list[str]:
    """Returns sentences for metrics that exceed the bound sent with them."""
    names = (name.removeprefix(ALARM) for name in sorted(sent) if _is_alarm(name, sent))
    return [f"{name} {measured(sent[name])} is above {measured(sent[ALARM + name])}" for name in names]


def _is_alarm(name: str, sent: Mapping[str, float]) -> bool:
    return name.startswith(ALARM) and name.removeprefix(ALARM) in sent


def _elsewhere(name: str, sent: Mapping[str, float]) -> bool:
    found = _OF_STALENESS.fullmatch(name)
    return _is_alarm(name, sent) or bool(found and found[2] in sent)
