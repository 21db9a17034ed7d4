"""Transports and launchers are found by name, and unknown names are refused with those that exist."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dora.config import validated
from dora.errors import InvalidValue
from dora.host import launchers
from dora.host.launchers import launcher_named
from dora.host.processes import Processes
from dora.kvtransfer.transports.registry import TRANSPORTS, check_transports, installed, is_installed
from dora.orchestrator.setup import check_engine
from tests.refusals import refused


class Elsewhere(Processes):
    """A launcher of another package."""


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("elsewhere", "tests.unit.test_registries:Elsewhere", launchers.GROUP),
        EntryPoint("broken", "tests.unit.no_such_module:Launcher", launchers.GROUP),
    ]
    monkeypatch.setattr(launchers, "entry_points", lambda group: points if group == launchers.GROUP else [])


@pytest.mark.usefixtures("entry_points")
def test_a_launcher_is_chosen_by_name() -> None:
    assert launcher_named("processes") is Processes
    assert launcher_named("elsewhere").__name__ == "Elsewhere"
    with refused(InvalidValue, field="workers.launcher", value="slurm", names=("processes", "elsewhere", "broken")):
        launcher_named("slurm")
    with refused(InvalidValue, field="workers.launcher", value="broken", names=("no_such_module",)):
        launcher_named("broken")


def test_every_transport_has_one_entry() -> None:
    assert set(installed()) == {name for name in TRANSPORTS if is_installed(name)} >= {"shm", "tcp"}
    assert not is_installed("pigeon")
    check_transports(",".join(TRANSPORTS))


def test_unknown_names_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    fake = {"engine": "fake"}
    check_engine(validated({"workers": fake}))
    with refused(InvalidValue, field="kv.transports", value="shm,tpc", names=("tcp", "nixl")):
        check_engine(validated({"workers": fake, "kv": {"transports": "shm,tpc"}}))
    with refused(InvalidValue, field="workers.launcher", value="slurm"):
        check_engine(validated({"workers": {**fake, "launcher": "slurm"}}))
