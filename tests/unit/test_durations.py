"""The seconds of tests by folder: every process of a run is counted, and the page has the last run of all folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.snippets import ROOT
from tests.sweeps import some_of

BUSY = """
import subprocess, sys, time
SPIN = "import time\\nwhile time.process_time() < 0.3: pass"
def test_busy(): subprocess.run([sys.executable, "-c", SPIN], check=True)
def test_idle(): time.monotonic()
"""
CONFTEST = """
from tests.durations import Durations
def pytest_configure(config): config.pluginmanager.register(Durations(config))
"""
ROWS = {"tests/unit": [3, 2.0, 1.0], "tests/sim": [1, 1.0, 2000.0]}


@pytest.mark.parametrize("processes", some_of(("0", "2"), "0"))
def test_cpu_of_ended_children_is_counted_in_their_folder(tmp_path: Path, processes: str) -> None:
    for folder in ("slow", "fast"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        name = "busy" if folder == "slow" else "idle"
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(BUSY.replace(f"def test_{name}", "def test_own"))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\npythonpath = {ROOT}\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-n", processes, "-k", "own"]
    subprocess.run(argv, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    run = json.loads((tmp_path / ".pytest_cache" / "v" / durations.KEPT).read_text())
    assert run["rows"].keys() == {"tests/slow", "tests/fast", durations.STARTING}
    assert run["rows"]["tests/slow"][2] >= 0.3 > run["rows"]["tests/fast"][2]
    assert [run["rows"][name][0] for name in ("tests/slow", "tests/fast")] == [1, 1]


def test_the_page_gets_the_last_run_and_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, kept = tmp_path / "page.md", tmp_path / ".pytest_cache" / "v" / durations.KEPT
    monkeypatch.setattr(durations, "PAGE", page)
    monkeypatch.setattr(durations, "ROOT", tmp_path)
    page.write_text(f"before\n{durations.BEGIN}old\n{durations.END}after\n")
    with pytest.raises(SystemExit):
        durations.main()
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"rows": ROWS, "took_s": 90.0, "cores": 2, "at": 0.0}))
    durations.main()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"| all | 4 | 3 | 2,001 |\n{durations.END}after\n")
    assert "1970-01-01: 1.5 minutes" in text and text.index("tests/sim | 1 | 1 | 2,000") < text.index("tests/unit")
