"""Requests of several turns, whatever engines are made of: kept, moved, parked or dropped between any two turns.

A session that its engine keeps, or that moves with its KV, equals the session left alone to the last bit of a logprob,
and no token is computed again. One that is dropped is computed again, alike but for rounding, and counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dora.data.types import EngineLoad, RequestSpec, SamplingParams
from dora.errors import Conflict, InvalidValue, NotFound
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.transports.arena import STEP_BYTES
from dora.worker.engine import RolloutEngine
from tests.contract.conftest import KINDS
from tests.contract.driver import (
    EVERYTHING,
    FILLING,
    GREEDY,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    VersionFolder,
    farthest,
    make_request,
    over_the_wire,
)
from tests.contract.planes import a_plane
from tests.contract.pools import a_pool, park, sent_on
from tests.contract.workers import peer_of
from tests.refusals import refused
from tests.sweeps import some_of

SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "everything": replace(EVERYTHING, stop_token_ids=(), ignore_eos=True, min_tokens=2),
    "ends": replace(EVERYTHING, ignore_eos=False, min_tokens=2),
}
BLOCK = 32
GIVEN = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5)  # tokens
TURN_TOKENS = 6
POOL_EPOCH = 1
MOST_BYTES = 1 << 30
DEPENDENT = ("mla",)  # kinds whose last bits of a logprob depend on the requests beside it, in single turns too


@dataclass
class Session:
    """One session and its turns to come, by the number of given tokens. ``samplings``: of its turns, one after the
    other and again; empty: all have the request's.
    """

    request: RequestSpec
    given: tuple[int, ...]
    turn: int = 0
    samplings: tuple[SamplingParams, ...] = ()

    def next(self) -> tuple[int, ...]:
        """The next turn's given tokens."""
        count = self.given[self.turn]
        self.turn += 1
        return tuple(3 + (5 * position + 11 * self.turn) % 61 for position in range(count))

    def sampling(self, most: int = TURN_TOKENS) -> SamplingParams:
        """The next turn's sampling."""
        own = self.samplings or (self.request.sampling,)
        return replace(own[self.turn % len(own)], max_tokens=most)

    @property
    def is_over(self) -> bool:
        return self.turn == len(self.given)


def sessions(*given: tuple[int, ...]) -> list[Session]:
    """A session of each kind of sampling for each sequence of given lengths."""
    found = []
    for number, lengths in enumerate(given):
        for index, (name, sampling) in enumerate(SAMPLINGS.items()):
            request = make_request(index, sampling, 5 + 9 * index, max_tokens=TURN_TOKENS)
            found.append(Session(replace(request, request_id=f"{name}{number}", keeps=True), lengths))
    return found


class TurnDriver(Driver):
    """Extends sessions and collects their responses, given tokens included."""

    def extend(
        self,
        request_id: str,
        given: tuple[int, ...],
        max_tokens: int = TURN_TOKENS,
        sampling: SamplingParams | None = None,
    ) -> None:
        sampling = sampling or self.engine.request(request_id).sampling
        self.engine.extend(request_id, given, replace(sampling, max_tokens=max_tokens))
        self.gave(request_id, given)

    def gave(self, request_id: str, given: tuple[int, ...]) -> None:
        response = self.responses[request_id]
        assert response.finish_reason is not None
        response.token_ids += given
        response.logprobs += [0.0] * len(given)
        response.finish_reason = None


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.full] if "moe" in name else []) for name in KINDS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Between = Callable[..., None]  # of a driver, a session, and the most tokens of the next turn


def kept(driver: TurnDriver, session: Session, most: int = TURN_TOKENS) -> None:
    """It stays where it is."""
    sampling = session.sampling(most)
    driver.extend(session.request.request_id, session.next(), most, sampling)


def moved(driver: TurnDriver, session: Session, most: int = TURN_TOKENS) -> None:
    """It moves during its tools, and is kept there."""
    before = driver.engine.load()
    snapshot = driver.take_out(session.request.request_id)
    assert snapshot.request.kept
    driver.engine.take_in(snapshot)
    assert is_loaded_alike(driver.engine.load(), before)
    kept(driver, session, most)


