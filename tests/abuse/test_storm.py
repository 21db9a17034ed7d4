"""The short form of the storm, in every test run; the whole one is ``python -m tests.abuse --count 100000``."""

from pathlib import Path

import pytest

from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import SERVICES
from tests.abuse import folders, storm
from tests.abuse.__main__ import failures
from tests.abuse.calls import RPCS
from tests.sweeps import counts_of

# Nothing there is that they could change, and no state folder:
OPERATORS = ("Operator/Migrate", "Operator/Drain", "Operator/Checkpoint")
OPEN = "Access/Challenge"  # needs no token and reads no message: tests/unit/test_challenge.py
SESSIONS = (
    "Sessions/FindSession",
    "Sessions/Turn",
    "Sessions/EndSession",
    "Sessions/FailSession",
)  # of which there are none
REFUSED = ("Trainer/CommitStep", "Trainer/RepublishVersion", *OPERATORS, *SESSIONS)


def test_no_call_is_left_out() -> None:
    services = pb.DESCRIPTOR.services_by_name
    methods = {f"{name}/{method.name}" for name, service in services.items() for method in service.methods}
    assert {rpc.name for rpc in RPCS} == methods - {OPEN}
    assert set(services) == {*SERVICES, OPEN.partition("/")[0]}


@pytest.mark.parametrize("count", counts_of(100, 1000))  # messages to each RPC
async def test_generated_calls_end_nothing_and_an_honest_trainer_goes_on(
    tiny_dense: Path, tmp_path: Path, count: int
) -> None:
    report = await storm.stormed(tiny_dense, count, seed=2)
    weights = folders.stormed(tiny_dense, tmp_path, count // 10, seed=1)
    assert not failures(report, weights)
    assert sum(each.statuses["UNAUTHENTICATED"] for each in report.outcomes) > len(report.outcomes) * count // 1000
    accepted = [each.name for each in report.outcomes if each.statuses["OK"] + each.statuses["OPEN"]]
    assert 2 * len({*accepted} - {*REFUSED}) > len(report.outcomes) - len(REFUSED), accepted
    for each in report.outcomes:
        assert each.messages >= count and each.statuses["PERMISSION_DENIED"], each
        least = 1 if each.name in SESSIONS else count // 50
        assert each.statuses["INVALID_ARGUMENT"] >= least, each
        if each.name not in REFUSED and count >= 1000:  # fewer may all be wrong
            assert each.statuses["OK"] + each.statuses["OPEN"] > count // 500, each.name
    assert count // 100 < weights.accepted < 9 * count // 100
