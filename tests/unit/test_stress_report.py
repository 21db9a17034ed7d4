"""The report of a stress run counts what is broken in a record, and nothing in a sound one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.data.run_record import CommittedStep, Recorder
from dora.data.trajectory import Trajectory
from dora.data.types import Segment
from tests.contract.trainer_service import make_trajectory
from tests.promises import Promises, promises
from tests.stress.load import GROUP_SIZE, LONGEST_TOKENS, TURN_TOKENS, write_prompts
from tests.stress.report import MUST_BE_0, whole_report
from tests.stress.run import WINDOW, Seen
from tests.tools import ENVIRONMENT

PROMPTS = {"p0", "p1", "p2"}
SOUND = Promises(trajectories=12, lost=0, duplicated=0, c1_violations=0, c3_violations=0)
Lines = list[Trajectory]
Steps = list[CommittedStep]


def a_run() -> tuple[Lines, Steps, Seen]:
    """Three prompts, one group of each, in two steps."""
    lines = [
        make_trajectory(
            step,
            group,
            sample,
            group_size=GROUP_SIZE,
            group_id=f"g{group}",
            trajectory_id=f"g{group}.{sample}",
            prompt_id=f"p{group}",
            behaviour_version=0,
            staleness=step,
            worker_history=(Segment("w0", 0, 1, "new", 0),),
            response_token_ids=[5, 6],
            logprobs=[-1.0, -1.0],
            loss_mask=[1, 1],
            length_tokens=2,
        )
        for step, group in ((0, 0), (0, 1), (1, 2))
        for sample in range(GROUP_SIZE)
    ]
    steps = [CommittedStep(0, 1, {"g0": 4, "g1": 4}, 1.0), CommittedStep(1, 2, {"g2": 4}, 2.0)]
    return lines, steps, Seen(trained=[(0, ["g0", "g1"]), (1, ["g2"])])


def counted(folder: Path, lines: Lines, steps: Steps, seen: Seen) -> Promises:
    (folder / "weights").mkdir()
    with Recorder(folder / "record") as recorder:
        for step in steps:
            recorder.commit(step, folder / "weights")
    content = "".join(f"{line}\n" for line in map(_json, lines))
    (folder / "record" / "trajectories.jsonl").write_text(content)
    return promises(folder / "record", PROMPTS, seen.trained, WINDOW, GROUP_SIZE)


def _json(trajectory: Trajectory) -> str:
    return json.dumps(trajectory.to_json_dict())


def test_a_sound_run(tmp_path: Path) -> None:
    assert counted(tmp_path, *a_run()) == SOUND


def a_sample_is_missing(lines: Lines, steps: Steps, seen: Seen) -> None:
    del lines[5]


def a_prompt_was_never_committed(lines: Lines, steps: Steps, seen: Seen) -> None:
    del steps[1], seen.trained[1]


def the_trainer_trained_on_more(lines: Lines, steps: Steps, seen: Seen) -> None:
    seen.trained.append((1, ["g9"]))


def two_steps_have_a_group(lines: Lines, steps: Steps, seen: Seen) -> None:
    steps[1] = replace(steps[1], groups={"g1": 4, "g2": 4})


def a_prompt_has_two_groups(lines: Lines, steps: Steps, seen: Seen) -> None:
    lines += [replace(each, group_id="g7", trajectory_id=f"g7.{each.sample_index}") for each in lines[:4]]
    steps[1] = replace(steps[1], groups={"g2": 4, "g7": 4})


def a_line_is_there_twice(lines: Lines, steps: Steps, seen: Seen) -> None:
    lines.append(lines[0])


def a_trajectory_has_two_versions(lines: Lines, steps: Steps, seen: Seen) -> None:
    segments = (Segment("w0", 0, 0, "new", 0), Segment("w1", 1, 1, "migrated", 1))
    lines[0] = replace(lines[0], worker_history=segments)


def a_trajectory_is_too_old(lines: Lines, steps: Steps, seen: Seen) -> None:
    lines[-1] = replace(lines[-1], trained_step=3)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (a_sample_is_missing, {"trajectories": 11, "lost": 1}),
        (a_prompt_was_never_committed, {"trajectories": 8, "lost": 4}),
        (the_trainer_trained_on_more, {"lost": 4}),
        (two_steps_have_a_group, {"duplicated": 4}),
        (a_prompt_has_two_groups, {"trajectories": 16, "duplicated": 4}),
        (a_line_is_there_twice, {"duplicated": 1}),
        (a_trajectory_has_two_versions, {"c1_violations": 1}),
        (a_trajectory_is_too_old, {"c3_violations": 1}),
    ],
)
def test_what_is_broken_is_counted(
    tmp_path: Path, broken: Callable[[Lines, Steps, Seen], None], found: dict[str, int]
) -> None:
    run = a_run()
    broken(*run)
    assert counted(tmp_path, *run) == replace(SOUND, **found)


def test_a_group_of_one_member_is_whole(tmp_path: Path) -> None:
    lines, steps, seen = a_run()
    lines = [each for each in lines if each.prompt_id != "p2" or not each.sample_index]
    assert counted(tmp_path, lines, steps, seen).lost == GROUP_SIZE - 1
    alone = promises(tmp_path / "record", PROMPTS, seen.trained, WINDOW, GROUP_SIZE, {"p2"})
    assert alone == replace(SOUND, trajectories=2 * GROUP_SIZE + 1)


def test_models_are_added_up_and_one_that_stopped_early_is_a_failure() -> None:
    sound: dict[str, Any] = {"trajectories": 8, "failures": [], "migrations_kv": 3, "tokens_reprefilled": 5}
    sound |= dict.fromkeys((*MUST_BE_0, "sessions", "branches", "turns"), 0)
    report = whole_report({"one": sound, "other": {**sound, "trajectories": 7}}, asked=8)
    assert (report["trajectories"], report["migrations_kv"], report["tokens_reprefilled"]) == (15, 6, 10)
    assert report["failures"] == ["other: 7 trajectories instead of 8"]


def test_lengths_have_a_long_tail_and_follow_from_the_seed(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    assert len(write_prompts(first, 500, seed=1, sessions=0.0)) == 500
    write_prompts(again, 500, seed=1, sessions=0.0)
    write_prompts(other, 500, seed=2, sessions=0.0)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    limits = sorted(json.loads(line)["sampling"]["max_tokens"] for line in first.read_text().splitlines())
    assert limits[250] < 50 and limits[-5] > 250 and limits[-1] <= LONGEST_TOKENS


def test_a_share_of_the_prompts_are_sessions(tmp_path: Path) -> None:
    write_prompts(tmp_path / "half", 500, seed=1, sessions=0.5)
    rows = [json.loads(line) for line in (tmp_path / "half").read_text().splitlines()]
    limits = [row["sampling"]["max_tokens"] for row in rows if row.get("environment") == ENVIRONMENT]
    assert 200 < len(limits) < 300 and min(limits) >= TURN_TOKENS[0] and max(limits) <= TURN_TOKENS[1]
