"""A restart of the service changes nothing that an operator sees, except for the fields that are listed here."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from google.protobuf.json_format import MessageToDict
from prometheus_client.parser import text_string_to_metric_families

import dora
from dora.client import Operator
from dora.data.types import Prompt
from dora.ops.page.head import head_of
from dora.ops.page.history import History
from dora.rpc import dora_pb2 as pb
from tests.e2e.restarts import Killed, settings_of
from tests.service import until

GROUPS: Final = 4
STEPS: Final = 2
# Fields of a status that a restart changes: times, epochs, and what a process measures from its start on.
STATUS_CHANGES: Final = {
    "uptime_s": "of the process",
    "steps": "the process's own measurements; the record has the steps",
    "step_s": "their mean",
    "agents_wait_s": "their mean",
    "dp_groups_to_add": "follows from the steps",
    "moves": "since the start",
    "warnings": "the restart adds one",
}
WORKER_CHANGES: Final = {"epoch", "tokens_per_s"}
HOST_CHANGES: Final = {"seen_at", "capacity", "versions"}
# Counters since the start of the process; the others count since the state folder's first start.
SINCE_START: Final = {
    "tokens_generated", "tokens_per_s", "trajectories_finished", "trajectories_evaluated", "kv_bytes",
    "blackout_ms_p50", "blackout_ms_p99", "parked_ms_p50", "parked_ms_p99", "rewards_failed", "groups_filtered",
}  # fmt: skip


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def shown(status: pb.Status) -> dict[str, Any]:
    """Every field of a status, also those that are empty."""
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def without(rows: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


async def scraped(address: str) -> Mapping[str, float]:
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
        return {f"{each.name}{sorted(each.labels.items())}": each.value for of in families for each in of.samples}


async def test_what_an_operator_sees_outlives_the_service(tiny_dense: Path, tmp_path: Path) -> None:
    metrics, rows = free_address(), tmp_path / "held-out.jsonl"
    rows.write_text(json.dumps({"text": "ab", "prompt_id": "e0", "verifier": {"characters": "abc"}}) + "\n")
    settings = settings_of(
        tiny_dense, tmp_path, prompts="none", window__size=2, rollout__max_tokens=60, service__metrics=metrics,
        reward__function="dora.rewards.tiny:score", record=str(tmp_path / "record"), evaluation__prompts=str(rows),
        evaluation__every=2, workers__reattach_timeout_s=30.0,
    )  # fmt: skip
    service = Killed(tmp_path, settings)
    await service.start()
    try:
        async with (
            dora.Prompts(service.address, service.token) as prompts,
            dora.Trainer(service.address, token=service.token, name="mine") as trainer,
        ):
            wanted = (STEPS + 1) * GROUPS
            verifier = json.dumps({"characters": "abc"})
            await prompts.submit([Prompt(f"p{i}", "t", (1, 2, 3), verifier_json=verifier) for i in range(wanted)])
            async for step in trainer.steps(groups=GROUPS):
                _ = [group async for group in step]
                if step.number == STEPS:
                    break  # its groups stay with the trainer, which trains on them
                await step.commit(weights=tiny_dense, wait=True, metrics={"loss": 0.5})
            async with Operator(service.address, service.token) as operator:
                await operator.scale(3)
                before = await until(operator, is_settled)
            metrics_before = await scraped(metrics)
            await service.restart()
            async with Operator(service.address, service.token) as operator:
                after = await until(operator, lambda status: is_settled(status) and status.trainer == "mine")
            metrics_after = await scraped(metrics)
            check_status(shown(before), shown(after))
            check_page(before, after)
            check_metrics(metrics_before, metrics_after)
    finally:
        await service.stop()


def is_settled(status: pb.Status) -> bool:
    """Three workers have the newest version, and the series has evaluated it."""
    is_loaded = [each.version == STEPS for each in status.workers if each.state == "ready"]
    return is_loaded == [True] * 3 and [each.version for each in status.evaluated] == [0, STEPS]


def check_status(before: dict[str, Any], after: dict[str, Any]) -> None:
    fields = {field.name for field in pb.Status.DESCRIPTOR.fields}
    assert STATUS_CHANGES.keys() <= fields
    apart = {*STATUS_CHANGES, "counters", "workers", "hosts"}
    assert {name: before.get(name) for name in fields - apart} == {name: after.get(name) for name in fields - apart}
    assert without(before["workers"], WORKER_CHANGES) == without(after["workers"], WORKER_CHANGES)
    assert without(before["hosts"], HOST_CHANGES) == without(after["hosts"], HOST_CHANGES)
    logged = before["counters"].keys() - SINCE_START
    assert {name: before["counters"][name] for name in logged} == {name: after["counters"][name] for name in logged}


def check_page(before: pb.Status, after: pb.Status) -> None:
    """The same page goes on: its charts keep what they have, and each line is there again with the same text."""
    history = History()
    history.add(before, 1.0)
    lanes = list(history.lanes)
    history.add(after, 2.0)
    assert [step[0] for step in history.steps] == list(range(STEPS)) and list(history.lanes) == lanes
    measured = {"up", "tokens/s", "pace"}
    texts = {name: text for name, text, tone in head_of(before) if tone != "count" and name not in measured}
    assert texts == {name: text for name, text, tone in head_of(history.status) if name in texts and tone != "count"}


def check_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    for name in ("dora_trainer_attached[]", "dora_version_newest[]", "dora_step[]", "dora_groups_trained_total[]"):
        assert before[name] == after[name] > 0, name
    assert after["dora_restarts[]"] == before["dora_restarts[]"] + 1
