"""``python -m perf.all``: which benchmarks it knows, what it stores, which rows it marks, what it says of failures."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perf import all as program
from perf.all import END, MARK, OLDER, NotMeasured, is_older, main, markdown, measured, stored
from perf.benchmarks import BENCHMARKS, Benchmark, Figure

PARTS = {"all.py", "peers.py", "peer_dora.py", "peer_loops.py", "peer_trl.py", "stream_peer.py"}  # peers.md's, and ours
ONE = Benchmark(
    "one",
    """-c 'import json; print(json.dumps({"rows": [{"x": 0.5}]}))'""",
    "",
    ("code",),
    (Figure("half", "rows.0.x", ">= 0.6"),),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one benchmark, an empty page and no rows."""
    for name, path in (("ROOT", ""), ("ROWS", "rows.jsonl"), ("PAGE", "page.md")):
        monkeypatch.setattr(program, name, tmp_path / path)
    monkeypatch.setattr(program, "BENCHMARKS", (ONE,))
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "page.md").write_text(f"before\n{MARK}\n{END}\nafter\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "first")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def commit(folder: Path, text: str) -> None:
    (folder / "code").write_text(text)
    git(folder, "add", "code")
    git(folder, "commit", "--quiet", "-m", text)


def test_every_program_of_the_folder_is_a_benchmark() -> None:
    programs = {file.name for file in (program.ROOT / "perf").glob("*.py") if "__main__" in file.read_text()}
    commands = " ".join(each.command.replace("-m perf.", "perf/").replace(" --", ".py --") for each in BENCHMARKS)
    assert {name for name in programs - PARTS if f"perf/{name}" not in commands} == set()


def test_names_are_unique_and_what_is_measured_exists() -> None:
    titles = [figure.title for each in BENCHMARKS for figure in each.figures]
    assert len(set(titles)) == len(titles) and len({each.name for each in BENCHMARKS}) == len(BENCHMARKS)
    assert [path for each in BENCHMARKS for path in each.measures if not (program.ROOT / path).exists()] == []


def test_the_page_has_the_rows_that_are_stored() -> None:
    page = program.PAGE.read_text()
    table = page[page.index(MARK) + len(MARK) : page.index(END)]
    assert table.strip().replace(OLDER, "") == markdown(stored()).replace(OLDER, "")


def test_a_measurement_is_stored_and_written_and_marked_once_the_code_has_changed(place: Path) -> None:
    assert main(["--only", "one"]) == 0 and main(["--check"]) == 0
    page = (place / "page.md").read_text()
    assert "| half | **0.50** | at least 0.60 | `one` |" in page and OLDER not in page
    assert page.startswith("before\n") and page.endswith("after\n")
    git(place, "commit", "--quiet", "--allow-empty", "-m", "of other code")
    assert main(["--check"]) == 0
    commit(place, "second")
    assert main(["--check"]) == 1 and OLDER in (place / "page.md").read_text()


def test_a_row_of_uncommitted_or_unknown_code_is_old(place: Path) -> None:
    (place / "code").write_text("not committed")
    assert main([]) == 0 and is_older(ONE, stored()["one"])
    assert is_older(ONE, {"commit": "0123456789"})


def test_the_short_form_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--short", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"one": {"half": 0.5}}
    assert stored() == {} and OLDER not in (place / "page.md").read_text()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no engine')", "exit code 1.*no engine"),
        ("print({})", "KeyError"),
        ('print(\'{"rows": [{"x": NaN}]}\')', "no numbers"),
    ],
)
def test_what_cannot_be_measured_fails(code: str, why: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing: Any = Benchmark("one", f"-c {program.shlex.quote(code)}", "", (), ONE.figures)
    with pytest.raises(NotMeasured) as found:
        measured(failing)
    assert re.search(why, str(found.value), re.DOTALL)
    monkeypatch.setattr(program, "BENCHMARKS", (failing,))
    assert main([]) == 1 and stored() == {}
