"""A trajectory on its workers' lanes."""

from dora.ops.page.track import track_of
from dora.rpc import dora_pb2 as pb


def shown(*segments: tuple[str, str, float, float], **fields: object) -> pb.ShownTrajectory:
    """``segments``: worker, arrival, first token's time, last token's time before."""
    return pb.ShownTrajectory(
        status=pb.TrajectoryStatus(trajectory_id="g0.0"),
        started_at=100.0,
        worker_history=[pb.Segment(worker=worker, arrival=arrival) for worker, arrival, _, _ in segments],
        arrivals=[pb.ShownArrival(at=at, left_at=left_at) for _, _, at, left_at in segments],
        **fields,  # type: ignore[arg-type]
    )


def test_a_turn_lies_on_each_worker_that_sampled_it() -> None:
    found = track_of(
        shown(
            ("w0", "new", 101.0, 0.0), ("w1", "migrated", 105.0, 104.0), ("w0", "parked", 113.0, 110.0),
            turns=[
                pb.ShownTurn(turn=0, at=100.0, begun_at=101.0, ended_at=107.0),
                pb.ShownTurn(turn=1, at=112.0, begun_at=113.0),
            ],
        ),
        120.0,
    )  # fmt: skip
    assert found.lanes == ("w0", "w1") and found.is_whole and (found.begin, found.end) == (100.0, 120.0)
    assert [tuple(each) for each in found.stretches] == [
        ("queue", 0, 100.0, 101.0, 0),
        ("sampled", 0, 101.0, 104.0, 0),
        ("sampled", 1, 105.0, 107.0, 0),
        ("tools", 1, 107.0, 112.0, 0),
        ("queue", 0, 112.0, 113.0, 1),
        ("sampled", 0, 113.0, 120.0, 1),
    ]
    assert [tuple(hop) for hop in found.hops] == [(0, 1, 104.0, 105.0, "migrated"), (1, 0, 110.0, 113.0, "parked")]


def test_a_response_without_turns_is_one() -> None:
    found = track_of(shown(("w0", "new", 101.0, 0.0), finished_at=103.0), 200.0)
    assert [tuple(each) for each in found.stretches] == [
        ("queue", 0, 100.0, 101.0, 0),
        ("sampled", 0, 101.0, 103.0, 0),
    ]
    assert found.end == 103.0


def test_times_of_an_earlier_process_are_not_known() -> None:
    found = track_of(shown(("w0", "new", 0.0, 0.0), ("w1", "migrated", 105.0, 0.0)), 110.0)
    assert not found.is_whole
    assert [tuple(each) for each in found.stretches] == [("sampled", 1, 105.0, 110.0, 0)]
    assert not track_of(shown(("w0", "new", 0.0, 0.0)), 110.0).stretches
    assert not track_of(shown(), 110.0).stretches, "nothing has begun"
