"""Every method of every service, called by every role with its token: allowed or refused as the table says."""

import pytest

from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from dora.rpc.access import ACCESS, PACKAGE, may_call, roles_of, token_for
from dora.rpc.channel import open_channel
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import SERVICES, Role
from tests.abuse.callers import answer

LEAST = {
    Role.METRICS: {"Operator/GetStatus", "Operator/WatchStatus"},
    Role.SESSION: {"Sessions/Describe", "Sessions/Turn", "Sessions/EndSession", "Sessions/FailSession"},
    Role.ENVIRONMENT: {
        "Sessions/Attend",
        "Sessions/Open",
        "Sessions/FindSession",
        "Sessions/Withdraw",
        "Sessions/Describe",
        "Sessions/Turn",
        "Sessions/EndSession",
        "Sessions/FailSession",
        "Sessions/ServeFront",
    },
    Role.WORKER: {"Worker/Connect"},
    Role.HOST: {"Host/Join", "Host/ListFiles", "Host/FetchFile"},
}  # of the narrow roles: all that each may call


def methods() -> set[str]:
    services = pb.DESCRIPTOR.services_by_name.values()
    return {f"{service.name}/{method.name}" for service in services for method in service.methods}


def test_the_table_has_every_method_but_the_challenge() -> None:
    assert set(ACCESS) == methods() - {"Access/Challenge"}


@pytest.mark.parametrize("role", LEAST)
def test_a_narrow_role_may_call_what_it_needs_and_nothing_else(role: Role) -> None:
    assert {method for method in ACCESS if may_call(role, method)} == LEAST[role]


def test_a_service_is_whole_for_its_own_role_and_the_owner_except_the_workers() -> None:
    for method in ACCESS:
        service = method.partition("/")[0]
        assert may_call(SERVICES[service], method)
        assert may_call(Role.OWNER, method) is (service != "Worker")
        assert not roles_of(f"{method}s") and not roles_of(f"Access/{method}")


async def test_every_method_is_refused_to_every_role_that_the_table_does_not_name(handle: ServiceHandle) -> None:
    async with open_channel(handle.address) as channel:
        for method in sorted(ACCESS):
            for role in Role:
                found = await answer(channel, f"{PACKAGE}{method}", b"", handle.tokens[role])
                refused = isinstance(found, PermissionDenied)
                assert refused is not may_call(role, method), (method, role, found)
                if refused:
                    assert found.value == f"the {role}'s" and found.allowed == token_for(method)
            assert isinstance(await answer(channel, f"{PACKAGE}{method}", b"", None), Unauthenticated)
