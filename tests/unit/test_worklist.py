"""The scheduler's notifications, and the work that follows from them."""

from dora.core.worklist import Worklist


def test_nothing_is_to_be_settled_until_something_has_happened() -> None:
    worklist = Worklist()
    assert not worklist.awake
    worklist.wake()
    assert worklist.awake
    worklist.settle()
    assert not worklist.awake


def test_a_change_while_it_settles_is_for_the_next_look() -> None:
    worklist = Worklist()
    worklist.changed(3)
    worklist.settle()
    assert worklist.take_touched() == [3]
    worklist.changed(5)
    worklist.changed(1)
    assert worklist.awake
    assert worklist.touched == {1, 5}
    assert worklist.take_touched() == [1, 5]
    assert worklist.take_touched() == []


def test_a_worker_found_full_is_no_candidate_until_something_has_left_it() -> None:
    worklist = Worklist()
    worklist.changed(0)
    assert 0 not in worklist.roomy, "not before the scheduler has looked"
    worklist.take_touched()
    assert 0 in worklist.roomy
    worklist.full(0)
    assert 0 not in worklist.roomy
    worklist.may_have_room(0)
    assert 0 in worklist.roomy


def test_a_larger_ration_makes_full_workers_candidates_again_and_a_smaller_one_does_not() -> None:
    worklist = Worklist()
    worklist.ration(7, 4, [0, 1])
    assert 0 not in worklist.roomy, "there was no ration before that was smaller"
    worklist.ration(7, 3, [0, 1])
    assert 0 not in worklist.roomy
    worklist.ration(7, 5, [0, 1])
    assert 0 in worklist.roomy
    assert 1 in worklist.roomy
    worklist.full(0)
    worklist.ration(7, None, [0])
    assert 0 in worklist.roomy, "as many as fit is more than any ration"
    worklist.full(0)
    worklist.ration(7, None, [0])
    assert 0 not in worklist.roomy


def test_the_ration_of_a_retired_version_is_forgotten() -> None:
    worklist = Worklist()
    worklist.ration(7, 4, [0])
    worklist.retire(7)
    worklist.ration(7, 9, [0])
    assert 0 not in worklist.roomy


def test_idle_and_nearly_full_workers_are_those_last_said_to_be() -> None:
    worklist = Worklist()
    worklist.rests(2, True)
    worklist.rests(4, True)
    worklist.rests(4, False)
    worklist.fills(1, True)
    assert (worklist.idle, worklist.nearly_full) == ({2}, {1})
    worklist.assigned(2)
    worklist.fills(1, False)
    assert not worklist.idle
    assert not worklist.nearly_full
    assert not worklist.awake, "neither is anything to settle"
