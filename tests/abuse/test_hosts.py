"""Agents that lie, and machines that cannot serve: each is told why, and the service goes on as it was."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from dora.client import Operator
from dora.errors import MISSING, Conflict, DoraError, InvalidValue, NotFound
from dora.orchestrator.main import ServiceHandle
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import LimitExceeded, from_rpc_error
from dora.rpc.proven import proven_channel
from dora.rpc.roles import Role
from tests.refusals import refused
from tests.service import until
from tests.sweeps import full

GOOD = {"dora_version": __version__, "workers": 0, "capacity": pb.HostCapacity(store_free_bytes=1 << 40)}
NAME = "v1-" + "0" * 32


async def told(handle: ServiceHandle, *messages: pb.HostMessage) -> DoraError:
    """The result of an agent that sends this message and no other, if it is more than a welcome."""

    async def said() -> AsyncIterator[pb.HostMessage]:
        for message in messages:
            yield message
        if messages and messages[0].HasField("hello"):
            await asyncio.Event().wait()

    async with proven_channel(handle.address, handle.tokens[Role.HOST]) as channel:
        call = stubs.HostStub(channel).Join(said(), timeout=30)
        try:
            async for order in call:
                assert order.HasField("welcome")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    raise AssertionError("it was let stay")


def hello(name: str = "liar", **fields: object) -> pb.HostMessage:
    return pb.HostMessage(hello=pb.HostHello(name=name, **{**GOOD, **fields}))


@pytest.mark.parametrize(
    ("messages", "kind", "field", "value"),
    [
        ([], InvalidValue, "hello", MISSING),
        ([pb.HostMessage(report=pb.HostReport())], InvalidValue, "hello", MISSING),
        ([hello("local")], InvalidValue, "name", "local"),
        ([hello("../x")], InvalidValue, "name", "../x"),
        ([hello(dora_version="0.0.9")], Conflict, "dora_version", "0.0.9"),
        ([hello(), hello()], InvalidValue, "kind", "hello"),
        ([hello(), pb.HostMessage(arrived=pb.VersionArrived(name="v1"))], InvalidValue, "version's name", "v1"),
        *full(
            ([hello(model_digest="f" * 32)], Conflict, "model", "f" * 32),
            ([hello(capacity=pb.HostCapacity(store_free_bytes=100))], LimitExceeded, "store_free_bytes", 100),
            ([hello(), pb.HostMessage()], InvalidValue, "kind", None),
            ([hello(), pb.HostMessage(ready=pb.HostReady(held=["../1"]))], InvalidValue, "version's name", "../1"),
            (
                [hello(), pb.HostMessage(ready=pb.HostReady(relay_address="x" * 300))],
                InvalidValue,
                "held",
                "0 versions",
            ),
            (
                [
                    hello(),
                    pb.HostMessage(arrived=pb.VersionArrived(name=NAME, bytes_per_s=float("nan"), start_s=1.0)),
                ],
                InvalidValue,
                "link: bytes_per_s",
                float("nan"),
            ),
            ([hello(), pb.HostMessage(failed=pb.VersionFailed(name="?"))], InvalidValue, "version's name", "?"),
            (
                [hello(), pb.HostMessage(report=pb.HostReport(failed="x" * 5000))],
                InvalidValue,
                "troubles",
                "a longer text",
            ),
        ),
    ],
)
async def test_an_agent_that_says_what_is_wrong_is_told_so_and_lost(
    handle: ServiceHandle, messages: list[pb.HostMessage], kind: type[DoraError], field: str, value: object
) -> None:
    with refused(kind, field=field, value=value):
        raise await told(handle, *messages)
    async with Operator(handle.address, handle.tokens[Role.OPERATOR]) as operator:
        status = await until(operator, lambda status: not any(each.state == "ready" for each in status.hosts[1:]))
    assert status.hosts[0].name == "local" and status.hosts[0].state == "ready"


async def test_what_is_no_live_version_changes_nothing(handle: ServiceHandle) -> None:
    """A version that an agent says it has, and that nobody has published, is one that it is told to drop."""
    leaves = asyncio.Event()

    async def said() -> AsyncIterator[pb.HostMessage]:
        yield hello("early")
        yield pb.HostMessage(ready=pb.HostReady(relay_address="127.0.0.1:1", held=[NAME]))
        yield pb.HostMessage(arrived=pb.VersionArrived(name=NAME))
        yield pb.HostMessage(failed=pb.VersionFailed(name=NAME, reason="none"))
        await leaves.wait()

    async with proven_channel(handle.address, handle.tokens[Role.HOST]) as channel:
        call = stubs.HostStub(channel).Join(said())
        orders = aiter(call)
        assert (await anext(orders)).HasField("welcome")
        assert [(await anext(orders)).drop_version.name for _ in range(2)] == [NAME, NAME]
        async with Operator(handle.address, handle.tokens[Role.OPERATOR]) as operator:
            status = await operator.status()
            assert [list(each.versions) for each in status.hosts if each.name == "early"] == [[0]]
            leaves.set()
            await until(operator, lambda status: all(each.state != "ready" for each in status.hosts[1:]))


async def test_only_the_models_own_files_are_given_out(handle: ServiceHandle) -> None:
    async with proven_channel(handle.address, handle.tokens[Role.HOST]) as channel:
        stub = stubs.HostStub(channel)
        listed = await stub.ListFiles(pb.ListFilesRequest())
        size_bytes = {file.name: file.file_bytes for file in listed.files}["config.json"]
        request = pb.FetchFileRequest(name="config.json", offset=size_bytes - 2)
        chunks = [chunk.content async for chunk in stub.FetchFile(request)]
        assert len(b"".join(chunks)) == 2
        for name, offset, kind in (
            ("../token", 0, NotFound),
            ("", 0, NotFound),
            ("config.json", 1 << 40, InvalidValue),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.FetchFile(pb.FetchFileRequest(name=name, offset=offset)):
                    pass
            assert isinstance(from_rpc_error(refused.value), kind)
