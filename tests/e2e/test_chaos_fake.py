"""The short form of ``make chaos``, with fake engines: each kind of process is killed, and one of each other fault.

``make test`` has a kill and another fault of those.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import ACTIONS, RIVALS, named

FEW = ("kill orchestrator at decoding", "cut from host at decoding")  # moments that come on any machine
FAULTS = (
    "kill source at move:COPYING",
    "kill orchestrator at decoding",
    "kill orchestrator at publishing",
    "cut from host at decoding",
    "cut from host at move:COPYING",
    "kill trainer at committing",
    "kill keeper at scoring",
    "cut to host, until it is lost at decoding",
    "kill pool at park:RESERVED",
    "kill agent at decoding",
    "stop worker at decoding",
    "stall worker at decoding",
    "fill state at decoding",
    "jump orchestrator, a day back at decoding",
    "kill worker at tool time",
    "kill environment at turn",
    "kill front at chat turn",
    "kill front at chat closing",
    "kill orchestrator at chat turn",
    "kill orchestrator at turn",
    "kill orchestrator at tool time",
    "kill pool at tool time in a pool",
    "kill source at idle-move:RESERVED",
    "kill target at idle-move:COMMITTED",
    *(fault.name for fault in RIVALS if fault.whose != "agent"),  # an agent tries for 90 s
)


def test_every_action_is_among_them() -> None:
    assert {named(each)[0].action for each in FAULTS} == set(ACTIONS) and set(FEW) < set(FAULTS)


@pytest.mark.timeout(900)  # a dozen faults, after each of which all has to be as before
@pytest.mark.parametrize(
    ("faults", "kills"), [pytest.param(FEW, 1, id="few"), pytest.param(FAULTS, 4, marks=pytest.mark.full, id="more")]
)
def test_killed_stopped_cut_off_full_and_out_of_time_nothing_is_lost(
    tmp_path: Path, faults: tuple[str, ...], kills: int
) -> None:
    argv = [sys.executable, "-m", "tests.chaos", "--only", ";".join(faults), "--out", str(tmp_path)]
    assert subprocess.run(argv, check=False).returncode == 0  # it goes into a network namespace of its own
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    possible = [each for each in faults if each.partition(" ")[0] not in report["left_out"]]
    assert report["kills"] + report["faults"] + len(report["missed"]) == len(possible)
    assert report["kills"] >= kills, "a moment may be too short to be seen on a busy machine, and is told then"
    drawn = {action for action, count in report["fault_counts"].items() if count}
    assert drawn == {named(each)[0].action for each in faults} - set(report["left_out"])
    assert report["sessions"] and report["turns"] >= 2 * report["sessions"] and report["chats"]
    assert report["branches"] > report["sessions"] and report["groups_opened"] > report["chats"]
    assert bool(report["packets_cut"]) == ("cut" in drawn), "what is cut was in use"
