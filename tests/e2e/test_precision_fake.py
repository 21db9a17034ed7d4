"""A mismatch above the limit, with fake engines: workers become new processes in place, and nothing is lost."""

import json
from pathlib import Path

import dora
from dora.client import Operator
from dora.data.trajectory import TrajectoryGroup
from dora.ops.verify.tolerances import numerics_of
from dora.ops.view.learning import learning_of
from dora.ops.view.service import mismatch_line
from tests.service import check_promises, configured, running, until

GROUPS = 4
STEPS = 5
TOO_FAR_IN = 1  # the step whose trainer tells a mismatch above the limit; version 3 is the first in full precision
LOW = {
    "workers__engine": "fake",
    "workers__quantisation": "int8",
    "workers__kv_dtype": "fp8",
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 200,
}


async def trained(trainer: dora.Trainer, model: Path) -> list[list[TrajectoryGroup]]:
    steps = []
    async for step in trainer.steps(groups=GROUPS):
        groups = [group async for group in step]
        steps.append(groups)
        kl = 0.3 if step.number == TOO_FAR_IN else 0.01
        told = {"mismatch_kl": kl, "ratio_outside": 0.25, "tokens_trained": 7.0}
        metrics = {f"staleness_0/{name}": value for name, value in told.items()}
        await step.commit(weights=model, metrics=metrics, wait=True)
        if len(steps) == STEPS:
            break
    return steps


async def test_a_mismatch_above_the_limit_ends_low_precision(tiny_dense: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    config = configured(tiny_dense, window__size=2, prompts="tiny", record=str(record), **LOW)
    async with (
        running(config, processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        first = {worker.worker_id: (worker.pid, worker.epoch) for worker in (await operator.status()).workers}
        steps = await trained(trainer, tiny_dense)
        status = await until(operator, lambda now: all(worker.version >= 3 for worker in now.workers))
    check_promises(steps, window=2, groups=GROUPS)
    last = {worker.worker_id: (worker.pid, worker.epoch) for worker in status.workers}
    assert last.keys() == first.keys()
    for name, (pid, epoch) in last.items():
        assert pid == first[name][0] and epoch > first[name][1], "another engine, the process that its launcher knows"
    assert status.counters["workers_lost"] == status.counters["c1_violations"] == status.counters["loads_failed"] == 0
    precisions = {each.version: each.precision for each in status.mismatches}
    assert precisions == {0: "int8, KV in fp8", 1: "int8, KV in fp8", 2: "int8, KV in fp8", 3: "", 4: ""}
    assert any("workers.mismatch_max" in line.text for line in status.warnings)
    line = mismatch_line(next(each for each in status.mismatches if each.version == TOO_FAR_IN))
    assert line == "v1 in int8, KV in fp8: KL 0.3 nats a token, 25.0% of ratios outside 0.8 to 1.25"
    for version in range(STEPS + 1):
        assert numerics_of(record / "versions" / str(version)).is_low == (version < 3)
    assert [each.kl for each in learning_of(record).mismatches] == [0.01, 0.01, 0.01, 0.3, 0.01]
    told = [json.loads(each).get("mismatches") for each in (record / "steps.jsonl").read_text().splitlines()]
    assert told[TOO_FAR_IN][0]["tokens"] == 7
