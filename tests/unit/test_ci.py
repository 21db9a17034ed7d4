"""Whether CI runs the tests of the Megatron trainer: where what they depend on has changed, or nobody can say."""

import subprocess
from pathlib import Path

import pytest

from tests.snippets import ROOT

SCRIPT = ROOT / ".ci" / "needs-megatron"
IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "README.md")
    return tmp_path


def needs_megatron(folder: Path) -> bool:
    done = subprocess.run([SCRIPT], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stdout.startswith("Megatron: "), done.stderr
    return done.returncode == 0


def test_without_a_base_it_is_tested(repository: Path) -> None:
    assert needs_megatron(repository)


@pytest.mark.parametrize(("changed", "needed"), [("dora/trainers/grpo.py", True), ("dora/lab/sim/world.py", False)])
def test_a_change_is_counted_from_the_last_tag(repository: Path, changed: str, needed: bool) -> None:
    git(repository, "tag", "v1")
    commit(repository, changed)
    assert needs_megatron(repository) == needed


@pytest.mark.parametrize(("changed", "needed"), [("dora/rpc/dora.proto", True), ("docs/clusters.md", False)])
def test_a_branch_is_compared_with_the_main_one(repository: Path, changed: str, needed: bool) -> None:
    git(repository, "tag", "v1")
    commit(repository, "dora/trainers/learner.py")
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert needs_megatron(repository), "on the main branch itself the last tag is compared with"
    commit(repository, changed)
    assert needs_megatron(repository) == needed


def test_a_file_that_is_not_committed_counts(repository: Path) -> None:
    git(repository, "tag", "v1")
    (repository / "dora" / "trainers").mkdir(parents=True)
    (repository / "dora" / "trainers" / "new.py").touch()
    assert needs_megatron(repository)
