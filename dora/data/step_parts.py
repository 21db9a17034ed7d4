"""The parts of a step's time, by what it went to. Their sum is the time from one commit to the next."""

from collections.abc import Mapping
from typing import Final

# While groups are outstanding, the time belongs to the last response of the group that came next.
PARTS: Final[Mapping[str, str]] = {
    "first": "first group: sampling",
    "sampling": "further groups: sampling",
    "tail": "last tenth of groups: sampling",
    "queue": "waiting for a worker, prefill",
    "moves": "moving or parked",
    "tools": "environments and tools",
    "rewards": "rewards",
    "admission": "groups not yet begun",
    "training": "training after the last group",
    "publishing": "publishing the version",
    "asking": "trainer between two steps",
}


def named(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns the parts above 0 with their descriptions, the longest first. Unknown names keep their own."""
    found = [(PARTS.get(name, name), time_s) for name, time_s in parts.items() if time_s > 0.0]
    return sorted(found, key=lambda part: -part[1])
