"""Groups that grow while a service runs, with fake engines: whole or as small as their rewards allow."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.client.sessions import Session
from dora.data.trajectory import TrajectoryGroup
from tests.e2e.restarts import Killed, drive_through_restarts, settings_of, train_through_restarts
from tests.service import check_promises, configured, during, running, train

GROUPS = 4
LEAST, MOST = 2, 5
GROWING = {
    "prompts": "none",
    "reward__function": "tests.unit.reward_functions:parity",
    "window__size": 2,
    "rollout__max_tokens": 24,
    "rollout__group_size": MOST,
    "rollout__group_size_min": LEAST,
}


def prompts_of(count: int, environment: str = "") -> list[dict[str, str]]:
    return [{"text": "ab" * (1 + n % 5), "prompt_id": f"p{n}", "environment": environment} for n in range(count)]


def check_sizes(groups: Iterable[TrajectoryGroup]) -> Counter[int]:
    """A group has all members if its first rewards differ, else these alone. Returns the number of groups by size."""
    sizes: Counter[int] = Counter()
    for group in groups:
        assert [each.sample_index for each in group.trajectories] == list(range(len(group)))
        assert {each.group_size for each in group.trajectories} == {len(group)}
        rewards = [each.reward for each in group.trajectories]
        assert len(group) == (LEAST if len(set(rewards[:LEAST])) == 1 else MOST)
        sizes[len(group)] += 1
    return sizes


async def test_settled_groups_are_delivered_small_and_others_whole(tiny_dense: Path) -> None:
    config = configured(tiny_dense, workers__engine="fake", **GROWING)
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        await prompts.submit(prompts_of(5 * GROUPS))
        steps = await train(handle, trainer, steps=4, groups=GROUPS)
        counters = (await operator.status()).counters
    check_promises(steps, window=2, groups=GROUPS)
    sizes = check_sizes(group for step in steps for group in step)
    assert sizes[LEAST] and sizes[MOST]
    assert counters["members_skipped"] >= sizes[LEAST] * (MOST - LEAST)
    assert counters["members_started_late"] >= sizes[MOST] * (MOST - LEAST)


@pytest.mark.full
async def test_a_filter_of_equal_rewards_leaves_full_steps_of_groups_that_grew(tiny_dense: Path) -> None:
    config = configured(tiny_dense, workers__engine="fake", **GROWING, selection__filter="equal_rewards")
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        await prompts.submit(prompts_of(14 * GROUPS))
        steps = await train(handle, trainer, steps=3, groups=GROUPS)
        counters = (await operator.status()).counters
    check_promises(steps, window=2, groups=GROUPS)
    assert set(check_sizes(group for step in steps for group in step)) == {MOST}
    assert counters["groups_filtered"] and counters["groups_lost"] == 0


async def parity_of_tokens(session: Session) -> None:
    """Two turns; the reward depends on what was sampled."""
    if not session.turn.number:
        await session.ask([5, 6, 7], name="tool")
    await session.end(float(sum(session.response) % 2))


@pytest.mark.full
async def test_a_killed_orchestrator_starts_and_skips_the_same_members(tiny_dense: Path, tmp_path: Path) -> None:
    """Half of the prompts are single answers, half sessions. It dies while groups are undecided, grown and settled."""
    service = Killed(tmp_path, settings_of(tiny_dense, tmp_path, **GROWING, rollout__ignore_eos=False))
    await service.start()
    try:
        async with dora.Prompts(service.address, service.token) as prompts:
            mixed = [*prompts_of(2 * GROUPS), *prompts_of(4 * GROUPS, "tool")[2 * GROUPS :]]
            await prompts.submit(mixed[::2] + mixed[1::2])
        driver = asyncio.create_task(drive_through_restarts(service, "tool", parity_of_tokens))
        steps = await during(driver, train_through_restarts(service, tiny_dense, groups=GROUPS, steps=2))
        driver.cancel()
    finally:
        await service.stop()
    check_promises(steps, window=2, groups=GROUPS)
    sizes = check_sizes(group for step in steps for group in step)
    assert sizes[LEAST] and sizes[MOST]
