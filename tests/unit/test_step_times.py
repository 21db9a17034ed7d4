"""What a step's time went to: phases by events and commands, and the last response of each group in between."""

from typing import Any

import pytest

from dora.config import RolloutConfig
from dora.core import commands as do
from dora.core import events as on
from dora.data.step_parts import PARTS, named
from dora.data.types import Prompt, SamplingParams
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.session_paths import InputRun
from dora.orchestrator.rollout.responses.state import ResponseState, SegmentStart
from dora.orchestrator.rollout.step_times import StepTimes, divided, spans_of
from dora.orchestrator.rollout.telemetry import StepRecord, Telemetry

OFFSET = 1_000_000.0  # of the wall clock to the monotonic one
EVENT = on.Tick()


def entry_of(begin: float, end: float, *starts: tuple[float, float], environment: str = "") -> ResponseState:
    """A response of one token a segment. ``starts``: (came, left) of each segment. Times are monotonic."""
    prompt = Prompt("p", "", (1,), group_size=1, environment=environment)
    entry = ResponseState(0, "g0.0", "g0", prompt, 0, 0, SamplingParams(), OFFSET + begin)
    entry.segment_starts = [
        SegmentStart("w", place, "migrated" if place else "new", OFFSET + came, OFFSET + left if left else 0.0)
        for place, (came, left) in enumerate(starts)
    ]
    entry.finish_reason, entry.finished_at = "stop", OFFSET + end
    return entry


class Bench:
    """A step of four groups, of one response each."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.buffer = ResponseBuffer(RolloutConfig())

    def came(self, now_s: float, event: Any = EVENT, *commands: Any) -> None:
        self.times.came(event, commands, self.buffer, 4, now_s, OFFSET + now_s)

    def requested(self, now_s: float, step: int = 0) -> None:
        self.came(now_s, on.StepRequested(1, step))

    def delivered(self, now_s: float, entry: ResponseState, *, again: bool = False, closes: bool = False) -> None:
        group_id = f"g{now_s}"
        self.buffer._groups[group_id] = (entry,)
        close = [do.CloseStep(0, 1, False)] if closes else []
        self.came(now_s, EVENT, do.DeliverGroup(group_id, 0, 1, again), *close)


def test_the_parts_of_a_step_sum_up_to_its_time() -> None:
    bench = Bench()
    bench.requested(0.0)
    bench.delivered(10.0, entry_of(1.0, 9.5, (3.0, 0.0)))  # begun 1 s late, 2 s without a token, 0.5 s judged
    bench.delivered(10.0, entry_of(1.0, 8.0, (2.0, 0.0)))  # was ready: no time
    bench.delivered(14.0, entry_of(2.0, 14.0, (3.0, 0.0), (12.5, 11.0)))  # 1.5 s between its two workers
    bench.delivered(20.0, entry_of(2.0, 20.0, (3.0, 0.0)), closes=True)
    parts = bench.times.committed(25.0, 25.5)
    assert parts == pytest.approx(
        {"admission": 1.0, "queue": 2.0, "first": 6.5, "rewards": 0.5, "moves": 1.5, "sampling": 2.5, "tail": 6.0,
         "training": 5.0, "publishing": 0.5}
    )  # fmt: skip
    bench.times.answered(26.0)
    bench.requested(28.0, 1)
    bench.delivered(28.0, entry_of(2.0, 20.0, (3.0, 0.0)), closes=True)
    bench.times.uploads(30.0)
    bench.times.uploads(31.0)
    assert bench.times.committed(33.0, 34.0) == pytest.approx({"publishing": 4.5, "asking": 2.0, "training": 2.0}), (
        "an upload is part of publishing"
    )


def test_a_trainer_that_comes_back_was_away() -> None:
    bench = Bench()
    bench.requested(0.0)
    bench.delivered(2.0, entry_of(0.0, 2.0, (0.0, 0.0)))
    bench.requested(9.0)
    bench.delivered(9.0, entry_of(0.0, 2.0, (0.0, 0.0)), again=True)
    bench.delivered(10.0, entry_of(0.0, 10.0, (0.0, 0.0)), closes=True)
    bench.requested(12.0)
    assert bench.times.committed(14.0, 14.0) == pytest.approx(
        {"first": 2.0, "asking": 7.0, "sampling": 1.0, "training": 4.0}
    )


def test_a_session_waits_for_its_environment_and_for_workers() -> None:
    entry = entry_of(0.0, 20.0, (1.0, 0.0), (9.0, 8.0), environment="tests")
    entry.inputs = [InputRun(5, 1, OFFSET + 8.0, 4, "tool", "stop", "", 0, 5, False)]
    entry.turn_begins, entry.turn_ends = {0: OFFSET + 1.0, 1: OFFSET + 9.0}, {0: OFFSET + 4.0, 1: OFFSET + 20.0}
    found = divided(spans_of(entry, OFFSET + 23.0), OFFSET, OFFSET + 23.0)
    assert found == pytest.approx({"queue": 1.0, "sampling": 14.0, "tools": 7.0, "moves": 1.0})
    assert sum(found.values()) == pytest.approx(23.0)


def test_a_response_of_an_earlier_process_is_sampling_as_far_as_is_known() -> None:
    entry = entry_of(0.0, 6.0)
    entry.segment_starts = [SegmentStart("w0", 0, "new"), SegmentStart("w1", 3, "migrated")]
    assert divided(spans_of(entry, OFFSET + 6.0), OFFSET, OFFSET + 6.0) == pytest.approx({"sampling": 6.0})


def test_parts_are_named_the_longest_first() -> None:
    assert named({"tools": 1.0, "moves": 2.0, "rewards": 0.0, "later": 0.5}) == [
        (PARTS["moves"], 2.0),
        (PARTS["tools"], 1.0),
        ("later", 0.5),
    ]


@pytest.mark.parametrize("part", ["sampling", "tools"])
def test_workers_are_to_be_added_for_their_own_time_alone(part: str) -> None:
    """The trainer waits three quarters of each step: for workers, or for agents."""
    telemetry = Telemetry()
    for step in range(4):
        parts = {part: 75.0, "training": 25.0}
        telemetry.steps.append(StepRecord(step, 0.0, 0.0, 0.0, 0, 0, took_s=100.0, waited_s=75.0, parts_s=parts))
    advised = telemetry.groups_to_add(2)
    assert advised is not None and (advised > 0) == (part == "sampling")
    assert telemetry.latest_s() == (100.0, 75.0 if part == "tools" else 0.0)
