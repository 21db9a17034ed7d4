"""The short form of ``python -m perf.peers``: the table of two peers, on real engines."""

import json
from pathlib import Path

import pytest

from experiments.convergence.page import END
from perf.peers import MARK, main

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SHORT = ("--steps", "3", "--groups", "2", "--group-size", "2", "--longest-tokens", "20", "--json")


def test_the_table_is_made_of_short_runs_and_a_run_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{MARK}\n{END}\n")
    asked = ["--only", "dora-2", "waiting", *SHORT, "--out", str(tmp_path / "out"), "--page", str(page)]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("dora-2", "waiting"):
        assert found[name]["steps"] == 2 and found[name]["samples_s"] > 0
        assert found[name]["mixed_share"] == 0
        assert found[name]["error_max"] < 1e-4
    assert found["waiting"]["staleness"] == 0
    assert "| DORA window 2 |" in page.read_text() and "| loop that waits |" in page.read_text()
    assert main(asked) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == found and "begins" not in captured.err
