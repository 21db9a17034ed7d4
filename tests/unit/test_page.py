"""The page's parts without a browser: its history, its viewers, and how it words a service and a trajectory."""

import asyncio
import json

import numpy as np
import pytest

from dora.ops.page.browsers import CHECK_S, IDLE_S, Browsers
from dora.ops.page.feed import encoded
from dora.ops.page.head import head_of
from dora.ops.page.history import OLDER, OLDER_EVERY, RECENT, STATES, History
from dora.ops.page.reading import pieces, shade_of, turn_bars, worker_bars
from dora.ops.page.viewers import KEPT, RELOAD, VIEWERS, Viewers
from dora.ops.view.numbers import measured
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded, PermissionDenied, Unauthenticated
from dora.rpc.roles import Role, ServiceTokens, TokenGeneration
from tests.browser.many import STEP_S, World, simulated
from tests.owner_token import owner_token
from tests.refusals import refused


def filled(world: World, seconds: int, history: History | None = None) -> History:
    history = history or History()
    for second in range(seconds):
        history.add(world.status(second, seconds - second), 1000.0 + second)
    return history


def test_the_history_has_each_step_and_move_once() -> None:
    world, history = World(8), History()
    told = [world.status(second, 200 - second) for second in range(200)]
    updates = [history.add(status, 1000.0 + second) for second, status in enumerate(told)]
    assert [step[0] for step in history.steps] == list(range(200 // STEP_S))
    assert [move for update in updates for move in update["moves"]] == list(history.moves)
    again = pb.Status()
    again.CopyFrom(told[-1])
    for status in told:  # a stream that begins again tells all
        again.steps.extend(status.steps)
        again.moves.extend(status.moves)
    update = history.add(again, 1200.0)
    assert update["steps"] == update["moves"] == []


def test_another_run_at_the_same_address_begins_with_step_0() -> None:
    history = filled(World(4), 100)
    for second in range(30):
        history.add(World(4).status(second), 2000.0 + second)
    assert [step[0] for step in history.steps] == [0]


def test_the_history_is_bounded_and_keeps_hours() -> None:
    history, seconds = History(segments=100), RECENT + OLDER * OLDER_EVERY + 300
    told = [World(1).status(second) for second in range(20 * STEP_S)]
    for second in range(seconds):
        history.add(told[second % len(told)], float(second))
    assert len(history.recent) == RECENT and len(history.older) == OLDER
    assert history.recent[-1][0] - history.older[0][0] > 4 * 3600
    times = [sample[0] for sample in (*history.older, *history.recent)]
    assert times == sorted(times)
    assert sum(len(lane.segments) for lane in history.lanes.values()) <= 100
    json.loads(encoded(history.whole()))


def test_lanes_follow_workers_and_pools_that_come_and_go() -> None:
    history = filled(World(8), 10)
    roster = history.roster
    assert list(history.lanes) == [*(f"w{index}" for index in range(8)), "local/pool"]
    status = World(8).status(10)
    del status.workers[3]
    update = history.add(status, 1010.0)
    assert update["roster"] == roster, "its lane ends, and stays"
    assert STATES[update["workers"][1][3]] == "gone"
    status.workers.add(worker_id="w9", state="joining", version=-1)
    assert history.add(status, 1011.0)["roster"] == roster + 1


def test_what_is_not_finite_is_no_number() -> None:
    status = World(1).status(1)
    status.steps.add(step=0, mean_reward=float("nan"))
    assert json.loads(encoded(History().add(status, 1.0)))["steps"][0][4] is None


def test_faults_come_first() -> None:
    status = World(4).status(50)
    status.storage_faults.add(place="state", reason="no space left")
    status.versions[0].state, status.versions[0].reason = "rejected", "w1: another canary"
    lines = head_of(status)
    assert [tone for _, _, tone in lines[:2]] == ["bad", "bad"]
    assert "no space left" in lines[0][1] and "another canary" in lines[1][1]
    assert head_of(pb.Status()) == []


def test_the_page_sums_up_a_run() -> None:
    """The model, the prompts that are done and the time to go, evaluations, warnings, and one line on the promises. The
    trainer's metrics stand apart from the service's.
    """
    status = World(4).status(50)
    del status.steps[:]
    status.steps.add(step=9, mean_reward=0.5, metrics={"reward": 7.0, "mean reward": 8.0})
    status.model, status.prompts_total, status.step_s, status.groups_per_step = "/models/tiny-7b", 100, 60.0, 10
    for name in status.counters:
        status.counters[name] = 0
    for worker in status.workers:
        worker.state = "ready"
    status.counters["groups_trained"], status.counters["groups_cancelled"] = 30, 5
    status.evaluated.add(version=8, prompts=4, reward_mean=0.25)
    status.warnings.add(at=0.0, level="warning", text="w3 is slow")
    lines = {name: (text, tone) for name, text, tone in head_of(status)}
    assert lines["model"][0] == "tiny-7b" and lines["promises"] == ("kept, 0 alerts", "good")
    assert lines["prompts done"][0] == "35 of 100; 7 min 0 s to go"
    assert "0.2500" in lines["evaluated"][0] and lines["warning"][0].endswith("w3 is slow")
    assert lines["mean reward"][0] == measured(0.5) and lines["trainer: mean reward"][0] == measured(8.0)
    status.counters["groups_lost"] = 2
    status.trainer_stalled = "it makes no progress"
    text, tone = {name: (text, tone) for name, text, tone in head_of(status)}["promises"]
    assert text.startswith("broken") and "2 alerts" in text and tone == "bad"


# -------------------------------------------------------------------------------------------------------------- viewers


async def test_a_slow_viewer_gets_the_latest_and_is_told_to_load_the_rest() -> None:
    viewers = Viewers()
    slow, quick = viewers.follow(0), viewers.follow(0)
    viewers.publish(1, b"1")
    assert await anext(quick) == await anext(slow) == b"1"
    for seq in range(2, 5):
        viewers.publish(seq, str(seq).encode())
        assert await anext(quick) == str(seq).encode()
    assert await anext(slow) == b"234", "together"
    for seq in range(5, 6 + KEPT):
        viewers.publish(seq, b"x")
    assert await anext(slow) == RELOAD
    viewers.publish(6 + KEPT, b"next")
    assert await anext(slow) == b"next"
    waiting = asyncio.create_task(anext(slow, None))
    await asyncio.sleep(0)
    viewers.close()
    assert await waiting is None, "a front that stops waits for nobody"


async def test_viewers_are_counted() -> None:
    viewers = Viewers()
    held = [viewers.one() for _ in range(VIEWERS)]
    for each in held:
        each.__enter__()
    with refused(LimitExceeded, field="viewers", value=VIEWERS), viewers.one():
        raise AssertionError("one too many")
    held[0].__exit__(None, None, None)
    with viewers.one():
        assert viewers.open == VIEWERS


# ------------------------------------------------------------------------------------------------------------- browsers


async def test_browsers_have_the_rights_of_their_tokens_while_these_are_valid() -> None:
    tokens, now_s = ServiceTokens(owner_token("first")), 0.0
    async with simulated(World(2), tokens) as address:
        browsers = Browsers(address, clock=lambda: now_s)
        owner = await browsers.sign_in(tokens.of[Role.OWNER])
        operator = await browsers.sign_in(tokens.of[Role.OPERATOR])
        reader = await browsers.sign_in(tokens.of[Role.METRICS])
        found = [await browsers.find(cookie) for cookie in (owner, operator, reader)]
        assert [each is not None and each.may_act for each in found] == [True, True, False]
        assert len({each.csrf for each in found if each is not None}) == 3
        for wrong in ("", "x", tokens.of[Role.TRAINER]):  # an empty one would be a front's own certificate
            with pytest.raises((Unauthenticated, PermissionDenied)):
                await browsers.sign_in(wrong)
        assert await browsers.find("unknown") is None
        browsers.forget(owner)
        assert await browsers.find(owner) is None
        tokens.replace(TokenGeneration.following(owner_token("second")), overlap_s=0.0)
        assert await browsers.find(operator) is not None, "it was checked a moment ago"
        now_s = CHECK_S + 1
        assert await browsers.find(operator) is None
        late = await browsers.sign_in(tokens.of[Role.OPERATOR])
        now_s += IDLE_S + 1
        assert await browsers.find(late) is None
        await browsers.close()


# -------------------------------------------------------------------------------------------------------------- reading


def test_a_trajectory_is_read_in_pieces() -> None:
    shown = pb.ShownTrajectory(
        prompt_tokens=2,
        total_tokens=7,
        token_ids=np.arange(10, 17, dtype="<i4").tobytes(),
        logprobs=np.array([0, 0, -0.01, -9.0, 0, 0, -1.0], "<f4").tobytes(),
        is_sampled=np.array([0, 0, 1, 1, 0, 0, 1], "u1").tobytes(),
        worker_history=[pb.Segment(worker="w0", first_token=0, last_token=4, arrival="new")],
        turns=[
            pb.ShownTurn(turn=0, at=100.0, sampled_tokens=2),
            pb.ShownTurn(turn=1, given_tokens=2, first_token=4, sampled_tokens=1, name="tool"),
        ],
    )
    found = list(pieces(shown, lambda ids: "".join(f"[{each}]" for each in ids)))
    assert [(piece.kind, piece.shade, piece.text) for piece in found] == [
        ("prompt", 0, "[10][11]"),
        ("sampled", 0, "[12]"),
        ("sampled", 7, "[13]"),
        ("given", 0, "[14][15]"),
        ("sampled", 3, "[16]"),
    ]
    assert "-9.000" in found[2].told and not found[0].told
    assert [(bar.kind, bar.begin, bar.width) for bar in turn_bars(shown)] == [
        ("sampled", 0, 400),
        ("given", 400, 400),
        ("sampled", 800, 200),
    ]
    assert [(bar.kind, bar.begin, bar.width) for bar in worker_bars(shown)] == [("new", 0, 1000)]
    assert [shade_of(logprob) for logprob in (0.0, -0.05, -0.2, -100.0)] == [0, 0, 1, 7]
