"""The audit log: who did what with which result, in bounded files that outlive the service."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from dora.client import Operator, Prompts, Trainer
from dora.errors import DoraError
from dora.orchestrator.recording.audit import (
    ACTS,
    AUDIT_FILE,
    COUNTED_MAX,
    EARLIER,
    LINES_MAX,
    REFUSED_FILE,
    Audit,
    arguments_of,
)
from dora.rpc import dora_pb2 as pb
from dora.rpc.access import ACCESS
from dora.rpc.roles import Caller, Role
from dora.system.files import entries
from tests.owner_token import owner_token
from tests.service import configured, running
from tests.tls_files import cluster, tls


def lines(folder: Path, file: str = AUDIT_FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


async def test_acts_are_noted_with_their_results(tmp_path: Path, tiny_dense: Path) -> None:
    folder, state = cluster(tmp_path / "tls"), tmp_path / "state"
    fields = {"workers__count": 0, "service__state": str(state), "tls__folder": str(folder / "service")}
    config = configured(tiny_dense, workers__engine="fake", **fields)
    async with running(config) as handle:
        async with Operator(handle.address, tls=tls(folder, "operator")) as operator:
            await operator.status()
            await operator.rebalance()
            with pytest.raises(DoraError):
                await operator.drain("nobody")
        async with Trainer(handle.address, token=handle.tokens[Role.TRAINER], tls=tls(folder, "trainer")) as trainer:
            await trainer.attach(groups=4)
        async with Prompts(handle.address, tls=tls(folder, "submitter")) as prompts:
            await prompts.cancel(["q1"], "mistyped")
        async with Operator(handle.address, tls=tls(folder, "session")) as stranger:
            with pytest.raises(DoraError):
                await stranger.rebalance()
    found = lines(state)
    assert [(each["role"], each["act"]) for each in found] == [
        ("operator", "Operator/Rebalance"),
        ("trainer", "Trainer/Attach"),
        ("submitter", "Prompts/Cancel"),
    ]
    assert found[0]["result"] == "OK" and "q1" in str(found[2]["arguments"])
    drained, forbidden = lines(state, REFUSED_FILE)
    assert drained["result"].startswith("NOT_FOUND: ") and drained["arguments"] == {"worker_id": "nobody"}
    assert (drained["role"], drained["act"]) == ("operator", "Operator/Drain")
    assert forbidden["result"].startswith("PERMISSION_DENIED: ") and forbidden["act"] == "Operator/Rebalance"
    assert all(each["address"].startswith("ipv4:127.0.0.1:") for each in (*found, drained, forbidden))
    assert (state / AUDIT_FILE).stat().st_mode & 0o777 == 0o600
    assert not any(token in str(found) for token in handle.tokens.values())


async def test_the_files_are_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    audit = Audit(tmp_path, file_bytes=1000)
    for number in range(100):
        await audit.note(Caller(Role.OPERATOR, name="alice"), "ipv4:1", "Operator/Drain", {"number": number}, "OK")
    files = entries(tmp_path)
    assert len(files) == EARLIER + 1 and all(each.stat().st_size <= 1000 for each in files)
    assert lines(tmp_path)[-1]["arguments"] == {"number": 99} and lines(tmp_path)[-1]["name"] == "alice"


async def test_strangers_leave_lines_with_their_addresses(tmp_path: Path, tiny_dense: Path) -> None:
    """A wrong token, the token of another role, and calls without a proof, which gRPC's own client makes."""
    state = tmp_path / "state"
    config = configured(tiny_dense, workers__engine="fake", workers__count=0, service__state=str(state))
    async with running(config) as handle:
        for token in (owner_token("wrong"), handle.tokens[Role.SESSION]):
            async with Operator(handle.address, token) as stranger:
                with pytest.raises(DoraError):
                    await stranger.status()
        for _ in range(3):  # the service ends a connection that makes more than CALLS_MAX calls without a proof
            async with grpc.aio.insecure_channel(handle.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                for _ in range(LINES_MAX):
                    with pytest.raises(grpc.aio.AioRpcError) as ended:
                        await channel.unary_unary("/dora.v1.Operator/Drain")(b"")
                    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    found = lines(state, REFUSED_FILE)
    silent, counted = ([each for each in found if each["act"] == act] for act in ("Access/Challenge", "Operator/Drain"))
    (forbidden,) = (each for each in found if each["act"] == "Operator/GetStatus")
    assert [(each["address"], each["repeated"]) for each in silent] == [("127.0.0.1", 1)]
    assert forbidden["role"] == "session" and forbidden["result"].startswith("PERMISSION_DENIED: ")
    assert [each.get("repeated") for each in counted] == [*[None] * LINES_MAX, 2 * LINES_MAX]
    assert all(each["result"].startswith("UNAUTHENTICATED") and each["role"] == "" for each in (*silent, *counted))
    assert all("127.0.0.1" in each["address"] for each in found)
    assert not (state / AUDIT_FILE).exists()
    assert not any(token in str(found) for token in (*handle.tokens.values(), owner_token("wrong")))


@pytest.mark.parametrize("result", ["NOT_FOUND: no", "OK"])
@pytest.mark.parametrize("roles", [[Role.SESSION], [Role.SUBMITTER, Role.ENVIRONMENT, None]])
async def test_no_flood_of_a_lesser_role_takes_an_operators_lines(
    roles: list[Role | None], result: str, tmp_path: Path
) -> None:
    audit = Audit(tmp_path, file_bytes=20_000)
    operator = Caller(Role.OPERATOR, name="alice")
    await audit.note(operator, "ipv4:10.0.0.1:1", "Operator/Scale", {"workers": 0}, "OK")
    for number in range(3_000):
        role = roles[number % len(roles)]
        caller = None if role is None else Caller(role)
        await audit.note(caller, f"ipv4:10.0.0.2:{number}", "Prompts/Cancel", {"ids": "q" * 200}, result)
    await audit.settle()
    kept = [json.loads(line) for file in entries(tmp_path) for line in file.read_text().splitlines()]
    assert len(kept) == 1 + len(roles) * (LINES_MAX + 1)
    assert [each["arguments"] for each in kept if each["name"] == "alice"] == [{"workers": 0}]
    assert sum(each.get("repeated", 1) for each in kept) == 3_001, "each call is in a line or in a number"


async def test_callers_from_many_addresses_are_bounded(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for number in range(COUNTED_MAX + 500):
        address = f"ipv4:10.{number >> 8}.{number & 255}.1:1"
        await audit.note(None, address, "Operator/Drain", {}, "UNAUTHENTICATED: no")
        audit.challenged(address)
    await audit.settle(proof_s=0.0)
    kept = lines(tmp_path, REFUSED_FILE)
    assert len(kept) == COUNTED_MAX + LINES_MAX + 1 + COUNTED_MAX
    assert [each["repeated"] for each in kept if each["act"] == "others"] == [500 - LINES_MAX]


async def test_a_challenge_that_a_proof_follows_leaves_no_line(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.challenged("ipv4:10.0.0.2:1")
    await audit.settle()
    assert not entries(tmp_path), "its proof may follow yet"
    audit.proven("ipv4:10.0.0.2:1")
    await audit.settle(proof_s=0.0)
    assert not entries(tmp_path)


async def test_a_folder_that_is_gone_ends_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(tmp_path / "gone")
    for _ in range(3):
        await audit.note(Caller(Role.OPERATOR), "ipv4:1", "Operator/Drain", {}, "OK")
    assert [record.message.startswith("the audit log cannot be written") for record in caplog.records] == [True]


def test_arguments_are_bounded() -> None:
    request = pb.CancelRequest(ids=[f"q{number}" for number in range(20)], reason="r" * 1000)
    found = arguments_of(request)
    assert found["ids"] == [*(f"q{number}" for number in range(8)), "and 12 more"] and found["reason"] == "r" * 200
    commit = arguments_of(pb.CommitStepRequest(step=3, canary=pb.Canary(token_ids=bytes(400))))
    assert commit["step"] == 3 and commit["canary"].endswith(" bytes") and len(str(commit)) < 100


def test_every_act_is_a_method() -> None:
    assert set(ACCESS) > ACTS