def is_loaded_alike(after: EngineLoad, before: EngineLoad) -> bool:
    """Whether a move left all that an engine has, but copies of states and blocks that no window needs any more."""
    unlike = {name: getattr(before, name) for name in ("state_bytes", "kv_used_tokens")}
    return after.kv_used_tokens <= before.kv_used_tokens and replace(after, **unlike) == before


def moved_late(driver: TurnDriver, session: Session, most: int = TURN_TOKENS) -> None:
    """It moves after its tools have answered and before the tokens are computed."""
    kept(driver, session, most)
    driver.engine.take_in(driver.take_out(session.request.request_id))


def in_rounds(driver: TurnDriver, session: Session) -> None:
    """Its full blocks are copied ahead, if it has some, to blocks that are reserved."""
    name, engine = session.request.request_id, driver.engine
    if not engine.full_blocks(name, 0).end:
        moved(driver, session)
        return
    reservation = engine.reserve(name, MAX_MODEL_LEN_TOKENS // 2, kept=True)
    assert not engine.reserved
    engine.take_in(driver.take_out_in_rounds(name, 0, 1, reservation))
    kept(driver, session)


def frozen(driver: TurnDriver, session: Session) -> None:
    """A move that is given up, before and after the next turn is asked for."""
    name, engine = session.request.request_id, driver.engine
    for _ in range(2):
        engine.freeze(name)
        assert engine.export(name) is not None
        engine.thaw(name)
        if engine.request(name).kept:
            kept(driver, session)


def dropped(driver: TurnDriver, session: Session) -> None:
    """Its KV is given up; it comes again with all its tokens."""
    name, engine = session.request.request_id, driver.engine
    request, sampling, given = engine.request(name), session.sampling(), session.next()
    engine.remove(name)
    driver.gave(name, given)
    engine.add(request.extended(given, sampling))


def play(driver: TurnDriver, played: list[Session], between: Between) -> dict[str, tuple[list[int], list[float]]]:
    """Plays sessions beside each other, whatever happens between their turns. Returns their tokens and logprobs."""
    for session in played:
        driver.add(session.request)
    driver.finish()
    while left := [session for session in played if not session.is_over]:
        for session in left:
            between(driver, session)
        driver.finish()
    found = {}
    for session in played:
        name = session.request.request_id
        response, request = driver.responses[name], driver.engine.request(name)
        assert request.kept and tuple(response.token_ids) == request.output_token_ids
        assert sum(end - first for first, end in request.inputs) == sum(session.given)
        found[name] = response.token_ids, response.logprobs
        driver.drop(name)
    return found


@pytest.fixture
def turns(engine: RolloutEngine) -> Iterator[TurnDriver]:
    driver = TurnDriver(engine)
    yield driver
    driver.clear()
    assert engine.load().kv_used_tokens == 0 and not engine.has_work()


@pytest.mark.parametrize("between", [kept, moved, moved_late, in_rounds, frozen])
@pytest.mark.parametrize("given", some_of((GIVEN[:3], GIVEN[3:], (1,) * 9), GIVEN[:3]), ids=str)
def test_a_session_equals_the_session_left_alone(
    turns: TurnDriver, kind: str, between: Between, given: tuple[int, ...]
) -> None:
    alone = {}
    for session in sessions(given):
        alone.update(play(turns, [session], kept))
    before = turns.engine.load().reprefilled_tokens
    found = {} if kind in DEPENDENT else play(turns, sessions(given), between)
    for session in sessions(given) if kind in DEPENDENT else ():
        found.update(play(turns, [session], between))
    assert found == alone
    assert turns.engine.load().reprefilled_tokens == before


@pytest.mark.parametrize("given", [GIVEN[:3], GIVEN[3:]], ids=str)
def test_a_dropped_session_continues_and_is_counted(
    turns: TurnDriver, version_folder: VersionFolder, kind: str, given: tuple[int, ...]
) -> None:
    alone = play(turns, sessions(given), kept)
    turns.engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
    before = turns.engine.load().reprefilled_tokens
    again = play(turns, sessions(given), dropped)
    rounding = 0.0 if kind == "fake" else ROUNDING
    for name, (token_ids, logprobs) in alone.items():
        assert again[name][0] == token_ids
        assert max(abs(ours - theirs) for ours, theirs in zip(again[name][1], logprobs, strict=True)) <= rounding
    assert turns.engine.load().reprefilled_tokens > before


@pytest.mark.parametrize("spills", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("given", [GIVEN[1:3]], ids=str)
def test_parked_sessions_equal_the_sessions_left_alone(
    turns: TurnDriver, tmp_path: Path, given: tuple[int, ...], spills: bool
) -> None:
    """They wait in a pool while their tools run; on disk all but the last."""
    alone, engine = play(turns, sessions(given), kept), turns.engine
    before = engine.load().reprefilled_tokens
    longest_bytes = blocks_for(MAX_MODEL_LEN_TOKENS, engine.layout.block_tokens) * engine.layout.block_bytes
    one_bytes = -(-longest_bytes // STEP_BYTES) * STEP_BYTES
    played = sessions(given)
    arena_bytes = one_bytes * (1 if spills else len(played))
    with (
        a_plane(tmp_path, 2, fingerprint=engine.layout.fingerprint) as end,
        a_pool(tmp_path, POOL_EPOCH, ("shm", "tcp"), arena_bytes, tmp_path / "spill") as pool,
    ):
        for session in played:
            turns.add(session.request)
        turns.finish()
        while not played[0].is_over:
            for session in played:
                park(engine, end, pool, session.request.request_id, one_bytes)
            pool.turn()
            assert engine.load().kv_used_tokens == 0 and not engine.has_work()
            assert pool.report.spilled == ((len(played) - 1) * (played[0].turn + 1) if spills else 0)
            for session in reversed(played):
                name = session.request.request_id
                end.plane.expect(name, POOL_EPOCH, MOST_BYTES)
                engine.take_in(end.plane.take(sent_on(pool, peer_of(end), name)))
                kept(turns, session)
            turns.finish()
    found = {name: (response.token_ids, response.logprobs) for name, response in turns.responses.items()}
    assert found == alone
    assert engine.load().reprefilled_tokens == before


@pytest.mark.full
@pytest.mark.parametrize("between", [kept, moved, moved_late])
def test_a_session_of_a_hundred_turns_equals_the_session_left_alone(turns: TurnDriver, between: Between) -> None:
    def hundred() -> list[Session]:
        request = replace(make_request(1, SAMPLED, 5, max_tokens=1), request_id="hundred", keeps=True)
        return [Session(request, (1,) * 99)]

    alone = play(turns, hundred(), partial(kept, most=1))
    assert play(turns, hundred(), partial(between, most=1)) == alone


# What a kept request is to its engine.


def test_a_kept_request_has_its_kv_and_nothing_else(turns: TurnDriver) -> None:
    engine = turns.engine
    for session in sessions(GIVEN)[:2]:
        turns.add(session.request)
    turns.finish()
    load = engine.load()
    assert not engine.has_work() and engine.step() == []
    assert (load.running, load.waiting) == (0, 0) and load.kv_used_tokens > 0
    for name in ("greedy0", "sampled0"):
        assert turns.responses[name].finish_reason == "length" and engine.request(name).kept
    others = [make_request(index, GREEDY, 5, max_tokens=4) for index in range(SLOTS)]
    for request in others:  # kept ones take no slot
        turns.add(request)
    turns.step()
    assert engine.load().running == SLOTS
    turns.finish()
    assert engine.load().kv_used_tokens == load.kv_used_tokens
    engine.freeze("greedy0")
    assert engine.load() == replace(load, generated_tokens=engine.load().generated_tokens) and not engine.has_work()
    engine.remove("greedy0")
    engine.remove("sampled0")
    assert engine.load().kv_used_tokens == 0
    with refused(NotFound, field="request_id", value="greedy0"):
        engine.extend("greedy0", (5,), replace(GREEDY, max_tokens=4))


@pytest.mark.parametrize("is_extended", [False, True], ids=["kept", "extended"])
def test_a_reservation_for_a_kept_request_takes_blocks_and_no_slot(turns: TurnDriver, is_extended: bool) -> None:
    """All slots are taken. A request whose next turn began during its copy waits with its KV."""
    (session,) = sessions((7,))[1:2]
    name, engine = session.request.request_id, turns.engine
    session.request = replace(session.request, prompt_token_ids=(5,) * 2 * BLOCK)
    has_state = bool(engine.layout.state_bytes)  # its KV waits in host memory
    alone = play(turns, [replace(session)], kept)
    turns.add(session.request)
    turns.finish()
    for index in range(SLOTS):
        turns.add(make_request(index, GREEDY, 5, max_tokens=4))
    turns.step()
    assert engine.load().running == SLOTS
    reservation = engine.reserve(name, 3 * BLOCK, kept=True)
    assert bool(reservation.block_ids) is not has_state and engine.reserved == 0
    if is_extended:
        kept(turns, session)
    engine.take_in(turns.take_out_in_rounds(name, 0, 1, reservation))
    load = engine.load()
    assert (load.running, load.waiting) == (SLOTS, int(is_extended))
    if not is_extended:
        kept(turns, session)
    before = load.reprefilled_tokens
    response = turns.finish()[name]
    assert (response.token_ids, response.logprobs) == alone[name]
    assert engine.load().reprefilled_tokens == before


def test_a_request_that_keeps_nothing_ends_with_its_turn(turns: TurnDriver) -> None:
    turns.add(make_request(1, GREEDY, max_tokens=4))
    turns.finish()
    with refused(NotFound, field="request_id", value="r1"):
        turns.engine.extend("r1", (5,), replace(GREEDY, max_tokens=4))


def test_what_cannot_extend_a_request_is_refused_and_changes_nothing(turns: TurnDriver) -> None:
    engine = turns.engine
    (session,) = sessions((7,))[2:3]
    name = session.request.request_id
    alone = play(turns, [replace(session)], kept)
    turns.add(session.request)
    turns.step(2)
    with refused(Conflict, field="request_id", value=name, why="is not kept"):
        engine.extend(name, (5,), replace(GREEDY, max_tokens=4))
    turns.finish()
    left = MAX_MODEL_LEN_TOKENS - 1 - len(session.request.prompt_token_ids) - TURN_TOKENS
    for given, most, field, value in (
        ((), 4, "given_token_ids", "0 tokens"),
        ((5, 64), 4, "given_token_ids", 64),
        ((-1, 5), 4, "given_token_ids", -1),
        ((5,) * (left + 1), 4, "given_token_ids", f"{left + 1} tokens"),
        ((5,), 0, "sampling.max_tokens", 0),
        ((5,), 1, "sampling.min_tokens", 2),
    ):
        with refused(InvalidValue, field=field, value=value):
            engine.extend(name, given, replace(session.request.sampling, max_tokens=most))
    engine.freeze(name)
    with refused(Conflict, field="request_id", value=name, why="is frozen"):
        engine.extend(name, (5,), replace(GREEDY, max_tokens=4))
    engine.thaw(name)
    kept(turns, session)
    with refused(Conflict, field="request_id", value=name, why="is not kept"):
        engine.extend(name, (5,), replace(GREEDY, max_tokens=4))
    turns.finish()
    assert (turns.responses[name].token_ids, turns.responses[name].logprobs) == alone[name]


def test_sessions_that_cannot_be_are_refused_by_field(turns: TurnDriver) -> None:
    (session,) = sessions((7,))[:1]
    turns.add(session.request)
    turns.finish()
    ended = turns.engine.request(session.request.request_id)
    turns.drop(ended.request_id)
    with refused(InvalidValue, field="kept", value=True):
        turns.engine.add(ended)
    good = ended.extended((5, 6), replace(GREEDY, max_tokens=4))
    for given, value in (
        (((0, 2), (2, 4)), (2, 4)),
        (((6, 6),), (6, 6)),
        (((6, 9),), (6, 9)),
        (((2, 4), (4, 8)), (4, 8)),
        (((6, 8), (2, 4)), (2, 4)),
    ):
        with refused(InvalidValue, field="given", value=value):
            turns.engine.add(replace(good, inputs=given))
    turns.engine.add(good)
    turns.engine.remove(good.request_id)


def test_a_full_context_ends_a_turn_and_leaves_no_room_for_another(turns: TurnDriver) -> None:
    request = replace(make_request(1, GREEDY, MAX_MODEL_LEN_TOKENS - 9, max_tokens=4), keeps=True)
    turns.add(request)
    turns.finish()
    turns.extend("r1", (5, 6, 7), 40)
    assert turns.finish()["r1"].finish_reason == "length"
    assert len(turns.responses["r1"].token_ids) == 9
    turns.engine.take_in(turns.take_out("r1"))
    assert turns.engine.request("r1").kept
    with refused(InvalidValue, field="given_token_ids", value="1 tokens"):
        turns.engine.extend("r1", (5,), replace(GREEDY, max_tokens=1))


# Sampling: what a turn begins anew, and what goes on.


def test_each_turn_is_sampled_as_a_request_after_everything_before_it(turns: TurnDriver) -> None:
    """Greedy, so that the random stream has no part."""
    sampling = replace(EVERYTHING, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, min_tokens=3, stop_token_ids=(5, 6))
    request = replace(make_request(1, sampling, 40, max_tokens=12), keeps=True)
    turns.add(request)
    turns.finish()
    for given in ((9, 10), (11,) * 40):
        before = turns.engine.request("r1").extended(given, request.sampling)
        alike = replace(before.turn(), request_id="alike", keeps=False)
        turns.extend("r1", given, 12)
        turns.finish()
        begin = before.turn_begin
        turns.add(alike)
        response = turns.finish()["alike"]
        assert response.token_ids == turns.responses["r1"].token_ids[begin:]
        assert response.finish_reason == turns.responses["r1"].finish_reason
        turns.drop("alike")


def test_the_random_stream_goes_on(turns: TurnDriver, kind: str) -> None:
    """Turns would otherwise repeat each other's noise."""
    if kind not in ("vllm-dense", "vllm-moe"):
        pytest.skip("its noise follows from the position of a token")
    request = replace(make_request(1, replace(SAMPLED, temperature=2.0), 5, max_tokens=12), keeps=True)
    turns.add(request)
    turns.finish()
    before = turns.engine.request("r1").extended((9,), request.sampling)
    turns.extend("r1", (9,), 12)
    turns.finish()
    turns.add(replace(before.turn(), request_id="anew", keeps=False))
    assert turns.finish()["anew"].token_ids != turns.responses["r1"].token_ids[before.turn_begin :]


@pytest.mark.parametrize("between", [moved, moved_late, in_rounds, frozen, dropped])
def test_turns_with_sampling_of_their_own_equal_those_of_the_session_left_alone(
    turns: TurnDriver, version_folder: VersionFolder, between: Between
) -> None:
    """Temperature, seed, penalties and stops change from turn to turn, and come back."""
    others = (replace(SAMPLED, seed=5), GREEDY, SAMPLINGS["everything"], SAMPLED)

    def changing() -> list[Session]:
        return [replace(session, samplings=others[index:]) for index, session in enumerate(sessions((3, 40, 7))[:2])]

    alone = play(turns, changing(), kept)
    assert alone != play(turns, sessions((3, 40, 7))[:2], kept), "their own sampling counts"
    turns.engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
    found = play(turns, changing(), between)
    assert {name: token_ids for name, (token_ids, _) in found.items()} == {
        name: token_ids for name, (token_ids, _) in alone.items()
    }


def test_a_stop_string_ends_a_turn_and_counts_in_it_alone(turns: TurnDriver, version_folder: VersionFolder) -> None:
    decode = Tokenizer.from_file(str(version_folder(1) / "tokenizer.json")).decode
    request = replace(make_request(1, GREEDY, 20, max_tokens=12), keeps=True)
    turns.add(request)
    free = turns.finish()["r1"].token_ids
    turns.drop("r1")
    stop = decode(free[3:5], skip_special_tokens=False)
    turns.add(replace(request, sampling=replace(request.sampling, stop=(stop,))))
    response = turns.finish()["r1"]
    assert response.stop == stop and 3 < len(response.token_ids) <= 5 and response.finish_reason == "stop"
    before = turns.engine.load()
    snapshot = turns.take_out("r1")
    turns.engine.take_in(snapshot)
    assert is_loaded_alike(turns.engine.load(), before)
    turns.extend("r1", (9,), 12)  # the stop string of the turn before does not end this one at once
    turns.finish()
    assert len(turns.responses["r1"].token_ids) > len(free[:5]) + 2 or turns.responses["r1"].stop


def test_a_stop_string_that_the_last_token_completes_ends_a_turn_once(
    turns: TurnDriver, version_folder: VersionFolder
) -> None:
    decode = Tokenizer.from_file(str(version_folder(1) / "tokenizer.json")).decode
    request = replace(make_request(1, GREEDY, 20, max_tokens=12), keeps=True)
    turns.add(request)
    free = turns.finish()["r1"].token_ids
    turns.drop("r1")
    last = next(count for count in range(2, 13) if free[count - 1] not in free[: count - 1])
    sampling = replace(request.sampling, max_tokens=last, stop=(decode(free[last - 1 : last]),))
    turns.add(replace(request, sampling=sampling))
    response = turns.finish()["r1"]
    assert response.token_ids == free[:last] and response.finish_reason == "stop"
    turns.extend("r1", (9,), 3)
    assert len(turns.finish()["r1"].token_ids) > last + 1


# Under pressure.


def test_a_turn_under_pressure_waits_or_is_computed_again(turns: TurnDriver) -> None:
    """Sessions that need more blocks than there are, extended at once: none blocks the others."""

    def long() -> list[Session]:
        requests = [make_request(index, SAMPLED, 100, max_tokens=TURN_TOKENS) for index in range(SLOTS)]
        return [Session(replace(request, keeps=True), ()) for request in requests]

    alone = {}
    for session in long():
        turns.add(session.request)
        turns.finish()
        turns.extend(session.request.request_id, (9,) * 100)
        turns.finish()
        alone[session.request.request_id] = turns.responses[session.request.request_id]
        turns.drop(session.request.request_id)
    for session in long():
        turns.add(session.request)
    turns.finish()
    before = turns.engine.load().reprefilled_tokens
    for session in long():
        turns.extend(session.request.request_id, (9,) * 100)
    for _ in range(400):  # an owner that needs room removes kept requests
        if not turns.engine.has_work():
            break
        turns.step()
        for session in long():
            name = session.request.request_id
            if turns.responses[name].finish_reason is not None:
                turns.engine.remove(name)
    assert not turns.engine.has_work()
    assert farthest(turns.responses, alone) < ROUNDING
    assert turns.engine.load().reprefilled_tokens > before


def test_a_kept_request_that_finds_no_room_brings_its_kv_with_its_next_turn(turns: TurnDriver) -> None:
    sampled = sessions((BLOCK + 1,))[1:3]
    alone = play(turns, [replace(session) for session in sampled], kept)
    for session in sampled:
        turns.add(session.request)
    turns.finish()
    snapshots = [turns.take_out(session.request.request_id) for session in sampled]
    filler = replace(make_request(0, FILLING, 212), request_id="filler0")
    fillers = [replace(filler, request_id=f"filler{index}", sampling=FILLING) for index in range(SLOTS - 1)]
    for each in fillers:
        turns.add(each)
        turns.step()
    for snapshot in snapshots:
        turns.engine.take_in(snapshot)
        assert turns.engine.request(snapshot.request.request_id).kept
    before = turns.engine.load().reprefilled_tokens
    again = []
    for session in sampled:
        turns.engine.freeze(session.request.request_id)  # it may move on from there
        snapshot = turns.engine.export(session.request.request_id)
        assert snapshot is not None
        again.append(over_the_wire(snapshot))
        turns.engine.remove(session.request.request_id)
        turns.engine.take_in(again[-1])
        kept(turns, session)
    turns.drop(*turns.fillers)
    turns.finish()
    for session in sampled:
        response = turns.responses[session.request.request_id]
        assert (response.token_ids, response.logprobs) == alone[session.request.request_id]
    assert turns.engine.load().reprefilled_tokens == before
