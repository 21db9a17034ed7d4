"""A short form of ``python -m tests.abuse.journal``, and folders that no service can carry on."""

import pytest

from tests.abuse.journal import stormed
from tests.sweeps import counts_of


@pytest.mark.parametrize("count", counts_of(60, 600))
def test_cut_and_damaged_logs_are_carried_on_rightly_or_refused(count: int) -> None:
    outcome = stormed(count, seed=7)
    assert outcome.crashes == [] and outcome.wrong == []
    assert outcome.carried_on > count // 2 and outcome.refused > count // 20 and len(outcome.ways) == 4
