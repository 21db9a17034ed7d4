"""State, record, prompts, reward, filter and model of different times, or of another run: generated.

Each seed draws one copy of each from a run's past, and names what it drew. A start takes those that fit, refuses the
others with both sides, and carries on deliberately without losing or doubling a line.
"""

import json
import random
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from dora.config import Config, validated
from dora.data.record_content import RecordContent
from dora.data.record_run import RUN_FILE
from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE, CommittedStep, Recorder
from dora.data.types import Prompt
from dora.errors import MISSING, InvalidValue
from dora.journal import records
from dora.journal.log import DEFAULT_SIZES
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.recovery.binding import NotOfOneTime, bind, check_binding, content_of
from dora.orchestrator.recovery.state_folder import reading_state, state_folder_of
from dora.orchestrator.starting import journal_of
from tests.contract.trainer_service import make_group
from tests.refusals import refused
from tests.sweeps import tenth_of

STEPS = 5
SEEDS = 24
CONTENT = ("prompts", "reward", "filter", "model")
AGES = {"commits", "state is older", "record is older", "record was removed", TRAJECTORIES_FILE}


class Run:
    """One run in ``root``, with copies of its state and record at each step in ``root/past/<step>``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = count(1.0, 0.125)
        root.mkdir()
        (root / "model").mkdir()
        self.write("prompts", "old")
        self.write("reward", "old")
        self.write("filter", "old")
        self.write("model", "old")

    def config(self, carry_on_from: int = -1) -> Config:
        sections: dict[str, object] = {
            "model": str(self.root / "model"),
            "prompts": str(self.root / "prompts.jsonl"),
            "reward": {"function": f"{self.root.name}_reward:score"},
            "selection": {"filter": f"{self.root.name}_filter:keep"},
            "record": str(self.root / "record"),
            "service": {"state": str(self.root / "state"), "carry_on_from": carry_on_from},
        }
        return validated(sections)

    def write(self, what: str, text: str) -> None:
        """Gives a file that the run depends on another content."""
        name = {"prompts": "prompts.jsonl", "model": "model/config.json"}.get(what, f"{self.root.name}_{what}.py")
        (self.root / name).write_text(text)

    async def start(self, steps: range, *, carry_on_from: int = -1) -> None:
        """A service starts, commits these steps, and stops. Before, a dry run says the same and changes nothing."""
        before, told = files(self.root), self.dry(carry_on_from)
        assert files(self.root) == before
        try:
            await self._start(steps, carry_on_from)
        except InvalidValue as error:
            assert told == str(error)
            raise
        assert not told

    def dry(self, carry_on_from: int) -> str:
        """The refusal of a dry run; empty: there is none."""
        config = self.config(carry_on_from)
        try:
            with reading_state(config, DEFAULT_SIZES) as state:
                assert state is not None
                content = content_of(config, self.root / "model", config.reward.function)
                check_binding(config, state, RecordContent(self.root / "record"), content)
        except InvalidValue as error:
            return str(error)
        return ""

    async def _start(self, steps: range, carry_on_from: int) -> None:
        config = self.config(carry_on_from)
        with state_folder_of(config, DEFAULT_SIZES) as state:
            assert state is not None
            opened = None
            try:
                opened = Recorder(self.root / "record")
                function = config.reward.function
                recorder = await bind(config, state, opened, content_of(config, self.root / "model", function))
            finally:
                if opened is not None:
                    opened.close()
            assert recorder is not None
            journal = journal_of(config, state, Storage())
            life = state.found.durable.incarnation + 1
            journal.note(records.Begun(life, 1.0, 2.0, config.model_dump_json(exclude={"service": {"token"}})))
            with Recorder(self.root / "record") as recorder:
                for step in steps:
                    committed = commit(recorder, step, self.root / "model", at=random.random())
                    journal.note(records.Committed(step, b"digest", committed.committed_at, {}, ""))
                    journal.note(records.Retired(step + 1, keeps=False))
            await journal.close()

    def keep(self, step: int) -> None:
        for name in ("state", "record"):
            shutil.copytree(self.root / name, self.root / "past" / str(step) / name)

    def put(self, name: str, folder: Path) -> None:
        shutil.rmtree(self.root / name)
        shutil.copytree(folder, self.root / name)

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.lines(STEPS_FILE)]

    def lines(self, name: str) -> list[str]:
        return (self.root / "record" / name).read_text().splitlines()

    def all_lines(self) -> list[str]:
        """Returns the record's lines, with those that were set aside."""
        files = sorted((self.root / "record").rglob(TRAJECTORIES_FILE))
        return sorted(line for file in files for line in file.read_text().splitlines())


