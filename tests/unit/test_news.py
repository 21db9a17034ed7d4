"""What a stream of statuses tells anew: each step and move once, the latest ones if there were many."""

from dora.core.handoff.table import Handoff, HandoffKind
from dora.orchestrator.rollout.telemetry import MOVES_KEPT, Telemetry
from dora.orchestrator.services.status import MOVES_TOLD, News


def moved(telemetry: Telemetry, count: int) -> None:
    for _ in range(count):
        telemetry.moved(Handoff(0, "g0.0", "w0", "pool-0", 0.0, HandoffKind.PARK), "done")


def test_each_step_and_move_is_told_once() -> None:
    telemetry = Telemetry()
    news, late = News(telemetry), News(telemetry)
    assert news.steps() == news.moves() == []
    moved(telemetry, 3)
    telemetry.step(0, [], {}, 1.0, 1.0)
    assert [each.step for each in news.steps()] == [0] and [each.number for each in news.moves()] == [0, 1, 2]
    assert news.steps() == news.moves() == []
    telemetry.step(1, [], {}, 2.0, 2.0)
    moved(telemetry, 1)
    assert [each.step for each in news.steps()] == [1] and [each.number for each in news.moves()] == [3]
    assert [each.step for each in late.steps()] == [0, 1], "another stream has its own place"
    (move,) = late.moves()[3:]
    assert (move.source, move.target, move.kind, move.result) == ("w0", "pool-0", "park", "done") and move.at > 0


def test_of_many_moves_the_latest_are_kept_and_told() -> None:
    telemetry = Telemetry()
    news = News(telemetry)
    moved(telemetry, MOVES_KEPT + 5)
    assert len(telemetry.latest_moves) == MOVES_KEPT
    told = news.moves()
    assert [each.number for each in (told[0], told[-1])] == [MOVES_KEPT + 5 - MOVES_TOLD, MOVES_KEPT + 4]
    assert news.moves() == []
