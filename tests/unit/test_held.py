"""The requests that a reattaching worker or pool reports are checked before they are believed."""

import pytest

from dora.config import validated
from dora.data.types import EngineCapability, KvEndpoint, PoolCapability
from dora.errors import InvalidValue
from dora.orchestrator.rollout import worker_checks
from dora.orchestrator.rollout.worker_checks import checked_hello, checked_pool_hello
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from tests.refusals import data_words, refused

WORKERS = {"max_model_len_tokens": 256, "kv_tokens": 4096}
CONFIG = validated({"workers": WORKERS, "rollout": {"max_tokens": 48}})
CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32", 32)
HOSTS = pb.HostedVersion(version=3, name="v3")


def held(request_id: str = "g0.0", tokens: int = 5, first_token: int = 0) -> pb.HeldRequest:
    return pb.HeldRequest(request_id=request_id, tokens=tokens, first_token=first_token)


WRONG = {
    "a request twice": [held(), held()],
    "first_token at most tokens": [held(tokens=5, first_token=6)],
    "printable": [held("g0\n")],
}


def hello(*requests: pb.HeldRequest, hosts: pb.HostedVersion | None = HOSTS) -> pb.WorkerHello:
    message = convert.hello_to_wire("w0", 1, "host", CAPABILITY)
    message.MergeFrom(pb.WorkerHello(hosts=hosts, held=requests))
    return message


def pool_hello(*requests: pb.HeldRequest) -> pb.PoolHello:
    message = convert.pool_hello_to_wire("pool-0", 1, "host", PoolCapability(1 << 20, 0), KvEndpoint("", ()))
    message.held.extend(requests)
    return message


def test_what_it_holds_is_taken() -> None:
    assert checked_hello(hello(held("g0.0"), held("g0.1", 256, 256)), CONFIG, 64) == CAPABILITY
    assert checked_pool_hello(pool_hello(held("g0.0", 100_000))).memory_bytes == 1 << 20


@pytest.mark.parametrize("why", WRONG)
def test_what_cannot_be_is_refused(why: str) -> None:
    with refused(InvalidValue, names=data_words(why)):
        checked_hello(hello(*WRONG[why]), CONFIG, 64)
    with refused(InvalidValue, names=data_words(why)):
        checked_pool_hello(pool_hello(*WRONG[why]))


def test_a_worker_holds_no_more_than_its_context_and_only_of_a_version() -> None:
    with refused(InvalidValue, field="held.g0.0", names=("256",)):
        checked_hello(hello(held(tokens=257)), CONFIG, 64)
    with refused(InvalidValue, field="hosts"):
        checked_hello(hello(held(), hosts=None), CONFIG, 64)


def test_it_holds_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_checks, "HELD_MAX", 1)
    with refused(InvalidValue, field="held", value="2 requests", names=("1",)):
        checked_pool_hello(pool_hello(held("a"), held("b")))
