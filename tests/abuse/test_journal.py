"""A short form of ``python -m tests.abuse.journal``, and folders that no service can carry on."""

from tests.abuse.journal import stormed


def test_cut_and_damaged_logs_are_carried_on_rightly_or_refused() -> None:
    outcome = stormed(600, seed=7)
    assert outcome.crashes == [] and outcome.wrong == []
    assert outcome.carried_on > 300 and outcome.refused > 30 and len(outcome.ways) == 6
