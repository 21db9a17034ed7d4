"""A trainer that is connected and stands still keeps no other one out, in a whole service."""

from pathlib import Path

import pytest

from dora.client import Operator, Trainer
from dora.core.rules.stalls import STALLED
from dora.errors import Conflict
from tests.refusals import refused
from tests.service import configured, running

GROUPS = 2


async def test_another_trainer_goes_on_with_the_groups_of_one_that_stalls(tiny_dense: Path) -> None:
    weights = tiny_dense / "model.safetensors"
    config = configured(
        tiny_dense, workers__engine="fake", workers__count=1, service__trainer_stall_timeout_s=0.3, window__size=1
    )
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        Trainer(handle.address, token=handle.token, name="first") as first,
        Trainer(handle.address, token=handle.token, name="second") as second,
    ):
        held: list[str] = []
        async for step in first.steps(GROUPS):
            held = [group.group_id async for group in step]
            if step.number == 2:
                break
            await step.commit(weights=weights, wait=True)
        with refused(Conflict, field="trainer", value="first"):
            await second.attach(GROUPS)
        async for status in operator.watch(50):
            if status.trainer_stalled:
                break
        assert status.trainer == "first" and status.trainer_stalled.startswith(STALLED)
        assert status.counters["leases_lapsed"] == 1
        again = await anext(second.steps(GROUPS))
        assert [group.group_id async for group in again] == held and again.number == step.number
        with pytest.raises(Conflict) as caught:
            await step.commit(weights=weights, wait=True)
        assert "trainer second" in str(caught.value) and STALLED in str(caught.value)
        assert (await again.commit(weights=weights, wait=True)).version == again.number + 1
