"""A service starts again on its state folder with other settings, with fake engines: what was admitted keeps what was
promised to it, and what comes later has the new settings.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.data.run_record import TRAJECTORIES_FILE
from dora.data.trajectory import TrajectoryGroup
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.invariants import violations
from tests.e2e.restarts import Killed, settings_of
from tests.refusals import refused

BEFORE: dict[str, Any] = {"window__size": 3, "window__groups_per_step": 2, "rollout__max_tokens": 300}


async def trained(service: Killed, model: Path, steps: int, groups: int, leave_after: int = -1) -> list[Any]:
    """Trains so many steps, and then takes ``leave_after`` groups of the next one, if any, which stay with it."""
    taken: list[list[TrajectoryGroup]] = []
    async with dora.Trainer(service.address, token=service.token) as trainer:
        async for step in trainer.steps(groups=groups):
            taken.append([])
            async for group in step:
                taken[-1].append(group)
                if len(taken) > steps and len(taken[-1]) == leave_after:
                    return taken
            await step.commit(weights=model, wait=True)
            if len(taken) == steps and leave_after < 0:
                break
    return taken


@pytest.mark.parametrize(
    ("size", "groups", "is_killed"),
    [
        pytest.param(1, 4, False, marks=pytest.mark.full),
        pytest.param(4, 3, True, marks=pytest.mark.full),
        ("auto", 2, True),
    ],
)
async def test_window_batch_and_lengths_change_at_a_start(
    size: int | str, groups: int, is_killed: bool, tiny_dense: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    service = Killed(tmp_path, settings_of(tiny_dense, tmp_path, record=str(record), **BEFORE))
    await service.start()
    try:
        before = await trained(service, tiny_dense, 2, 2, leave_after=1)
        await (service.kill() if is_killed else service.stop())
        changes = {"window.size": size, "window.groups_per_step": groups, "rollout.max_tokens": 40}
        service.change(**changes, **{"rollout.group_size": 2})
        await service.start()
        after = await trained(service, tiny_dense, 6, groups)
        assert {group.group_id for group in before[2]} <= {group.group_id for group in after[0]}, "still of that step"
        assert [len(step) for step in after] == [groups] * 6
        await service.kill()
        await service.start()
        after += await trained(service, tiny_dense, 1, groups)
    finally:
        await service.stop()
    assert not list(violations(read_trajectories(record / TRAJECTORIES_FILE)))
    delivered = Counter(group.group_id for step in [*before[:2], *after] for group in step)
    assert set(delivered.values()) == {1}
    kinds = Counter()  # type: ignore[var-annotated]
    for group in (group for step in after for group in step):
        own = group.trajectories[0].sampling.max_tokens
        kinds[own, group.trajectories[0].group_size] += 1
        assert all(each.sampling.max_tokens == own and each.length_tokens <= own for each in group.trajectories)
        if own == 300:
            assert {each.window_versions for each in group.trajectories} == {3}
        elif size != "auto":
            assert {each.window_versions for each in group.trajectories} == {size}
    assert kinds.keys() == {(300, 4), (40, 2)}, "those of admission, and those of this start"


@pytest.mark.full
async def test_groups_that_would_be_late_are_named(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path, window__size=1, window__groups_per_step=4)
    service = Killed(tmp_path, settings)
    await service.start()
    try:
        taken = await trained(service, tiny_dense, 1, 4, leave_after=3)
        await service.stop()
        service.change(**{"window.groups_per_step": 2})
        with refused(AssertionError, names=("window.groups_per_step = 2",)) as caught:
            await service.start()
        assert re.search(r"at least [34]\b", str(caught.value))
        service.change(**{"window.groups_per_step": 4})
        await service.start()
        again = await trained(service, tiny_dense, 1, 4)
        assert {group.group_id for group in taken[1]} <= {group.group_id for group in again[0]}
    finally:
        await service.stop()


@pytest.mark.full
async def test_another_source_begins_at_its_first_prompt_and_the_admitted_ones_stay(
    tiny_dense: Path, tmp_path: Path
) -> None:
    files = {}
    for name in ("first", "second"):
        files[name] = tmp_path / f"{name}.jsonl"
        lines = [{"prompt_id": f"{name}-{i}", "prompt": "1 2", "answer": "3"} for i in range(14)]
        files[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"window__size": 2, "window__groups_per_step": 2, "reward__function": "dora.rewards.tiny:score"}
    service = Killed(tmp_path, settings_of(tiny_dense, tmp_path, prompts=str(files["first"]), **fields))
    await service.start()
    try:
        taken = await trained(service, tiny_dense, 2, 2)
        for steps in (4, 100):  # the second start continues the new source
            await service.stop()
            service.change(prompts=str(files["second"]))
            await service.start()
            taken += await trained(service, tiny_dense, steps, 2)
    finally:
        await service.stop()
    names = [group.prompt_id for step in taken for group in step]
    assert len(set(names)) == len(names)
    assert {name for name in names if name.startswith("second")} == {f"second-{i}" for i in range(14)}
    assert 4 <= len(names) - 14 <= 4 + 2 * 2, "of the first source, those that were admitted"
