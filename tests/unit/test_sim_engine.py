"""The simulated engine by hand: time in closed form, and who gives up KV when it runs out."""

from dataclasses import replace

import pytest

from dora.core.forecast.cost import CostModel
from dora.lab.sim.workload import EngineTurn
from dora.lab.sim_engine.engine import EnginePhase, SimEngine, SimRequest

COST = CostModel(kv_token_s=0.001, weights_s=0.01, request_s=0.002, step_s=0.05)
TURNS = (
    EngineTurn(tokens=60, environment_s=50.0, answer_tokens=5),
    EngineTurn(tokens=30, environment_s=0.0, answer_tokens=0),
)


def request(name: str, tokens: int, prompt: int = 10, turns: tuple[EngineTurn, ...] = ()) -> SimRequest:
    left = turns[0].tokens if turns else tokens
    return SimRequest(name, name, 0, prompt, 0, left, tokens, turns)


def run(engine: SimEngine, until_s: float) -> list[str]:
    """Lets time pass; the names of those whose turn or response ended."""
    ended: list[str] = []
    while engine.next_s() <= until_s:
        engine.advance(engine.next_s())
        assert engine.kv <= engine.kv_capacity + 1e-3, "more KV than there is"
        ended += [request.request_id for request in engine.happened()]
    engine.advance(until_s)
    return ended


def test_a_stretch_takes_what_its_steps_take_one_by_one() -> None:
    """Within half a step's growth: the closed form takes KV as growing evenly."""
    engine = SimEngine(COST, slots=4, kv_tokens=10_000)
    for name in "abc":
        engine.add(request(name, 40))
    one_by_one_s = sum(COST.decode_step_s(3, 3 * (10 + step)) for step in range(40))
    growth_s = COST.kv_token_s * 3 * 40 / 2
    assert engine.next_s() == pytest.approx(one_by_one_s + growth_s)
    engine.advance(engine.next_s() / 3)  # a look on the way changes nothing
    assert engine.next_s() == pytest.approx(one_by_one_s + growth_s)


def test_the_youngest_is_preempted_and_starts_again_when_there_is_room() -> None:
    engine = SimEngine(COST, slots=4, kv_tokens=100)
    for name in "ab":
        engine.add(request(name, 60))
    assert run(engine, 1e6) == ["a", "b"]
    assert engine.totals.preemptions == 1 and engine.totals.generated_tokens == 120


def test_one_that_decodes_alone_takes_the_kv_of_those_that_wait_for_an_environment() -> None:
    engine = SimEngine(replace(COST, prefill_token_s=0.001), slots=1, kv_tokens=110)
    away = request("away", 90, turns=TURNS)
    engine.add(away)
    engine.add(request("alone", 60))
    assert run(engine, 1e3) == ["away", "alone"]
    assert away.phase is EnginePhase.AWAY and not away.resident, "70 tokens of it beside 70 of the other"
    engine.resume(away)
    assert run(engine, 1e6) == ["away"]
    assert engine.totals.reprefill_s == pytest.approx(0.001 * (10 + 60 + 5)), "its whole context, again"
    assert engine.kv == 0.0 and engine.unread == 0


def test_one_that_was_answered_and_waits_for_the_slot_gives_its_kv_up_too() -> None:
    engine = SimEngine(COST, slots=1, kv_tokens=110)
    away = request("away", 90, turns=TURNS)
    engine.add(away)
    engine.add(request("alone", 60))
    assert run(engine, engine.next_s()) == ["away"]
    engine.resume(away)
    assert away.phase is EnginePhase.WAITING and away.resident
    assert run(engine, 1e6) == ["alone", "away"]


@pytest.mark.parametrize("prefill_token_s", [0.0, 1e-7])
def test_what_takes_less_time_than_the_clock_can_tell_happens_all_the_same(prefill_token_s: float) -> None:
    """Near 1e12 s the clock goes in steps of 0.12 ms: five tokens take less, and the engine would wait without end."""
    engine = SimEngine(CostModel(0.0, 1e-5, 0.0, 0.0, prefill_token_s), slots=2, kv_tokens=1000)
    engine.clock_s = 1e12
    for name, tokens in (("a", 5), ("b", 7)):
        engine.add(request(name, tokens))
    ended = []
    for _ in range(4):
        engine.advance(max(1e12, min(engine.next_s(), 2e12)))
        ended += [(one.request_id, one.tokens) for one in engine.happened()]
    assert ended == [("a", 5), ("b", 7)]
    assert (engine.totals.generated_tokens, engine.kv, engine.debt_s) == (12, 0.0, 0.0)
    assert engine.totals.prefill_s == pytest.approx(20 * prefill_token_s)


def test_kv_that_runs_out_within_a_tick_of_the_clock_preempts() -> None:
    engine = SimEngine(CostModel(0.0, 1e-5, 0.0, 0.0), slots=2, kv_tokens=25)
    engine.clock_s = 1e12
    for name in "ab":
        engine.add(request(name, 12))
    ended = []
    for _ in range(6):
        engine.advance(max(1e12, min(engine.next_s(), 2e12)))
        ended += [one.request_id for one in engine.happened()]
    assert (ended, engine.totals.preemptions) == (["a", "b"], 1)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_a_request_that_ends_has_all_its_tokens_however_many_steps_there_were(tokens: int) -> None:
    """Beside 1e16 steps odd ones are lost in rounding: its end is two or four steps away, not three."""
    engine = SimEngine(COST, slots=2, kv_tokens=1000)
    engine.steps = 1e16
    engine.add(request("a", tokens))
    while engine.requests:
        engine.advance(engine.next_s())
        assert [one.tokens for one in engine.happened()] in ([], [tokens])
    assert engine.totals.generated_tokens == tokens
