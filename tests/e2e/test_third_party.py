"""The strategy that docs/simulator.md shows, as a package of somebody else's: simulator, sweep and service know it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dora
from dora.core.policies import POLICIES, Strategy, register
from dora.core.policies.batch import SyncPolicy
from dora.errors import Conflict, InvalidValue
from dora.orchestrator.plugins import load_strategies
from tests.refusals import refused
from tests.service import check_promises, configured, running, train
from tests.snippets import snippet

NAME = "newest_only"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder where the documented strategy is installed."""
    (point,) = re.findall(rf'^{NAME} = "(.*)"$', snippet("docs/simulator.md", NAME, "toml"), re.MULTILINE)
    return installed(tmp_path, snippet("docs/simulator.md", "NewestOnlyPolicy"), point)


def installed(folder: Path, code: str, point: str, name: str = NAME) -> Path:
    (folder / f"{NAME}.py").write_text(code, encoding="utf-8")
    meta = folder / f"{NAME}-1.0.dist-info"
    meta.mkdir(exist_ok=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: newest-only\nVersion: 1.0\n", encoding="utf-8")
    (meta / "entry_points.txt").write_text(f"[dora.policies]\n{name} = {point}\n", encoding="utf-8")
    return folder


@pytest.fixture
def known() -> Iterator[None]:
    """Forgets what a test registers, and looks for installed entries again."""
    before = dict(POLICIES)
    load_strategies.cache_clear()
    yield
    load_strategies.cache_clear()
    POLICIES.clear()
    POLICIES.update(before)


def command(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.run(
        [sys.executable, "-m", "dora", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_simulator_runs_it_and_names_it(package: Path) -> None:
    done = command(package, "simulate", "--preset", "small", "--policy", NAME, "--steps", "4", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["policy"] == NAME
    assert (report["violations"], report["lost"], report["duplicated"]) == (0, 0, 0)
    assert (
        "did you mean newest_only" in command(package, "simulate", "--preset", "small", "--policy", "newest_onl").stderr
    )


@pytest.mark.parametrize("seeds", [8, pytest.param(60, marks=pytest.mark.full)])
def test_the_sweep_tries_it_in_several_processes(package: Path, seeds: int) -> None:
    done = command(package, "simulate", "sweep", "--policy", NAME, "--seeds", str(seeds), "--jobs", "2", "--json")
    assert json.loads(done.stdout) == {
        "seeds": seeds, "violations": 0, "lost": 0, "duplicated": 0, "stalled": 0, "failures": []
    }  # fmt: skip


@pytest.mark.usefixtures("known")
async def test_the_service_runs_it(package: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    fake = configured(tiny_dense, window__size=2, balance__policy=NAME, workers__engine="fake")
    async with running(fake) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        check_promises(await train(handle, trainer, steps=3, groups=4), window=2, groups=4)
    assert NAME in POLICIES


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("code", "point", "name", "kind", "reason"),
    [
        (
            "",
            f"{NAME}:Missing",
            "mine",
            InvalidValue,
            "AttributeError",
        ),
        ("1 / 0", f"{NAME}:Missing", "mine", InvalidValue, "ZeroDivisionError"),
        ("Policy = 3", f"{NAME}:Policy", "mine", InvalidValue, "Strategy"),
        ("class Policy: ...", f"{NAME}:Policy", "dora", Conflict, "name"),
        ("class Policy: ...", f"{NAME}:Policy", "my-own", InvalidValue, "digits"),
    ],
)
def test_what_is_no_strategy_is_told_with_its_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    point: str,
    name: str,
    kind: type[InvalidValue],
    reason: str,
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, code, point, name))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with refused(kind, field=f"dora.policies: {name}, of newest-only", value=point, names=(reason,)):
        load_strategies()


@pytest.mark.usefixtures("known")
def test_a_strategy_is_registered_once_under_one_name() -> None:
    register("mine", Strategy(SyncPolicy, windows=(1, 2)))
    register("mine", Strategy(SyncPolicy, windows=(1, 2)))
    with refused(Conflict, field="policy", value="mine"):
        register("mine", SyncPolicy)
    with refused(InvalidValue, names=("0", "65", "1", "64")):
        Strategy(SyncPolicy, windows=(0, 65))
