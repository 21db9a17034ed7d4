"""The host's memory, and the versions that have to fit into it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dora.config import Config, validated
from dora.errors import LimitExceeded
from dora.orchestrator.version_memory import size_of, version_memory
from dora.system.memory import available_bytes, is_in_memory, memory_bytes
from dora.weights.reference import Reference, TensorHeader
from tests.refusals import refused

MIB = 1 << 20
SHARED = Path("/dev/shm")
MACHINE = {"MemTotal": 1000, "MemAvailable": 800}  # MiB

# Control group files by their folder: limit, use, and pages of files that were not used lately, in MiB.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CASES: dict[str, tuple[str, Mapping[str, tuple[object, int, int]], tuple[int, int]]] = {
    "no group": ("", {}, (1000, 800)),
    "no limit": ("0::/a/b", {"": ("max", 10, 0), "a": ("max", 10, 0), "a/b": ("max", 10, 0)}, (1000, 800)),
    "own limit": ("0::/a/b", {"a": ("max", 300, 0), "a/b": (500, 300, 100)}, (500, 300)),
    "a parent's limit": ("0::/a/b", {"a": (400, 350, 0), "a/b": (500, 300, 0)}, (400, 50)),
    "a container's root": ("0::/", {"": (256, 300, 20)}, (256, 0)),
    "a folder outside of the container": ("0::/../../x", {"": (256, 56, 0)}, (256, 200)),
    "a limit above the machine's memory": ("0::/a", {"a": (5000, 100, 0)}, (1000, 800)),
    "version 1": ("4:cpu:/c\n3:memory,hugetlb:/a", {"memory/a": (512, 200, 50)}, (512, 362)),
    "version 1 without a limit": ("3:memory:/a", {"memory/a": ((1 << 63) // MIB, 200, 50)}, (1000, 800)),
}


def machine(base: Path, case: str) -> tuple[Path, Path]:
    """Makes /proc and /sys/fs/cgroup."""
    proc, groups = base / "proc", base / "cgroup"
    text, folders, _ = CASES[case]
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("".join(f"{name}: {size * 1024} kB\n" for name, size in MACHINE.items()))
    (proc / "self" / "cgroup").write_text(text and f"{text}\n")
    for folder, (limit, used, unused) in folders.items():
        names = V1 if folder.startswith("memory") else V2
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / names[0]).write_text(f"{limit if limit == 'max' else int(str(limit)) * MIB}\n")
        (groups / folder / names[1]).write_text(f"{used * MIB}\n")
        (groups / folder / "memory.stat").write_text(f"anon 5\n{names[2]} {unused * MIB}\n")
    return proc, groups


@pytest.mark.parametrize("case", CASES)
def test_memory_is_the_machines_within_the_limits_of_control_groups(tmp_path: Path, case: str) -> None:
    found = machine(tmp_path, case)
    assert (memory_bytes(*found) // MIB, available_bytes(*found) // MIB) == CASES[case][2]


def test_a_machine_without_control_groups_has_its_memory(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "no group")
    (proc / "self" / "cgroup").unlink()
    assert memory_bytes(proc, groups) == 1000 * MIB


def test_a_folder_is_in_memory_if_the_last_mount_above_it_is(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    place, inner = tmp_path / "a b", tmp_path / "a b" / "disk"
    inner.mkdir(parents=True)
    mounts = [("/", "ext4"), (str(place).replace(" ", "\\040"), "tmpfs"), (str(inner).replace(" ", "\\040"), "xfs")]
    lines = [f"1 0 0:1 / {path} rw,nosuid shared:1 - {kind} none rw" for path, kind in mounts]
    (tmp_path / "self" / "mountinfo").write_text("\n".join(lines))
    assert not is_in_memory(Path("/"), tmp_path)
    assert is_in_memory(place, tmp_path)
    assert not is_in_memory(inner, tmp_path)


def config_of(window: int, **service: int) -> Config:
    return validated({"window": {"size": window}, "service": service})


def model_of(gigabytes: int) -> Reference:
    return Reference(Path(), (), (TensorHeader("w", "BF16", (gigabytes * 10**9 // 2,)),), 10)


@pytest.mark.parametrize(("window", "held", "fitting"), [(1, 3, 1), (3, 5, 1), (2, 4, 2), (2, 4, 3)])
def test_versions_that_cannot_fit_are_refused_with_both_numbers(
    tmp_path: Path, window: int, held: int, fitting: int
) -> None:
    limit = 65 * 10**9 * fitting + 2**30
    memory = replace(version_memory(config_of(window), model_of(65), tmp_path / "not" / "made"), limit_bytes=limit)
    names = [memory.needed_bytes, limit, fitting]
    with refused(LimitExceeded, field="service.weight_versions", value=held, names=names):
        memory.check()
    assert "65 GB" in str(memory)
    fewer = version_memory(config_of(window, weight_versions=fitting), model_of(65), tmp_path)
    replace(fewer, limit_bytes=limit).check()


def test_versions_on_a_disk_are_not_refused_for_memory(tmp_path: Path) -> None:
    memory = replace(version_memory(config_of(2), model_of(10**6), tmp_path), limit_bytes=0)
    memory.check()
    assert "disk" in str(memory)


def test_a_small_file_system_in_memory_is_a_limit_too() -> None:
    """As a container's /dev/shm."""
    found = version_memory(config_of(2), model_of(1), SHARED).limit_bytes
    assert found == (min(memory_bytes(), size_of(SHARED)) if is_in_memory(SHARED) else 0)
