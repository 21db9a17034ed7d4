"""The faults of a chaos run: chosen by its seed alone, all of them in turns; and the clock that it lets jump."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.clock import jump, jumping
from tests.chaos.faults import ACTIONS, EACH_KILLS, KILLS, OF_SESSIONS, OTHERS, RANK_KILLS, RIVALS, Fault, drawn, named
from tests.refusals import refused


def test_the_same_seed_draws_the_same_faults() -> None:
    first, second, other = (list(itertools.islice(drawn(seed), 200)) for seed in (4, 4, 5))
    assert first == second != other


def test_every_fault_comes_before_any_comes_again() -> None:
    faults = list(itertools.islice(drawn(1), len(KILLS) + 2 * (len(KILLS) // EACH_KILLS)))
    kills = [each for each in faults if each.action == "kill"]
    assert sorted(kills, key=lambda each: each.name) == sorted(KILLS, key=lambda each: each.name)
    assert faults[EACH_KILLS].action != "kill" and faults[EACH_KILLS + 1] in RIVALS


def test_two_hundred_kills_draw_every_fault() -> None:
    faults = list(drawn_until(200, seed=0))
    assert set(faults) == {*KILLS, *OTHERS, *RIVALS}
    assert {each.action for each in faults} == set(ACTIONS)


def drawn_until(kills: int, seed: int) -> Iterator[Fault]:
    for fault in drawn(seed):
        yield fault
        kills -= fault.kills
        if kills <= 0:
            return


def test_a_victim_is_told_with_how_it_fares() -> None:
    (fault,) = named("cut to host, until it is lost at decoding")
    assert (fault.whose, fault.how) == ("to host", "until it is lost")


def test_what_is_left_out_does_not_come() -> None:
    faults = list(itertools.islice(drawn(0, {"fill", "agent", "taking"}), 300))
    assert not [each for each in faults if each.action == "fill" or each.victim == "agent" or each.moment == "taking"]


def test_without_sessions_nothing_strikes_them() -> None:
    faults = list(itertools.islice(drawn(0, set(OF_SESSIONS)), 300))
    assert not [each for each in faults if each.victim in ("environment", "front") or "tool time" in each.moment]
    assert not [each for each in faults if "chat" in each.moment]
    assert not [each for each in faults if each.moment == "turn" or each.moment.startswith("idle-")]


def test_ranks_are_killed_where_there_are_some() -> None:
    victims = {each.victim for each in itertools.islice(drawn(0, has_ranks=True), 2 * len(KILLS))}
    assert "rank" in victims
    assert "rank" not in {each.victim for each in itertools.islice(drawn(0), 2 * len(KILLS))}


def test_names_are_those_of_faults() -> None:
    chosen = (KILLS[3], RANK_KILLS[0], OTHERS[-1])
    assert named(";".join(each.name for each in chosen)) == chosen
    with refused(ValueError, names=("'kill everybody'", "kill source at move:PLANNED")):
        named("kill everybody")


def test_the_orchestrator_is_killed_at_twenty_moments() -> None:
    moments = {each.moment for each in (*KILLS, *OTHERS) if "orchestrator" in each.victim and each.action != "jump"}
    assert len(moments) >= 20


def test_a_clock_jumps_for_who_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    jump(file, 0.0)
    clock = jumping(file, lambda: 100.0)
    assert clock() == 100.0
    jump(file, -3600.0)
    assert clock() == -3500.0
