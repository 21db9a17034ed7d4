"""Clients that are opened again, in threads, after forks, at the interpreter's end: nothing on stderr, exit code 0."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.reopening import PROGRAMS, of_a_service_that_dies
from tests.contract.test_sync_client import model_folder, served, service, weights
from tests.contract.trainer_service import TOKEN, Running

__all__ = ["model_folder", "service", "weights"]
SHORT = 4  # of them, in `make test`; each takes a process
LIMIT_S = 60.0


def programs() -> Iterator[object]:
    for number, program in enumerate(PROGRAMS):
        yield pytest.param(program, marks=() if number < SHORT else pytest.mark.full, id=program.__name__)


@pytest.mark.parametrize("program", [*programs()])
def test_clients_that_are_opened_again_say_nothing(
    program: Callable[[], None], tmp_path: Path, model_folder: Path, weights: Path
) -> None:
    with served(tmp_path / "store", model_folder) as running:
        ended = run(program, running, weights)
    assert (ended.stderr, ended.returncode) == ("", 0)


def run(program: Callable[[], None], running: Running, weights: Path) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "tests.contract.reopening", program.__name__, running.address, TOKEN, str(weights)]
    pipe = subprocess.PIPE
    quiet = os.environ | {"GRPC_VERBOSITY": "ERROR"}  # gRPC notes the end of a connection on stderr
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=quiet
    ) as process:
        assert process.stdout is not None
        if program is of_a_service_that_dies:
            process.stdout.readline()
            running.end()
        try:
            said, complaint = process.communicate("\n", LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, said, complaint)
