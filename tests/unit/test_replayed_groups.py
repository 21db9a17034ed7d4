"""A commit that names replayed groups: what the service refuses, the record holds, and ``dora verify`` finds."""

import json
from pathlib import Path

import pytest

from dora.data.run_record import CommittedStep, Recorder
from dora.errors import InvalidValue
from dora.ops.verify.committed import groups_replayed, missing
from dora.ops.verify.replays import violations
from dora.ops.view.learning import learning_of
from dora.ops.view.learning_page import facts, page
from dora.orchestrator.services.trainer import checked_replays
from tests.contract.trainer_service import make_group
from tests.refusals import refused

TRAINED = {"s0-g0": 0, "s1-g0": 1}
LAST_STEPS = {"s0-g0": 1, "s1-g0": 2}


@pytest.mark.parametrize(
    ("replayed", "said"),
    [
        ({1: ["s0-g0"], 2: ["s1-g0"]}, []),
        ({2: ["s0-g0"]}, ["step 2 replayed group s0-g0, whose staleness bound ended with step 1 (C3)."]),
        ({1: ["s1-g0"]}, ["step 1 replayed group s1-g0, which no earlier step trained on."]),
        ({1: ["other"]}, ["step 1 replayed group other, which no earlier step trained on."]),
        (
            {1: ["s0-g0"], 2: ["s0-g0", "s1-g0"]},
            [
                "step 2 replayed group s0-g0, whose staleness bound ended with step 1 (C3).",
                "group s0-g0 was replayed in step 1 and in step 2.",
            ],
        ),
    ],
)
def test_a_replay_too_late_too_early_or_twice_is_found(replayed: dict[int, list[str]], said: list[str]) -> None:
    assert list(violations(replayed, TRAINED, LAST_STEPS)) == said


def test_the_service_refuses_names_that_are_no_replays() -> None:
    assert checked_replays(["g1", "g2"], {"g3"}, 2) == ("g1", "g2")
    for names, most in ((["g1", "g2"], 1), (["g3"], 2), (["g1", "g1"], 2), ([""], 2), (["g\n"], 2), (["g" * 129], 2)):
        with refused(InvalidValue, field="replayed_groups"):
            checked_replays(names, {"g3"}, most)


def test_the_record_says_which_groups_were_replayed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    record = tmp_path / "record"
    groups = [make_group(step, 0) for step in range(2)]
    with Recorder(record) as recorder:
        recorder.keep_version(0, model)
        for step, group in enumerate(groups):
            recorder.append(group.trajectories)
            replayed = (groups[0].group_id,) if step else ()
            recorder.commit(CommittedStep(step, step + 1, {group.group_id: 2}, float(step), replayed=replayed), model)
    with Recorder(record) as again:
        assert again.last is not None and again.last.replayed == ("s0-g0",)
    steps, said = missing(record, [each for group in groups for each in group.trajectories])
    assert (steps, list(said), groups_replayed(record)) == (2, [], 1)
    assert [*missing(record, [*groups[0].trajectories, *groups[1].trajectories], 1)[1]] == [
        "step 1 replayed group s0-g0, whose staleness bound ended with step 0 (C3)."
    ]
    run = learning_of(record)
    assert facts(run, 0.0)["groups_replayed"] == 1
    assert [each["groups_replayed"] for each in facts(run, 0.0)["by_step"]] == [0, 1]
    assert "groups trained on once more" in page(run, "run", 0.0, str)

    lines = [json.loads(line) for line in (record / "steps.jsonl").read_text().splitlines()]
    lines[0]["replayed"] = ["s1-g0"]
    (record / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, said = missing(record, [each for group in groups for each in group.trajectories])
    assert list(said) == ["step 0 replayed group s1-g0, which no earlier step trained on."]
