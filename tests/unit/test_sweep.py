"""The sweep's own parts: schedules, tokens, the shrinker, the session layer, the command line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dora.core.groups.window import Window
from dora.core.policies import POLICIES
from dora.core.rules import membership
from dora.errors import InvalidValue
from dora.lab.sim.faults.fault_kinds import KINDS, draw_faults, kinds_of
from dora.lab.sim.faults.shrinking import ddmin, shrunk
from dora.lab.sim.faults.sweep import replay, sweep
from dora.lab.sim.faults.trial import HORIZON_S, Trial
from dora.lab.sim.faults.wire import GAP_LIMIT_S, Trouble, Wire
from dora.ops.cli.exits import DoraGroup, ExitCode
from dora.ops.cli.offline.simulate.sweep import sweep as sweep_command
from tests.refusals import data_words, refused
from tests.sweeps import counts_of

TOKEN = "0:dora:all:all:0:2"

app = typer.Typer(cls=DoraGroup, pretty_exceptions_enable=False)
app.command("sweep")(sweep_command)
app.command("other")(lambda: None)


def over_admission(patch: pytest.MonkeyPatch) -> None:
    """A bug that needs no fault: one group more than fits."""
    admissible = Window.admissible
    patch.setattr(Window, "admissible", lambda self, version: admissible(self, version) + (version == self.newest))


def place_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A bug that needs a cancelled group."""
    patch.setattr(Window, "give_back", lambda self, version, deadline: None)


def requests_die(patch: pytest.MonkeyPatch) -> None:
    """A bug that needs a worker's death."""
    patch.setattr(membership, "orphan", lambda state, row: None)


# ----------------------------------------------------------------------------------------------------------- schedules


def test_a_schedule_follows_from_its_seed() -> None:
    kinds = tuple(KINDS)
    assert draw_faults(7, kinds, 60.0, 8.0) == draw_faults(7, kinds, 60.0, 8.0)
    drawn = [fault for seed in range(200) for fault in draw_faults(seed, kinds, 60.0, 8.0)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert all(0.0 <= fault.at_s <= 60.0 and 0.0 <= fault.amount <= 1.0 for fault in drawn)
    assert {fault.kind for fault in draw_faults(7, ("kill",), 60.0, 8.0)} == {"kill"}


def test_kinds_are_named_or_all() -> None:
    assert kinds_of("all") == tuple(KINDS)
    assert kinds_of("hang,kill,hang") == ("hang", "kill")
    with refused(InvalidValue, field="--faults", value="partitions"):
        kinds_of("partitions")


# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "trial", [Trial(3, "dora"), Trial(4, "sync", "kill,hang", (), 2, 0), Trial(5, "dora", chosen=(0, 2))]
)
def test_a_token_names_its_trial(trial: Trial) -> None:
    assert Trial.of(trial.token) == trial


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "token"),
        ("3", "token"),
        ("x:dora:all:all:0:2", "token"),
        ("3:dora:all:0,x:0:2", "token"),
        ("3:dora:all:999:0:2", "--replay: faults = '999' .* seed 3 has 8 of all"),
        ("3:dora:all:1,1:0:2", "--replay: faults = '1,1' .* all, or some of 0 to 7 in order"),
        ("3:dora:all:-1:0:2", "--replay: faults = '-1'"),
        ("-5:dora:all:all:0:2", "--replay: seed = -5 .* 0 or above"),
        ("5:partial:all:all:0:2", "--replay: policy = 'partial' .* one of dora, laxity"),
        ("3:dora:all:0:-1:2", "--replay: workers = -1 .* to 4"),
        ("3:dora:all:0:5:2", "--replay: workers = 5 .* to 4"),
        ("3:dora:all:0:0:-1", "--replay: steps after the faults = -1 .* 0 or above"),
        ("3:doro:all:all:0:2", "did you mean dora"),
        ("3:dora:kil:all:0:2", "did you mean kill"),
    ],
)
def test_a_bad_token_says_what_is_wrong(token: str, said: str) -> None:
    with refused(InvalidValue, names=data_words(said)):
        Trial.of(token)


