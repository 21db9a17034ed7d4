"""The demo's output folder. Clearing it removes only files that a demo writes."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.data.run_record import LINES_FILES, TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.errors import InvalidValue

DEFAULT_OUT: Final = Path("out/demo")


@dataclass(frozen=True, slots=True)
class OutFolder:
    root: Path

    @property
    def record(self) -> Path:
        return self.root / "record"

    @property
    def trajectories(self) -> Path:
        return self.record / TRAJECTORIES_FILE

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def series(self) -> Path:
        return self.root / "series.jsonl"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.png"

    @property
    def page(self) -> Path:
        return self.root / "report.html"

    @property
    def held_out(self) -> Path:
        """The prompts that are evaluated and never trained on."""
        return self.root / "held-out.jsonl"

    @property
    def trained(self) -> Path:
        """The trainer's output, one JSON line per step: evidence independent of the run record."""
        return self.root / "trained.jsonl"

    @property
    def trainer_log(self) -> Path:
        return self.root / "trainer.log"

    @property
    def service_log(self) -> Path:
        return self.root / "service.log"

    @property
    def environment_log(self) -> Path:
        return self.root / "environment.log"

    def clear(self) -> None:
        """Creates the folder, or removes an earlier demo's files. Raises InvalidValue if it is not writable."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            logs = (self.trainer_log, self.service_log, self.environment_log)
            for file in (self.report, self.series, self.timeline, self.page, self.held_out, self.trained, *logs):
                file.unlink(missing_ok=True)
            for name in LINES_FILES:
                (self.record / name).unlink(missing_ok=True)
            for version in (self.record / VERSIONS_FOLDER).glob("*"):
                if version.name.isdigit():
                    shutil.rmtree(version)
        except OSError as error:
            raise InvalidValue("--out", str(self.root), f"a writable folder ({error.strerror})") from error


DEFAULT_RECORD: Final = OutFolder(DEFAULT_OUT).record
