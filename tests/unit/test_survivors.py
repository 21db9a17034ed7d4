"""Processes that outlive a service are found again by the next one, and no other is taken for one of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.host.command import is_started_so
from dora.host.survivors import Adopted, Survivors, began_of

ARGV = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(ARGV, stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def living(file: Path) -> Survivors:
    return Survivors(file, lambda name: f"{name}".encode().hex())


async def test_a_living_process_is_found_with_its_mark(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    file = tmp_path / "processes.json"
    living(file).note("w0", process.pid)
    assert file.stat().st_mode & 0o777 == 0o600
    later = living(file)
    found = later.find(lambda name, argv: argv == ARGV)
    adopted, mark = found["w0"]
    assert (adopted.pid, mark, adopted.returncode) == (process.pid, b"w0".hex(), None)
    later.note("w1", os.getpid())
    assert set(json.loads(file.read_text())) == {"w0", "w1"}, "who was found stays written down"
    adopted.send_signal(signal.SIGKILL)
    await asyncio.wait_for(adopted.wait(), 20)
    assert adopted.returncode is not None
    adopted.send_signal(signal.SIGKILL)  # nobody gets it


async def test_a_process_that_began_at_another_time_is_another_one(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    with pytest.raises(ProcessLookupError):
        Adopted(process.pid, began_of(process.pid) + 1)
    file = tmp_path / "processes.json"
    living(file).note("w0", process.pid)
    tree = json.loads(file.read_text())
    for changes in ({"began": 1}, {"boot": "another"}, {"pid": "none"}, {"mark": None, "pid": 1 << 22}):
        file.write_text(json.dumps({"w0": tree["w0"] | changes}))
        assert not living(file).find(lambda name, argv: True), changes
    file.write_text(json.dumps(tree))
    assert not living(file).find(lambda name, argv: False), "it is not how a worker is started"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"w0": {}}', '{"w0": null}', "[" * 100_000, "\0", "7"])
async def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path, content: str) -> None:
    file = tmp_path / "processes.json"
    file.write_text(content)
    assert not living(file).find(lambda name, argv: True)


def test_a_worker_is_known_by_its_arguments() -> None:
    assert is_started_so("w0", ["python", "-m", "dora.worker", "--orchestrator", "h:1", "--worker-id", "w0"])
    assert is_started_so("w0", ["python", "-m", "dora.worker", "--wait"])
    assert is_started_so("pool-0", ["python", "-m", "dora.pool", "--pool-id", "pool-0"])
    assert not is_started_so("w0", ["python", "-m", "dora.worker", "--worker-id", "w1"])
    assert not is_started_so("w0", ["python", "-m", "http.server", "w0"])


@pytest.mark.parametrize(
    "changes",
    [
        {"place": "another"},
        {"place": None},
        {"owner": 1, "owner_began": began_of(1)},
        {"owner": "1"},
        {"owner": 0},
        {"owner": 1 << 63},
        {"pid": -1},
        {"pid": 1 << 63},
        {"pid": True},
        {"pid": 1e400},
        {"began": [1]},
        {"mark": "no hex"},
        {"mark": 7},
        {"further": 1},
    ],
    ids=str,
)
async def test_no_process_of_another_service_or_of_a_damaged_entry_is_adopted(
    changes: dict[str, object], tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    file = tmp_path / "processes.json"
    living(file).note("w0", process.pid)
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({"w0": tree["w0"] | changes}))
    assert not living(file).find(lambda name, argv: True)
    file.write_text(json.dumps({"w0": tree["w0"], "w1": None}))
    assert set(living(file).find(lambda name, argv: True)) == {"w0"}
    for name in tree["w0"]:
        file.write_text(json.dumps({"w0": {each: value for each, value in tree["w0"].items() if each != name}}))
        assert not living(file).find(lambda name, argv: True)
