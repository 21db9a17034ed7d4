"""Each role may call its own services, the owner a client's, a worker those of its name, a stranger none."""

import asyncio
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dora.client import Operator, Prompts, Sessions, Trainer
from dora.data.types import Prompt
from dora.errors import DoraError, InvalidValue, NotFound
from dora.host.command import worker_environment
from dora.orchestrator.assembly import services_of
from dora.orchestrator.main import ServiceHandle
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.access import ACCESS, PACKAGE, may_call, name_of
from dora.rpc.channel import open_channel
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import CALLER, Caller, Role, ServiceTokens
from dora.worker.fake.engine import FakeEngine
from tests.abuse.callers import answer
from tests.owner_token import owner_token
from tests.proofs import caller_of
from tests.refusals import refused, refused_call
from tests.service import configured, running, until
from tests.unit.test_runtime import Shell

EVERY = {f"{PACKAGE}{name}": roles[0] for name, roles in ACCESS.items()}
NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"  # so that a call that is permitted changes nothing


async def test_each_role_may_do_its_own_and_the_owner_what_a_client_may(handle: ServiceHandle) -> None:
    secrets = [*handle.tokens.values()]
    assert len(set(secrets)) == len(Role)
    async with open_channel(handle.address) as channel:
        for method, needed in EVERY.items():
            for role, token in handle.tokens.items():
                found = await answer(channel, method, NO_MESSAGE, token)
                allowed = may_call(role, name_of(method))
                assert isinstance(found, PermissionDenied) is not allowed, (method, role, found)
                if not allowed:
                    assert f"{needed} token" in found.allowed and str(role) in found.value
            for nobody in (None, "", "wrong", secrets[0][:-1], f"{secrets[0]} "):
                found = await answer(channel, method, b"", nobody)
                assert isinstance(found, Unauthenticated) and f"{needed} token" in found.allowed, (method, nobody)
                assert not any(secret in str(found) for secret in secrets)


async def test_a_sessions_token_uses_the_sessions_that_it_was_given(tiny_dense: Path) -> None:
    """Another session looks to it as one that there is not, whatever it asks of it."""
    config = configured(tiny_dense, workers__engine="fake", prompts="none", reward__function="dora.rewards.tiny:score")
    async with (
        running(config) as handle,
        Trainer(handle.address, token=handle.token) as trainer,
        Sessions(handle.address, handle.tokens[Role.ENVIRONMENT]) as environment,
        Sessions(handle.address, handle.tokens[Role.SESSION]) as holder,
    ):
        await trainer.attach(groups=1)
        mine, theirs = await environment.open(Prompt("g", "", ()), size=2)
        assert mine.capability != theirs.capability and len(mine.capability) == 32
        given = [replace(each, _connections=holder._connections) for each in (mine, theirs)]
        for capability in (b"", mine.capability, theirs.capability[:-1]):
            stranger = replace(given[1], capability=capability)
            for act in (stranger.begin([5, 6]), stranger.end(1e300), stranger.fail("x")):
                with refused(NotFound, field="session_id"):
                    await act
        for name in ("g0.7", "g9.0"):
            with refused(NotFound, field="session_id"):
                await replace(given[0], session_id=name).end(1.0)
        with pytest.raises(PermissionDenied):
            await holder.find(mine.session_id)
        await given[0].begin([5, 6])
        await given[0].end(1.0)
        assert (await environment.find(theirs.session_id)).turn.number == 0, "nobody has touched it"
        assert (await environment.find(mine.session_id)).has_ended
        with refused(NotFound, field="session_id"):
            await environment.find("g9.0")


async def test_another_scheme_is_no_token(handle: ServiceHandle) -> None:
    async with open_channel(handle.address) as channel:
        for value in (handle.token, f"Basic {handle.token}", f"bearer {handle.token}x", "Bearer"):
            with refused_call(Unauthenticated, field="authorization"):
                await stubs.OperatorStub(channel).GetStatus(pb.StatusRequest(), metadata=(("authorization", value),))


def test_roles_tokens_follow_from_the_owners_and_not_the_owners_from_theirs() -> None:
    first, again, other, new = (
        ServiceTokens(owner_token("secret")),
        ServiceTokens(owner_token("secret")),
        ServiceTokens(owner_token("secret2")),
        ServiceTokens(),
    )
    assert first.of == again.of and first.of[Role.OWNER] == owner_token("secret")
    assert not set(first.of.values()) & set(other.of.values())
    assert new.of[Role.OWNER] != ServiceTokens().of[Role.OWNER]
    assert caller_of(first, "") is None


