"""The audit log: who did what with which result, in bounded files that outlive the service."""

import json
from pathlib import Path
from typing import Any

import pytest

from dora.client import Operator, Prompts, Trainer
from dora.errors import DoraError
from dora.orchestrator.recording.audit import ACTS, AUDIT_FILE, EARLIER, Audit, arguments_of
from dora.rpc import dora_pb2 as pb
from dora.rpc.access import ACCESS
from dora.rpc.roles import Caller, Role
from dora.system.files import entries
from tests.service import configured, running
from tests.tls_files import cluster, tls


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_text().splitlines()]


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
        ("operator", "Operator/Drain"),
        ("trainer", "Trainer/Attach"),
        ("submitter", "Prompts/Cancel"),
    ]
    assert found[0]["result"] == "OK" and found[1]["result"].startswith("NOT_FOUND: ")
    assert found[1]["arguments"] == {"worker_id": "nobody"} and "q1" in str(found[3]["arguments"])
    assert all(each["address"].startswith("ipv4:127.0.0.1:") for each in found)
    assert (state / AUDIT_FILE).stat().st_mode & 0o777 == 0o600
    assert not any(token in str(found) for token in handle.tokens.values())


async def test_the_files_are_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    audit = Audit(tmp_path, file_bytes=1000)
    for number in range(100):
        await audit.note(Caller(Role.OPERATOR, name="alice"), "ipv4:1", "Operator/Drain", {"number": number}, "OK")
    files = entries(tmp_path)
    assert len(files) == EARLIER + 1 and all(each.stat().st_size <= 1000 for each in files)
    assert lines(tmp_path)[-1]["arguments"] == {"number": 99} and lines(tmp_path)[-1]["name"] == "alice"


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