@pytest.mark.parametrize(("count", "kinds"), [(3, "cancel"), pytest.param(6, "cancel,kill", marks=pytest.mark.full)])
def test_a_trial_runs_the_same_again(monkeypatch: pytest.MonkeyPatch, count: int, kinds: str) -> None:
    place_is_kept(monkeypatch)
    trials = [Trial(seed, "dora", kinds) for seed in range(count)]
    assert [trial.run() for trial in trials] == [trial.run() for trial in trials]
    assert any(trial.run() for trial in trials)


# ------------------------------------------------------------------------------------------------------------ shrinker


@pytest.mark.parametrize("needed", [(), (3,), (0, 19), (2, 3, 11), tuple(range(20))])
def test_ddmin_leaves_what_the_failure_needs(needed: tuple[int, ...]) -> None:
    tried: list[Sequence[int]] = []

    def fails(items: Sequence[int]) -> bool:
        tried.append(items)
        return set(needed) <= set(items)

    assert ddmin(range(20), fails) == needed
    assert len(tried) < 200


@pytest.mark.parametrize(("count", "kinds"), [(1, "kill,hang"), pytest.param(3, "all", marks=pytest.mark.full)])
def test_a_failing_trial_is_cut_down_to_what_it_needs(monkeypatch: pytest.MonkeyPatch, count: int, kinds: str) -> None:
    requests_die(monkeypatch)
    report = sweep(range(count), ("dora",), kinds)
    assert report.violations == len(report.failures) > 0
    for failure in report.failures:
        trial, again = replay(failure.replay.split("'")[1])
        assert trial.faults == failure.faults and again.failures == (failure,)
        chosen = trial.chosen or ()
        assert chosen
        for left_out in chosen:
            assert not replace(trial, chosen=tuple(index for index in chosen if index != left_out)).run()


def test_what_needs_no_fault_is_cut_down_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    over_admission(monkeypatch)
    trial = next(trial for seed in range(9) if (trial := Trial(seed, "dora")).run())
    smaller = shrunk(trial, "violation")
    assert (smaller.chosen, smaller.steps_after) == ((), 0)
    assert smaller.run()


# ------------------------------------------------------------------------------------------------------- session layer


class Bench:
    """A clock that is moved by hand, and a wire on it."""

    def __init__(self, latency_s: float = 0.1) -> None:
        self.now_s = 0.0
        self.arrived: list[int] = []
        self.broken = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.wire = Wire(self, latency_s, Random(0), self.arrived.append, self._broke)

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._agenda.append((self.now_s + delay_s, len(self._agenda), action, arguments))

    def run(self, until_s: float) -> None:
        while due := [entry for entry in self._agenda if entry[0] <= until_s]:
            first = min(due)
            self._agenda[first[1]] = (float("inf"), *first[1:])
            self.now_s = first[0]
            first[2](*first[3])
        self.now_s = until_s

    def _broke(self) -> None:
        self.broken += 1


@pytest.mark.parametrize("trouble", [Trouble.LATE, Trouble.DUPLICATED, Trouble.OVERTAKEN])
def test_messages_arrive_once_and_in_order(trouble: Trouble) -> None:
    bench = Bench()
    bench.wire.troubles.extend([(trouble, GAP_LIMIT_S / 2)] * 2)
    for number in range(5):
        bench.wire.send(number)
    bench.run(GAP_LIMIT_S * 2)
    assert (bench.arrived, bench.broken) == ([0, 1, 2, 3, 4], 0)


def test_a_lost_message_breaks_the_stream_and_nothing_passes_it() -> None:
    bench = Bench()
    bench.wire.send(0)
    bench.wire.troubles.append((Trouble.LOST, 0.0))
    bench.wire.send(1)
    bench.wire.send(2)
    bench.run(GAP_LIMIT_S * 2)
    assert bench.arrived == [0] and bench.broken


def test_a_message_that_comes_too_late_breaks_the_stream() -> None:
    bench = Bench()
    bench.wire.troubles.append((Trouble.LATE, 2 * GAP_LIMIT_S))
    bench.wire.send(0)
    bench.wire.send(1)
    bench.run(1.5 * GAP_LIMIT_S)
    assert bench.arrived == [] and bench.broken


def test_a_silent_direction_keeps_its_messages_until_it_is_healed() -> None:
    bench = Bench()
    bench.wire.silent_until_s = 3.0
    bench.wire.send(0)
    bench.wire.send(1)
    bench.run(2.9)
    assert bench.arrived == []
    bench.run(4.0)
    assert (bench.arrived, bench.broken) == ([0, 1], 0)