def test_a_started_workers_token_is_good_for_its_name_until_it_is_started_again() -> None:
    tokens = ServiceTokens()
    general = caller_of(tokens, tokens.of[Role.WORKER])
    before = tokens.started("w0")
    w0 = caller_of(tokens, before, "w0")
    assert w0 == Caller(Role.WORKER, "w0") and general == Caller(Role.WORKER)
    assert tokens.may_take(w0, "w0") and not tokens.may_take(w0, "w1") and not tokens.may_take(w0, "mine")
    assert tokens.may_take(general, "mine") and not tokens.may_take(general, "w0")
    after = tokens.started("w0")
    assert caller_of(tokens, before, "w0") is None and caller_of(tokens, after, "w0") == w0


def test_a_worker_has_its_token_by_environment_alone(tiny_dense: Path) -> None:
    config = configured(tiny_dense)
    assert worker_environment(config.workers, "secret")["DORA_TOKEN"] == "secret"


async def test_a_name_that_the_service_gave_to_its_worker_is_taken_by_no_other(
    tmp_path: Path, tiny_dense: Path
) -> None:
    """The name stays taken while that worker is absent; and no refusal reveals what engines must have alike."""
    shell, tokens = Shell(tmp_path, tiny_dense, None), ServiceTokens()
    service = services_of(shell.runtime, tiny_dense, tmp_path / "kv", tokens).workers
    w7 = caller_of(tokens, tokens.started("w7"), "w7")
    assert w7 is not None
    engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=tiny_dense)
    hello = pb.WorkerMessage(hello=convert.hello_to_wire("w7", 1, "host", engine.capability))
    for caller, name, allowed in ((Caller(Role.WORKER), "w7", "w7"), (w7, "w8", "w7")):
        CALLER.set(caller)
        hello.hello.worker_id = name
        with refused(
            PermissionDenied,
            field="worker_id",
            names=(
                name,
                allowed,
            ),
        ):
            service._open(hello)
    CALLER.set(w7)
    hello.hello.worker_id, hello.hello.fingerprint = "w7", "f" * 64
    with pytest.raises(InvalidValue) as caught:
        service._open(hello)
    assert (caught.value.field, caught.value.value) == ("fingerprint", "(not shown)")
    assert "f" * 64 not in str(caught.value)
    hello.hello.fingerprint = shell.session.capability.fingerprint
    assert service._open(hello).worker_id == "w7"
    await shell.runtime.close()


async def test_a_worker_may_be_added_by_hand_under_a_name_of_its_own(tiny_dense: Path) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.tokens[Role.OPERATOR]) as operator,
    ):
        taken = await by_hand(handle, "w0", Role.WORKER)
        assert await taken.wait() == 3
        assert b"worker_id = 'w0' may not do this" in (await taken.communicate())[0]
        owners = await by_hand(handle, "mine", Role.OWNER)
        assert await owners.wait() == 3
        assert b"it must be the service's worker token" in (await owners.communicate())[0]
        mine = await by_hand(handle, "mine", Role.WORKER)
        status = await until(operator, lambda status: sum(worker.state == "ready" for worker in status.workers) == 2)
        assert [worker.worker_id for worker in status.workers] == ["mine", "w0"]
        mine.terminate()
        await mine.wait()


async def by_hand(handle: ServiceHandle, name: str, role: Role) -> asyncio.subprocess.Process:
    argv = ["-m", "dora.worker", "--orchestrator", handle.address, "--worker-id", name, "--engine", "fake"]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *argv, "--model", str(handle.model)),
        env={**os.environ, "DORA_TOKEN": handle.tokens[role]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_a_submitter_can_submit_and_nothing_else(handle: ServiceHandle) -> None:
    async with Prompts(handle.address, handle.tokens[Role.SUBMITTER]) as prompts:
        assert (await prompts.submit([{"prompt_token_ids": [3, 4]}])).accepted == 1
    async with Operator(handle.address, handle.tokens[Role.SUBMITTER]) as operator:
        with pytest.raises(PermissionDenied) as caught:
            await operator.status()
        error: DoraError = caught.value
        assert re.search(r"the submitter's.*operator token, or its owner's", str(error))