def files(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def commit(recorder: Recorder, step: int, model: Path, at: float) -> CommittedStep:
    group = make_group(step, 0)
    recorder.append([replace(each, trained_step=step) for each in group.trajectories])
    committed = CommittedStep(step, step + 1, {f"s{step}-g0": len(group.trajectories)}, at)
    recorder.commit(committed, model)
    return committed


async def made(root: Path) -> Run:
    run = Run(root)
    await run.start(range(0))
    run.keep(0)
    for step in range(STEPS):
        await run.start(range(step, step + 1))
        run.keep(step + 1)
    return run


@pytest.mark.parametrize("seed", tenth_of(range(SEEDS)))
async def test_what_is_not_of_one_time_is_refused_and_can_be_carried_on(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    state, record = chance.randint(0, STEPS), chance.randint(0, STEPS)
    if chance.random() < 0.5:
        record = state
    changed = [what for what in CONTENT if chance.random() < 0.2]
    made_it = f"seed {seed}: state of step {state}, record of step {record}, changed: {changed or 'nothing'}"
    run.put("state", run.root / "past" / str(state) / "state")
    run.put("record", run.root / "past" / str(record) / "record")
    for what in changed:
        run.write(what, "new")
    before = run.all_lines()
    if state == record and not changed:
        await run.start(range(state, state + 1))
    else:
        as_agreed = {"field": "service.state", "names": (f"--carry-on-from {state}",)}
        with refused(NotOfOneTime, **as_agreed) as error:
            await run.start(range(0))
        named = {{"reward": "reward.function", "filter": "selection.filter"}.get(what, what) for what in changed}
        ages = error.value.contradictions.keys() - named
        assert named <= error.value.contradictions.keys() and ages <= AGES, made_it
        assert bool(ages) == (state != record), made_it
        assert run.all_lines() == before, "a refused start changes nothing"
        with refused(NotOfOneTime, **as_agreed):
            await run.start(range(0), carry_on_from=state + 1)
        await run.start(range(0), carry_on_from=state)
        assert run.all_lines() == before, f"{made_it}: nothing is lost"
        await run.start(range(state, state + 1), carry_on_from=-1 if record >= state else state)
    assert run.steps() == [*range(min(state, record)), state], made_it
    ids = [json.loads(line)["trajectory_id"] for line in run.lines(TRAJECTORIES_FILE)]
    assert len(set(ids)) == len(ids), made_it


async def test_the_record_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run has the same steps. The state's own age does not matter."""
    monkeypatch.syspath_prepend(tmp_path / "run")
    monkeypatch.syspath_prepend(tmp_path / "other")
    run, other = await made(tmp_path / "run"), await made(tmp_path / "other")
    run.put("record", other.root / "record")
    for carry_on_from in (-1, STEPS):
        with refused(InvalidValue, field="record", value=run.root / "record"):
            await run.start(range(0), carry_on_from=carry_on_from)


async def test_copies_that_went_different_ways_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have as many steps, of one run: the times of their commits differ."""
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    for name in ("state", "record"):
        run.put(name, run.root / "past" / "3" / name)
    await run.start(range(3, STEPS))
    run.put("record", run.root / "past" / str(STEPS) / "record")
    with refused(NotOfOneTime, names=("step 3",)) as error:
        await run.start(range(0))
    assert error.value.contradictions.keys() == {"commits"}
    await run.start(range(0), carry_on_from=STEPS)
    assert run.steps() == [0, 1, 2]


async def test_a_record_that_was_removed_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    shutil.rmtree(run.root / "record")
    with refused(NotOfOneTime) as error:
        await run.start(range(0))
    assert error.value.contradictions.keys() == {"record was removed"}
    shutil.rmtree(run.root / "record")
    await run.start(range(STEPS, STEPS + 1), carry_on_from=STEPS)
    assert run.steps() == [STEPS]


@pytest.mark.parametrize("file", [TRAJECTORIES_FILE, STEPS_FILE])
async def test_files_of_one_record_are_of_one_time(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    shutil.copy(run.root / "past" / "2" / "record" / file, run.root / "record" / file)
    with refused(NotOfOneTime) as error:
        await run.start(range(0))
    assert error.value.contradictions.keys() == {file if file == TRAJECTORIES_FILE else "record is older"}


async def test_a_step_that_only_the_record_has_is_of_a_crash_if_the_state_has_leased_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record gets the line first; the repeated commit replaces it."""
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    config = run.config()
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        journal = journal_of(config, state, Storage())
        prompt = records.prompt_values(Prompt("p", "echo", (1, 2, 3)))
        journal.note(records.Admitted(90, "g90", prompt, STEPS, STEPS, 1, 1.0, [0, 1], 0, 0))
        journal.note(records.Leased(90, STEPS))
        await journal.close()
    with Recorder(run.root / "record") as recorder:
        recorder.commit(CommittedStep(STEPS, STEPS + 1, {"g90": 0}, 7.0), run.root / "model")
    await run.start(range(0))
    with Recorder(run.root / "record") as recorder:
        recorder.drop_version(STEPS + 1)
        recorder.commit(CommittedStep(STEPS, STEPS + 1, {"g90": 0}, 8.0), run.root / "model")
    assert run.steps() == list(range(STEPS + 1))
    with Recorder(run.root / "record") as recorder:
        recorder.commit(CommittedStep(STEPS, STEPS + 1, {"another": 0}, 9.0), run.root / "model")
    with refused(NotOfOneTime) as error:
        await run.start(range(0))
    assert error.value.contradictions.keys() == {"state is older"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"run": 1, "since": 0}', '{"run": "a"}', "[" * 100_000])
async def test_a_damaged_binding_is_named(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "run")
    run = await made(tmp_path / "run")
    (run.root / "record" / RUN_FILE).write_text(content)
    with refused(InvalidValue, field=RUN_FILE, value=MISSING):
        await run.start(range(0))
