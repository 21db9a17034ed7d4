"""A record that lacks anything of what was committed is found out, whoever has cut it."""

import json
import os
from pathlib import Path

from dora.data.run_record import CANCELLED_FILE, STEPS_FILE, TRAJECTORIES_FILE, CommittedStep, Recorder
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing
from tests.contract.trainer_service import make_group


def recorded(folder: Path, tiny_dense: Path, steps: int = 3) -> list[str]:
    """A record of so many committed steps of two groups each, and of a step that was not committed."""
    with Recorder(folder) as recorder:
        recorder.keep_version(0, tiny_dense)
        for step in range(steps + 1):
            groups = [make_group(step, number) for number in range(2)]
            for group in groups:
                recorder.append(group.trajectories)
            if step < steps:
                counts = {group.group_id: len(group.trajectories) for group in groups}
                recorder.commit(CommittedStep(step, step + 1, counts, 1.0), tiny_dense)
    return found(folder)


def found(folder: Path) -> list[str]:
    return list(missing(folder, read_trajectories(folder / TRAJECTORIES_FILE))[1])


def test_a_record_that_lacks_what_was_committed_is_found_out(tmp_path: Path, tiny_dense: Path) -> None:
    assert not recorded(tmp_path, tiny_dense)
    whole = (tmp_path / TRAJECTORIES_FILE).read_bytes().splitlines(keepends=True)
    steps = (tmp_path / STEPS_FILE).read_bytes().splitlines(keepends=True)
    for cut in (1, 2, 6, 12):  # of 16 lines, 4 a step
        (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole[:-cut]))
        assert bool(found(tmp_path)) == (cut > 4), cut
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole[4:]))
    assert "step 0 was committed, and the record lacks groups of it: s0-g0 (0 of 2 trajectories)" in found(tmp_path)[0]
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole)[:-30])
    assert not found(tmp_path), "a torn line at the end was never acknowledged"
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole))
    for kept, complaint in (
        (steps[:2], "though step 2 was not committed"),
        (steps[1:], "step 0 is missing"),
        (steps[:1] + steps[2:], "step 1 is missing"),
        ([], "though step 0 was not committed"),
        ([steps[0], steps[1].replace(b"s1-g1", b"s1-g0"), steps[2]], "committed without it"),
        ([steps[0], steps[1].replace(b"s1-g1", b"s0-g1"), steps[2]], "in step 0 and in step 1"),
        ([*steps, steps[2]], ""),
    ):
        (tmp_path / STEPS_FILE).write_bytes(b"".join(kept))
        assert complaint in " ".join(found(tmp_path)) and bool(complaint) == bool(found(tmp_path)), kept
    (tmp_path / STEPS_FILE).unlink()
    (lacks,) = found(tmp_path)
    assert lacks == f"{STEPS_FILE} is missing: the record does not say which steps published versions [1, 2, 3]."


def test_a_cancelled_groups_lines_are_no_violation(tmp_path: Path, tiny_dense: Path) -> None:
    recorded(tmp_path, tiny_dense)
    with Recorder(tmp_path) as recorder:
        recorder.append(make_group(0, 5).trajectories)
    assert found(tmp_path) == ["group s0-g5 is recorded of step 0, which was committed without it."]
    (tmp_path / CANCELLED_FILE).write_text(json.dumps({"group_id": "s0-g5"}) + "\n")
    assert not found(tmp_path)
    os.rename(tmp_path / "versions" / "2", tmp_path / "elsewhere")
    assert found(tmp_path) == ["version 2, which step 1 published, is not in the record."]


def test_a_version_that_workers_rejected_is_no_violation_nor_one_published_anew(
    tmp_path: Path, tiny_dense: Path
) -> None:
    recorded(tmp_path, tiny_dense)
    with Recorder(tmp_path) as recorder:
        recorder.drop_version(3)
        assert not (tmp_path / "versions" / "3").exists() and not found(tmp_path)
        recorder.republish(3, tiny_dense, b"other")
        assert not found(tmp_path)
    os.rename(tmp_path / "versions" / "3", tmp_path / "elsewhere")
    assert found(tmp_path) == ["version 3, which step 2 published, is not in the record."]
