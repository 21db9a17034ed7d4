"""``dora trajectories --show``: a recorded session as people read it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.data.conversation import INPUT, PROMPT, SAMPLED, conversation_of, find_session
from dora.data.trajectory import Trajectory
from dora.data.types import EnvironmentEvent, Segment
from dora.errors import InvalidValue, NotFound
from dora.models.tiny_vocabulary import VOCABULARY
from dora.ops.cli.control.service import DEMO_RECORD
from dora.ops.cli.exits import ExitCode
from dora.ops.demo.folder import DEFAULT_RECORD
from dora.ops.view.conversation import conversation_lines
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused
from tests.unit.cli.service import dora

SESSION = "g3.1"
TOOL = "look\x1b[2Jup"


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(each) for each in text]


def given(position: int, name: str, at: float) -> EnvironmentEvent:
    return EnvironmentEvent(position, INPUT, name, "", at)


def recorded(trajectory_id: str, tokens: list[int], mask: list[int], **changes: Any) -> Trajectory:
    base = make_trajectory(5, 0, 1)
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id, "group_id": "g3", "response_token_ids": tokens, "loss_mask": mask,
        "logprobs": [-1.0 if each else 0.0 for each in mask], "length_tokens": len(tokens), "started_at": 10.0,
        "finished_at": 14.0,
        "worker_history": (Segment("w0", 0, 3, "new", 5), Segment("w1", 4, len(tokens) - 1, "migrated", 5)),
        "verifier_log": "fine\x1b[1m\n", "turn_rewards": {"4": 0.5},
    }  # fmt: skip
    return replace(base, **{**values, **changes})


@pytest.fixture
def branches() -> list[Trajectory]:
    """A session of three turns, and a fork after its first turn."""
    whole = [*ids("abc"), 4, *ids("12?!x")]
    events = (given(0, "reset", 10.5), given(4, TOOL, 11.0), given(8, "step", 12.0))
    other = ids("abc.z")
    return [
        recorded(SESSION, whole, [1, 1, 1, 0, 1, 1, 0, 0, 1], events=events),
        recorded(
            f"{SESSION}/1", other, [0, 0, 0, 0, 1], events=(events[0], given(4, "step", 13.0)), branch_index=1,
            shared_prefix_tokens=3, turn_rewards={},
        ),
    ]  # fmt: skip


@pytest.fixture
def record(tmp_path: Path, branches: list[Trajectory]) -> Path:
    others = [make_trajectory(0, 0, 0), recorded("g3.10", ids("a" * 5), [1] * 5)]
    lines = [json.dumps(each.to_json_dict()) for each in (others[0], branches[1], others[1], branches[0])]
    (tmp_path / "trajectories.jsonl").write_text("\n".join([*lines, '{"trajectory_id": "g3.1/2", "torn']))
    return tmp_path


def test_a_session_is_found_with_all_of_its_branches(record: Path) -> None:
    for name in (SESSION, f"{SESSION}/1"):
        assert [each.trajectory_id for each in find_session(record, name)] == [SESSION, f"{SESSION}/1"]
    with refused(NotFound, field="--show", value="g3.7", names=["g3.1", "g3.10"]):
        find_session(record, "g3.7")
    with refused(InvalidValue, field="--record"):
        find_session(record / "elsewhere", SESSION)


def test_turns_name_their_speakers_times_and_rewards(branches: list[Trajectory]) -> None:
    found = conversation_of(branches, None)
    assert [
        (each.speaker, each.name, each.turn, each.first_token, len(each.token_ids), each.after_s, each.reward)
        for each in found.branches[0].turns
    ] == [
        (PROMPT, "reset", None, 0, 2, 0.5, None),
        (SAMPLED, "", 0, 0, 3, None, None),
        (INPUT, TOOL, None, 3, 1, 1.0, None),
        (SAMPLED, "", 1, 4, 2, None, 0.5),
        (INPUT, "step", None, 6, 2, 2.0, None),
        (SAMPLED, "", 2, 8, 1, None, None),
    ]
    assert [each.workers for each in found.branches[0].turns if each.speaker == SAMPLED] == [("w0",), ("w1",), ("w1",)]


def test_turns_have_the_sampling_that_is_their_own(branches: list[Trajectory]) -> None:
    own = replace(branches[0].sampling, seed=99, stop=("\x1b[",))
    found = conversation_of([replace(branches[0], turn_sampling={"4": own})], None)
    (branch,) = found.branches
    sampled = [turn.sampling for turn in branch.turns if turn.speaker == SAMPLED]
    assert sampled == [{}, {"seed": 99, "stop": ("\x1b[",)}, {}]
    lines = [each.plain for each in conversation_lines(found) if "sampled with" in each.plain]
    assert len(lines) == 1 and 'sampled with seed 99, stop ["\\u001b["]' in lines[0]


def test_a_fork_knows_what_was_sampled_of_the_tokens_that_it_shares(branches: list[Trajectory]) -> None:
    turns = conversation_of(branches, None).branches[1].turns
    assert [(each.speaker, each.first_token, len(each.token_ids)) for each in turns] == [
        (PROMPT, 0, 2), (SAMPLED, 0, 3), (INPUT, 3, 1), (SAMPLED, 4, 1),
    ]  # fmt: skip


def test_a_single_answer_is_a_prompt_and_a_turn() -> None:
    (branch,) = conversation_of([make_trajectory(0, 0, 0)], None).branches
    assert [each.speaker for each in branch.turns] == [PROMPT, SAMPLED]


def test_the_command_shows_texts_with_escapes(record: Path, tiny_dense: Path) -> None:
    (record / "versions").mkdir()
    (record / "versions" / "0").symlink_to(tiny_dense)  # its own version is gone
    shown = dora("trajectories", "--show", SESSION, "--record", str(record))
    assert shown.exit_code == ExitCode.OK and "\x1b" not in shown.stdout and not shown.stderr
    text = " ".join(shown.stdout.split())
    for part in (
        "version v5, trained in step 5", "reward 1, format 0.5", r"verdict fine\x1b[1m\n",
        r"sampled 0 on w0, 3 tokens abc given by look\x1b[2Jup after 1.0 s, 1 token DIGITS sampled 1 on w1",
        "2 tokens, reward 0.5 12", "w1 had tokens 4 to 8 (migrated)", "branch 1, g3.1/1: its first 3 tokens",
    ):  # fmt: skip
        assert part in text
    assert text.count("abc") == 1, "tokens that branches share are shown once"


def test_the_command_shows_token_ids_without_a_tokenizer(record: Path) -> None:
    shown = dora("trajectories", "--show", SESSION, "--record", str(record))
    assert shown.exit_code == ExitCode.OK and "no tokenizer" in shown.stderr
    assert " ".join(map(str, ids("abc"))) in shown.stdout
    tree = json.loads(dora("trajectories", "--show", SESSION, "--record", str(record), "--json").stdout)
    assert tree["session_id"] == SESSION and len(tree["branches"]) == 2
    assert (
        tree["branches"][0]["turns"][1]["token_ids"] == ids("abc") and tree["branches"][0]["turns"][1]["text"] is None
    )
    assert DEMO_RECORD == DEFAULT_RECORD, "the command that the demo prints needs no --record"
    unknown = dora("trajectories", "--show", "g9.9", "--record", str(record))
    assert unknown.exit_code == ExitCode.REFUSED
