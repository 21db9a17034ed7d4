"""A replay comes to the very commands, refusals and state of the core that the log was written beside."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dora.config import Config, validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.window import Window
from dora.errors import DoraError, InvalidValue
from dora.lab.sim import world
from dora.lab.sim.faults.trial import Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.invariants import fingerprint
from dora.ops.cli.exits import DoraGroup
from dora.ops.cli.offline.replay import replay as replay_command
from dora.orchestrator.recording.eventlog import EventLog
from dora.orchestrator.recovery.replay import Decision, Known, KnownWorker, Replay, known_of, line_of
from tests.eventlogs import FolderWriter
from tests.refusals import refused

FAULTS = "kill,handoff,copy,partition,trainer,leave,migrate,cancel,stale"

app = typer.Typer(cls=DoraGroup)
app.command("replay")(replay_command)
app.callback()(lambda: None)


class LoggedMachine(Machine):
    """A core that logs its events as the service does, and keeps what it answered."""

    def __init__(self, config: Config, file: Path) -> None:
        super().__init__(config)
        self.log = FolderWriter(file, config, now_s=0.0)
        self.answers: list[tuple[tuple[do.Command, ...], str]] = []

    def handle(self, event: on.Event, now_s: float) -> list[do.Command]:
        self.log.append(event, now_s)
        try:
            commands = super().handle(event, now_s)
        except DoraError as error:
            self.answers.append(((), str(error)))
            raise
        self.answers.append((tuple(commands), ""))
        return commands


def driven(file: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 11) -> LoggedMachine:
    """A core after a trial with faults: deaths, handoffs, refusals, stale events."""
    monkeypatch.setattr(world, "Machine", partial(LoggedMachine, file=file))
    trial = Trial(seed, "dora", FAULTS)
    scenario = trial.cluster()
    wild = UnreliableWorld(scenario, seed)
    conduct(wild, trial.faults, trial.steps_after)
    machine = wild.machine
    assert isinstance(machine, LoggedMachine)
    machine.log.close()
    return machine


def small(file: Path, *more: on.Event) -> Path:
    """One group, admitted and started on one worker; then ``more``, a second apart from 6 s on."""
    config = validated({"rollout": {"group_size": 2}})
    events = (
        on.WorkerJoined("w0", 1, 4, 1000),
        on.CommandDone("w0", 1, 1),
        on.TrainerAttached(1, 2),
        on.PromptsOffered((on.OfferedPrompt("p0", "sum", 10, 2, 64),)),
        on.StepRequested(1, 5),
    )
    with FolderWriter(file, config, now_s=0.0) as writer:
        for second, event in enumerate((*events, *more), start=1):
            writer.append(event, float(second))
    return file


def decisions_of(file: Path) -> list[Decision]:
    log = EventLog(file)
    return list(Replay(log.config, log))


def state_of(machine: Machine) -> dict[str, str]:
    """All of a core's state but its predictor, which the commands show."""
    return {name: value for name, value in fingerprint(machine.state).items() if name != "predictor"}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


# --------------------------------------------------------------------------------------------------------- the replay


@pytest.mark.parametrize("seed", [11, 16, 25, 36])
def test_it_comes_to_the_same_commands_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    machine = driven(tmp_path / "log", monkeypatch, seed)
    log = EventLog(tmp_path / "log")
    run = Replay(log.config, log)
    assert [(decision.commands, decision.refusal) for decision in run] == machine.answers
    assert state_of(run.machine) == state_of(machine)
    assert run.machine.counters == machine.counters
    assert known_of(run.machine.state) == known_of(machine.state)
    summary = run.summary()
    assert sum(summary.events.values()) == len(machine.answers)
    assert sum(summary.commands.values()) == sum(len(commands) for commands, _ in machine.answers)
    assert summary.refused == sum(bool(refusal) for _, refusal in machine.answers) > 0
    assert summary.commands["ReserveSlot"] > 0 and summary.counters["workers_lost"] > 0, "a world without faults"