@pytest.mark.parametrize(("share", "arrives"), [(0.0, [9]), (0.5, [0, 1, 9]), (1.0, [0, 1, 2, 3, 9])])
def test_of_what_a_dead_sender_sent_some_arrives_and_then_the_end(share: float, arrives: list[int]) -> None:
    bench = Bench()
    for number in range(4):
        bench.wire.send(number)
    bench.wire.end(9, share)
    bench.run(3.0)
    assert (bench.arrived, bench.broken) == (arrives, 0)


def test_the_end_comes_even_where_a_message_was_held_back() -> None:
    bench = Bench()
    bench.wire.send(0)
    bench.run(1.0)
    bench.wire.troubles.append((Trouble.LATE, 1.0))
    bench.wire.send(1)
    bench.wire.send(2)
    bench.run(1.5)  # 2 is here and waits for 1
    bench.wire.end(9, 0.5)
    bench.run(4.0)
    assert (bench.arrived, bench.broken) == ([0, 1, 9], 0)


# -------------------------------------------------------------------------------------------------------- command line


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", *arguments])
    return result.exit_code, result.stdout


@pytest.mark.parametrize("count", counts_of(2, 4))
def test_json_says_how_many_seeds_failed_in_which_way(count: int) -> None:
    code, text = run("--seeds", str(count), "--faults", "kill,hang", "--policy", "dora", "--json")
    assert code == ExitCode.OK
    assert json.loads(text) == {
        "seeds": count,
        "violations": 0,
        "lost": 0,
        "duplicated": 0,
        "stalled": 0,
        "failures": [],
    }


@pytest.mark.parametrize(("count", "kinds"), [(2, "cancel"), pytest.param(8, "all", marks=pytest.mark.full)])
def test_a_failure_is_printed_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, count: int, kinds: str
) -> None:
    place_is_kept(monkeypatch)
    code, text = run("--seeds", str(count), "--faults", kinds, "--policy", "dora", "--json")
    assert code == ExitCode.FAILED
    failure = json.loads(text)["failures"][0]
    token = failure["replay"].split("'")[1]
    code, text = run("--replay", token)
    assert code == ExitCode.FAILED and failure["message"] in text and token in text
    monkeypatch.undo()
    assert run("--replay", token)[0] == ExitCode.OK


def test_seeds_are_dealt_out_among_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, str]] = []
    monkeypatch.setattr(Trial, "run", lambda self: tried.append((self.seed, self.policy)))
    assert run("--seeds", "3", "--first", "4", "--policy", "sync", "--policy", "dora")[0] == ExitCode.OK
    assert tried == [(4, "sync"), (5, "dora"), (6, "sync")]
    tried.clear()
    run("--seeds", str(len(POLICIES)), "--policy", "all")
    assert {policy for _, policy in tried} == set(POLICIES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "1", "--policy", "dorra"), "did you mean dora"),
        (("--seeds", "1", "--policy", "all", "--policy", "dorra"), "did you mean dora"),
        (("--seeds", "1", "--policy", ""), "--policy = ''"),
        (("--seeds", "1", "--faults", "kil"), "did you mean kill"),
        (("--replay", "nonsense"), "a token as"),
        (("--replay", ""), "--replay = '' is not valid: it must be a token as"),
        (("--replay", TOKEN, "--seeds", "1000"), "--seeds = 1000 is not valid: it must be left out with --replay"),
        (("--replay", TOKEN, "--first", "0"), "--first = 0 is not valid: it must be left out with --replay"),
        (("--faults", "kill", "--replay", TOKEN), "--faults = 'kill' is not valid: it must be left out with --replay"),
        (("--replay", TOKEN, "--policy", "nonsense"), "--policy = ['nonsense'] is not valid: it must be left out with"),
    ],
)
def test_unknown_names_and_options_without_a_meaning_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["sweep", *arguments])
    assert result.exit_code == ExitCode.USAGE and said in result.stderr
    assert not result.stdout


def test_the_horizon_holds_every_fault() -> None:
    assert all(fault.at_s <= HORIZON_S for seed in range(50) for fault in Trial(seed, "dora").faults)
