"""The handoff table: complete where it must be, silent nowhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.handoff.table import LIVE, TABLE, Action, Handoff, Phase, Signal
from dora.errors import IllegalTransition
from tests.refusals import refused


def handoff(phase: Phase = Phase.PLANNED) -> Handoff:
    made = Handoff(row=0, request_id="g0.0", source="a", target="b", began_s=0.0)
    made.phase = phase
    return made


@given(st.lists(st.sampled_from(list(Signal)), max_size=30))
def test_exactly_one_owner(signals: list[Signal]) -> None:
    """Along any path: committed at most once; a source that froze is thawed, freed or dead, exactly one of these."""
    made = handoff()
    actions: list[Action] = []
    frozen = source_lost = False
    for signal in signals:
        try:
            actions += made.advance(signal)
        except IllegalTransition:
            continue
        frozen |= Action.COPY_OUT in actions
        source_lost |= signal is Signal.SOURCE_LOST
    ends = [actions.count(action) for action in (Action.COMMIT, Action.ORPHAN, Action.RESTART_AT_TARGET)]
    assert sum(ends) <= 1
    if made.phase is Phase.ABORTED and frozen and not source_lost and Signal.FINISHED not in signals:
        assert actions.count(Action.THAW_SOURCE) + actions.count(Action.RESTART_AT_TARGET) == 1
    if Action.COMMIT in actions and not source_lost:
        assert actions.count(Action.FREE_SOURCE) == 1
        assert actions.index(Action.FREE_SOURCE) > actions.index(Action.COMMIT)
    if source_lost and made.phase in (Phase.ABORTED, Phase.RELEASED):
        assert Action.COMMIT in actions or Action.ORPHAN in actions  # nobody else would finish it
    released = actions.count(Action.RELEASE_SNAPSHOT)
    assert released == int(Action.COPY_IN in actions and made.phase not in (Phase.FROZEN, Phase.STRANDED))


@pytest.mark.parametrize("phase", sorted(LIVE, key=lambda phase: phase.value))
@pytest.mark.parametrize("signal", [Signal.TARGET_LOST, Signal.UNDO])
def test_every_live_phase_can_end(phase: Phase, signal: Signal) -> None:
    """A dead or silent target never keeps a request."""
    made = handoff(phase)
    made.advance(signal)
    assert made.phase is Phase.ABORTED


def test_illegal_pairs_change_nothing() -> None:
    for phase in Phase:
        for signal in Signal:
            if (phase, signal) not in TABLE:
                made = handoff(phase)
                with refused(
                    IllegalTransition,
                    names=(
                        signal.name,
                        phase.name,
                    ),
                ):
                    made.advance(signal)
                assert made.phase is phase
