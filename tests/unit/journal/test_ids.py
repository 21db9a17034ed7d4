"""Ids of an earlier life are not given again, whatever of it came to the disk."""

import pytest

from dora.config import WindowConfig
from dora.core import events as on
from dora.journal import records
from dora.journal.content import Content
from dora.journal.durable import Durable
from dora.orchestrator.recovery import recovery_state

HEARD = 4 * 4096  # groups that workers have heard of, and the disk has not


def begun(durable: Durable, incarnation: int) -> on.Restored:
    """An incarnation begins with what there is."""
    requests = Content(Durable()).requests([])
    restored = recovery_state.restored(
        durable,
        [],
        requests,
        lambda prompt: None,
        WindowConfig(),
        0.0,
        incarnation,  # type: ignore[arg-type, return-value]
    )
    durable.apply(records.Begun(incarnation, 0.0, 0.0, ""))
    return restored


@pytest.mark.parametrize("kept", [0, 1, 100, 999_999, 3_000_001])
def test_each_life_goes_on_behind_all_that_earlier_ones_have_said(kept: int) -> None:
    """The second life admits as much as a window can hold, and ends before any of it is on disk; so does the third."""
    durable = Durable()
    durable.apply(records.Begun(0, 0.0, 0.0, ""))
    if kept:
        values = ("g" + str(kept - 1), ["p", "t", "", "", 1, "{}", "{}", 0], 0, 0, 1, 0.0, [0], 0, -1)
        durable.apply(records.Admitted(0, *values))
    behind, commands = kept + HEARD, 1000
    for incarnation in (1, 2, 3):
        restored = begun(durable, incarnation)
        assert restored.groups_named >= behind and restored.commands_sent >= commands
        behind, commands = restored.groups_named + HEARD, restored.commands_sent + 1000
