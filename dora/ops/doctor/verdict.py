"""The subject of a stage, its verdict, and the exceptions by which it is skipped or fails."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a check: a kind of device, a model's folder, and an empty folder for files."""

    device: str
    model: Path
    folder: Path


class Skipped(Exception):
    """The stage does not apply to this machine; the text gives the reason."""


class Failed(Exception):
    """The stage found a fault; the text describes it, and ``found`` holds what was measured."""

    def __init__(self, text: str, **found: Any) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage. ``said`` is why it failed or was skipped, ``found`` what it measured, for programs.

    A failure also has its ``traceback``, the last lines of each log, and the folder that keeps all of its files.
    """

    stage: str
    outcome: Outcome
    said: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    traceback: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    folder: str = ""
