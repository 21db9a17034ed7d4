"""The deployed rules with shorter times, for faults that a test cannot keep up for minutes.

The transform changes nothing but times, and those of the named alerts alone: ``for``, the ranges in brackets, also of
the recorded series that an alert reads, and the seconds with which an expression compares the length of a state. Each
becomes ``times`` shorter. Thresholds, labels and all other alerts stay as they are deployed.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.prometheus.server import DEPLOYED

_DURATION: Final = re.compile(r"(\d+)([smh])")
_RANGE: Final = re.compile(r"\[(\d+[smh])\]")
_LENGTH: Final = re.compile(r"((?:idle_longest|uptime)_seconds [<>] )(\d+)")  # of a state, in seconds
_RECORDED: Final = re.compile(r"dora:[\w:]+")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600}


def hasty_rules(folder: Path, names: Collection[str], times: float = 60.0) -> Path:
    """Writes the rules into a folder of their own, which is returned."""
    folder.mkdir()
    recording, alerts = (yaml.safe_load((DEPLOYED / file).read_text()) for file in ("recording.yml", "alerts.yml"))
    chosen = [rule for rule in _rules(alerts) if rule["alert"] in names]
    assert {rule["alert"] for rule in chosen} == set(names)
    read = {name for rule in chosen for name in _RECORDED.findall(rule["expr"])}
    for rule in (*chosen, *(each for each in _rules(recording) if each["record"] in read)):
        rule["expr"] = shortened(rule["expr"], times)
        if "for" in rule:
            rule["for"] = _shorter(rule["for"], times)
    for file, tree in (("recording.yml", recording), ("alerts.yml", alerts)):
        (folder / file).write_text(yaml.safe_dump(tree))
    return folder


def shortened(expression: str, times: float) -> str:
    """Returns an expression whose ranges and lengths of a state are ``times`` shorter."""
    ranges = _RANGE.sub(lambda found: f"[{_shorter(found[1], times)}]", expression)
    return _LENGTH.sub(lambda found: f"{found[1]}{int(found[2]) / times:g}", ranges)


def _shorter(duration: str, times: float) -> str:
    found = _DURATION.fullmatch(duration)
    assert found is not None, duration
    return f"{round(1000 * int(found[1]) * _UNIT_S[found[2]] / times)}ms"


def _rules(tree: Any) -> Iterator[dict[str, Any]]:
    for group in tree["groups"]:
        yield from group["rules"]