def test_it_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the order of sets of names nor anything else of this process is in it."""
    driven(tmp_path / "log", monkeypatch)
    script = (
        "import sys; from pathlib import Path; from dora.orchestrator.recording.eventlog import EventLog; "
        "from dora.orchestrator.recovery.replay import Replay;"
        "log = EventLog(Path(sys.argv[1])); print(*Replay(log.config, log), sep='\\n')"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "log")],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {"\n".join(map(str, decisions_of(tmp_path / "log"))) + "\n"}


def test_known_is_what_was_known_before(tmp_path: Path) -> None:
    joined, _, attached, offered, refused = decisions_of(small(tmp_path / "log"))
    assert joined.known == Known(0, 0, 0, (), (0, 0), {0: 0}, 0, {}, {}, 0, 0, ())
    w0 = KnownWorker(
        "w0", 0, 0, 0, False, slots=4, held=0, queued=0, kv_tokens=1000, kv_used_tokens=0, kv_claimed_tokens=0
    )
    assert attached.known.workers == offered.known.workers == (w0,)
    assert (offered.known.left, offered.known.slack, offered.known.admissible) == (2, (2, 4), {0: 4})
    assert [type(command) for command in offered.commands[:2]] == [do.AdmitGroup, do.StartRequest]
    assert refused.known.admissible == {0: 3} and refused.known.slack == (2, 3)
    assert refused.known.workers[0].held == 2 and refused.known.workers[0].kv_claimed_tokens > 2 * 10


def test_what_was_refused_is_refused_again_and_the_replay_goes_on(tmp_path: Path) -> None:
    *_, refused, ticked = decisions_of(small(tmp_path / "log", on.Tick()))
    assert refused.refusal == "step = 5 is not the open step: it must be 0, the first that is not committed"
    assert refused.commands == () and refused.chose
    assert ticked.event == on.Tick() and not ticked.refusal


def place_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    """A bug of the core that is a DoraError, and yet no refusal: the event is half done by then."""
    give_back = Window.give_back
    patch.setattr(Window, "give_back", lambda self, *group: (give_back(self, *group), give_back(self, *group)))


def test_what_ends_the_service_ends_the_replay_and_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_given_back_twice(monkeypatch)
    log = EventLog(small(tmp_path / "log", on.GroupCancelled("g0", "user"), on.Tick()))
    replayed = Replay(log.config, log)
    *_, failed = replayed
    assert (failed.number, failed.refusal, failed.commands) == (6, "", ()) and failed.chose
    assert failed.failure.startswith("IllegalTransition: no open group of version 0 due at 1 to cancel")
    assert failed.failure.endswith("in give_back)")
    summary = replayed.summary()
    assert summary.failed == f"event 6, GroupCancelled: {failed.failure}"
    assert (summary.refused, summary.events["GroupCancelled"]) == (1, 1)


def test_a_bug_comes_again_with_the_event_that_met_it(tmp_path: Path) -> None:
    """A shell would have to count wrongly for such an event; then the log shows it."""
    file = small(tmp_path / "log", on.CommandDone("w0", 1, 2), on.Progress("w0", 1, 0, {"g0.0": 1 << 63}), on.Tick())
    *_, failed = decisions_of(file)
    assert failed.number == 7 and failed.failure.startswith("OverflowError: ") and not failed.refusal


def test_decisions_are_told_from_acknowledgements(tmp_path: Path) -> None:
    finished = on.Progress("w0", 1, 0, {"g0.0": 5}, {"g0.0": "stop"})
    file = small(tmp_path / "log", on.CommandDone("w0", 1, 2), finished)
    by_kind = {type(decision.event).__name__: decision for decision in decisions_of(file)}
    assert [type(command) for command in by_kind["Progress"].commands] == [do.ScoreRequest]
    assert not by_kind["Progress"].chose
    assert by_kind["PromptsOffered"].chose and by_kind["WorkerJoined"].chose


def test_lines_are_short_whatever_an_event_holds() -> None:
    prompts = tuple(on.OfferedPrompt(f"p{number}", "sum", 7, 2, 64) for number in range(1000))
    line = line_of(on.PromptsOffered(prompts))
    assert line.startswith("PromptsOffered prompts=[(p0, sum, 7, 2, 64") and "997 more" in line and len(line) < 250
    assert line_of(on.CommandDone("w0", 1, 7)).startswith(
        "CommandDone worker_id=w0 epoch=1 command_id=7 ok=True error=-"
    )
    assert line_of(do.StartRequest("w0", 1, 7, "g0.0", 2, "new")) == (
        "StartRequest worker_id=w0 epoch=1 command_id=7 request_id=g0.0 version=2 arrival=new"
    )


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_shows_what_was_known_and_what_was_chosen(tmp_path: Path) -> None:
    result = invoke(small(tmp_path / "log"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    at = lines.index(
        "#4  +4.000 s  PromptsOffered prompts=[(p0, sum, 10, 2, 64, -, [], [], 0, False, 0)] exhausted=False"
    )
    assert lines[at + 1] == "  known  step 0 takes 2 more; newest v0; slack 2 4; admissible v0:4; backlog 0"
    assert lines[at + 2] == "         w0  v0  0/4 requests, KV 0% (0% claimed)"
    assert lines[at + 3].startswith("  chose  AdmitGroup group_id=g0 prompt_id=p0 version=0")
    assert lines[at + 4].startswith("         StartRequest worker_id=w0")
    assert "         w0  v0  0/4 requests, KV 0% (0% claimed), no weights yet" in lines
    assert "  refused  step = 5 is not the open step: it must be 0, the first that is not committed" in lines
    assert any("events" in line and "5" in line for line in lines)


def test_the_commands_json_is_one_document(tmp_path: Path) -> None:
    result = invoke(small(tmp_path / "log"), "--json", "--from", 4)
    document = json.loads(result.stdout)
    offered, refused = document["decisions"]
    assert (offered["number"], offered["time_s"], offered["refused"]) == (4, 4.0, None)
    assert offered["event"]["kind"] == "PromptsOffered" and offered["event"]["prompts"][0]["prompt_id"] == "p0"
    assert offered["known"]["admissible"] == {"0": 4} and offered["known"]["workers"][0]["worker_id"] == "w0"
    assert offered["commands"][0] == {
        "kind": "AdmitGroup", "group_id": "g0", "prompt_id": "p0", "version": 0, "request_ids": ["g0.0", "g0.1"],
    }  # fmt: skip
    assert refused["refused"].startswith("step = 5")
    assert document["summary"]["events"]["PromptsOffered"] == 1 and document["summary"]["refused"] == 1
    assert document["summary"]["counters"]["groups_admitted"] == 1 and document["torn_bytes"] == 0


@pytest.mark.parametrize("options", [(), ("--decisions",), ("--only", "LoadVersion")])
def test_the_command_shows_what_ended_the_service_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """In the summary, too, whatever else is shown."""
    place_given_back_twice(monkeypatch)
    file = small(tmp_path / "log", on.GroupCancelled("g0", "user"), on.Tick())
    told = invoke(file, *options)
    assert (told.exit_code, told.stderr) == (1, "")
    said = "IllegalTransition: no open group of version 0 due at 1 to cancel"
    assert (f"  failed  {said}" in told.stdout) == ("--only" not in options)
    assert "event 6, GroupCancelled: IllegalTransition" in " ".join(told.stdout.split())
    document = json.loads(invoke(file, "--json", *options).stdout)
    assert document["summary"]["failed"].startswith(f"event 6, GroupCancelled: {said}")
    if "--only" not in options:
        *_, refused, failed = document["decisions"]
        assert (failed["refused"], refused["failed"]) == (None, None)
        assert failed["failed"].startswith(said) and refused["refused"].startswith("step = 5")
    assert invoke(file, "--to", 5).exit_code == 0, "what came before did not fail"


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ((), [1, 2, 3, 4, 5, 6]),
        (("--from", 3), [3, 4, 5, 6]),
        (("--to", 2), [1, 2]),
        (("--from", 2, "--to", 4), [2, 3, 4]),
        (("--from", 99), []),
        (("--only", "steprequested,Tick"), [5, 6]),
        (("--only", "LoadVersion"), [1]),
        (("--decisions",), [1, 4, 5]),
        (("--decisions", "--only", "StepRequested"), [5]),
    ],
)
def test_the_command_shows_what_it_is_asked_for(
    tmp_path: Path, options: tuple[object, ...], numbers: list[int]
) -> None:
    result = invoke(small(tmp_path / "log", on.Tick()), "--json", *options)
    assert [decision["number"] for decision in json.loads(result.stdout)["decisions"]] == numbers


def test_the_summary_is_of_all_events_up_to_the_last_one(tmp_path: Path) -> None:
    result = invoke(small(tmp_path / "log", on.Tick()), "--json", "--to", 5, "--only", "Tick")
    assert sum(json.loads(result.stdout)["summary"]["events"].values()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "StepComitted"), "did you mean StepCommitted?"),
        (("--only", ""), "--only = '' is not valid: it must be one of PromptsOffered"),
        (("--from", 3, "--to", 2), "--to = 2 is not valid: it must be at least --from, 3"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    result = invoke(small(tmp_path / "log"), *options)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


def test_a_damaged_log_prints_nothing_but_what_is_wrong(tmp_path: Path) -> None:
    folder = small(tmp_path / "log", on.Tick())
    segment = folder / "log" / "00000001.seg"
    damaged = bytearray(segment.read_bytes())
    damaged[-60] ^= 1  # in event 5 of 6
    segment.write_bytes(damaged)
    result = invoke(folder)
    assert result.exit_code == 2 and result.stdout == "" and "00000001.seg = 'byte" in result.stderr
    assert invoke(folder, "--to", 4).exit_code == 0, "what came before may be seen"
    with refused(InvalidValue, names=("whole",)):
        decisions_of(folder)


def test_a_torn_log_is_replayed_and_the_tear_reported(tmp_path: Path) -> None:
    folder = small(tmp_path / "log")
    segment = folder / "log" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    result = invoke(folder, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and len(document["decisions"]) == 4 and document["torn_bytes"] > 0
    assert f"the last {document['torn_bytes']} bytes are incomplete" in result.stderr


def test_many_workers_are_shown_by_version(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "log", Config(), now_s=0.0) as writer:
        for number in range(1, 11):
            writer.append(on.WorkerJoined(f"w{number}", number, 4, 1000), 1.0)
        writer.append(on.Tick(), 2.0)
    lines = invoke(tmp_path / "log", "--from", 11).stdout.splitlines()
    assert lines[2] == "         10 workers  v0  0/40 requests, KV 0% (0% claimed), 10 not there yet"
