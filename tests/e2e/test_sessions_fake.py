"""Sessions of several turns while a service runs, with fake engines: one version each, every token where it was."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import dora
from dora.client import Operator
from dora.client.sessions import AT_ONCE, Session
from dora.config import Config
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import Conflict, InvalidValue, NotFound
from dora.ops.verify.invariants import violations
from dora.rpc.errors import LimitExceeded, ServiceUnavailable
from dora.rpc.roles import Role
from tests.e2e.restarts import Killed, drive_through_restarts, settings_of, train_through_restarts
from tests.refusals import refused
from tests.service import check_promises, configured, during, running, train
from tests.snippets import snippet

GROUPS = 4
GROUP_SIZE = 2
TOOL = [5, 6, 7]
Driver = Callable[[Session], Awaitable[None]]


def config_of(model: Path, **fields: Any) -> Config:
    fake = {
        "workers__engine": "fake",
        "prompts": "none",
        "reward__function": "dora.rewards.tiny:score",
        "window__size": 2,
        "rollout__max_tokens": 12,
    }
    return configured(model, **{**fake, **fields})


def prompts_of(count: int) -> list[dict[str, Any]]:
    return [
        {"text": "ab" * (1 + n % 5), "prompt_id": f"p{n}", "group_size": GROUP_SIZE, "environment": "tool"}
        for n in range(count)
    ]


async def drive(handle: Any, driver: Driver) -> None:
    async with dora.Sessions(handle.address, handle.token) as sessions:
        await sessions.drive("tool", driver)


async def several_turns(session: Session) -> None:
    """Two to four turns, of which each gets the tool's tokens; the reward is their number."""
    turns = 2 + len(session.prompt_token_ids) % 3
    for number in range(session.turn.number + 1, turns):  # it may be one that another call has left
        pieces = [piece async for piece in session.stream(TOOL * number, name="tool")] if number == 2 else []
        turn = await session.ask(TOOL * number, name="tool")
        if pieces:
            assert [*turn.token_ids] == [token_id for piece in pieces for token_id in piece.token_ids], "the same turn"
            assert [*turn.logprobs] == [logprob for piece in pieces for logprob in piece.logprobs]
        assert turn.number == number and len(turn.token_ids) == len(turn.logprobs) and turn.finish_reason
    await session.end(float(turns), log=",".join(map(str, session.response)))


def check_session(trajectory: Trajectory) -> None:
    """The trainer gets the tokens that the environment saw; it trains on those alone that the policy sampled."""
    seen = [int(each) for each in trajectory.verifier_log.split(",")]
    assert trajectory.response_token_ids.tolist() == seen
    assert {segment.version for segment in trajectory.worker_history} == {trajectory.behaviour_version}
    assert trajectory.reward_valid and trajectory.reward == len(trajectory.events) + 1
    mask = trajectory.loss_mask.astype(bool)
    for number, event in enumerate(trajectory.events, start=1):
        given = slice(event.position_token - len(TOOL) * number, event.position_token)
        assert (event.kind, event.name) == ("given", "tool")
        assert trajectory.response_token_ids[given].tolist() == TOOL * number
        assert not mask[given].any() and not trajectory.logprobs[given].any()
    assert (~mask).sum() == len(TOOL) * sum(range(1, len(trajectory.events) + 1))
    assert (trajectory.logprobs[mask] < 0).all()


def check_sessions(steps: list[list[TrajectoryGroup]], window: int = 2) -> None:
    check_promises(steps, window=window, groups=GROUPS)
    for step in steps:
        for group in step:
            for trajectory in group.trajectories:
                check_session(trajectory)


async def test_a_step_of_sessions_reaches_the_trainer(tiny_dense: Path) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit(prompts_of(5 * GROUPS))
        driving = asyncio.create_task(drive(handle, several_turns))
        steps = await during(driving, train(handle, trainer, steps=4, groups=GROUPS))
        driving.cancel()
    check_sessions(steps)


async def test_the_environment_of_the_documentation(tiny_dense: Path) -> None:
    async def run_tool(token_ids: Any) -> list[int] | None:
        return TOOL if len(token_ids) > 4 else None

    names: dict[str, Any] = {"run_tool": run_tool, "solved": lambda session: session.turn.number > 0}
    exec(snippet("docs/sessions.md", "async def solve"), names)
    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit([{**each, "environment": "python-tool"} for each in prompts_of(2 * GROUPS)])
        driving = asyncio.create_task(names["main"](handle.address, handle.token))
        (step, *_) = await during(driving, train(handle, trainer, steps=1, groups=GROUPS))
        driving.cancel()
    for group in step:
        for each in group.trajectories:
            assert len(each.events) <= 8 and {event.name for event in each.events} <= {"python"}
            assert each.reward_valid and each.reward == bool(each.events)
            assert (each.loss_mask == 0).sum() == len(TOOL) * len(each.events)


GONE = ServiceUnavailable("gone")


async def lost(session: Session) -> None:
    raise GONE


async def test_calls_that_must_be_refused(tiny_dense: Path) -> None:
    """Each is one clear error, and the session goes on as if there had been none."""
    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        dora.Sessions(handle.address, handle.token) as sessions,
    ):
        await prompts.submit(prompts_of(GROUPS))
        await trainer.attach(groups=GROUPS)
        attended = sessions.attend("tool")
        session = await anext(attended)
        with refused(InvalidValue, field="given_token_ids"):
            await session.ask([])
        with refused(InvalidValue, field="given_token_ids"):
            await session.ask([1 << 20])
        with refused(InvalidValue, field="given_token_ids", value="1000 tokens"):
            await session.ask([5] * 1000)
        with refused(InvalidValue, field="given_token_ids", value="100000 tokens"):
            await session.ask([5] * 100_000)
        with refused(LimitExceeded, field="message: bytes"):
            await session.ask([5] * 12_500_000)  # 50 MB
        with refused(InvalidValue, field="max_tokens"):
            await session.ask(TOOL, max_tokens=5000)
        with refused(InvalidValue, field="reward"):
            await session.end(float("nan"))
        for wrong, field in (
            ({"temperature": 3}, "sampling.temperature"),
            ({"max_tokens": 3}, "sampling.max_tokens"),
            ({"min_tokens": 13}, "sampling.min_tokens"),  # of the twelve that a turn may have
            ({"stop_token_ids": [1 << 20]}, "sampling.stop_token_ids"),
            ({"logit_bias": 1}, "sampling.logit_bias"),
        ):
            with refused(InvalidValue, field=field):
                await session.ask(TOOL, sampling=cast(Any, wrong))
        first = await session.ask(TOOL, name="tool", sampling={"temperature": 0.5, "seed": 7})
        session.turn = session.turn.__class__(0, *[getattr(first, name) for name in ("token_ids", "logprobs")], None)
        own: dict[str, Any] = {"seed": 7, "temperature": 0.5, "top_k": 0}  # 0 is the session's
        again = await session.ask(TOOL, name="tool", sampling=own)  # a repeated call gets the same turn
        assert again.token_ids.tolist() == first.token_ids.tolist()
        session.turn = session.turn.__class__(0, first.token_ids, first.logprobs, None)
        with refused(Conflict, field="given_token_ids"):
            await session.ask([1, 2], sampling=own)
        for other, name in (({}, "seed"), ({**own, "temperature": 1.0}, "temperature"), ({**own, "stop": "a"}, "stop")):
            with refused(Conflict, field=f"sampling.{name}"):
                await session.ask(TOOL, sampling=other)
        with refused(Conflict, field="max_tokens", value=5):
            await session.ask(TOOL, sampling=own, max_tokens=5)
        session.turn = again
        await session.end(1.0)
        await session.end(1.0)
        with refused(Conflict, field="session_id"):
            await session.end(2.0)
        with refused(Conflict, field="session"):
            await session.ask(TOOL)
        session.session_id = "g999.0"
        with refused(NotFound, field="session_id"):
            await session.ask(TOOL)
        await attended.aclose()  # type: ignore[attr-defined]
        with pytest.raises(ServiceUnavailable) as raised:  # its session waits for the next call
            await sessions.drive("tool", lost)
        assert raised.value is GONE


async def test_a_driver_has_as_many_turns_open_as_sessions(tiny_dense: Path) -> None:
    """All sessions of a driver ask at the same moment, and no call of theirs is refused."""
    arrived: set[str] = set()
    are_all = asyncio.Event()

    async def together(session: Session) -> None:
        arrived.add(session.session_id)
        if len(arrived) == AT_ONCE:
            are_all.set()
        await are_all.wait()
        await session.ask(TOOL, name="tool")
        await session.end(1.0)

    groups = AT_ONCE // GROUP_SIZE
    config = config_of(tiny_dense, window__size=1, workers__slots=64, workers__kv_tokens=32768, rollout__max_tokens=4)
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit(prompts_of(groups))
        driving = asyncio.create_task(drive(handle, together))
        (step,) = await during(driving, train(handle, trainer, steps=1, groups=groups))
        driving.cancel()
    assert {each.trajectory_id for group in step for each in group.trajectories} == arrived, "none was replaced"


async def test_a_failed_session_is_replaced_and_then_broken_off(tiny_dense: Path) -> None:
    async def failing(session: Session) -> None:
        if session.prompt_id == "p0":
            raise OSError("its sandbox died")
        else:
            await several_turns(session)

    config = config_of(tiny_dense, sessions__replacements=1)
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit(prompts_of(2 * GROUPS))
        driving = asyncio.create_task(drive(handle, failing))
        (step, *_) = await during(driving, train(handle, trainer, steps=1, groups=GROUPS))
        driving.cancel()
    failed = [each for group in step for each in group.trajectories if each.prompt_id == "p0"]
    assert [each.trajectory_id.partition("~")[2] for each in failed] == ["1"] * GROUP_SIZE
    assert not any(each.reward_valid for each in failed)
    assert all(each.verifier_log.startswith("broken off: OSError: its sandbox died") for each in failed)


async def through_restarts(
    model: Path,
    tmp_path: Path,
    work: Callable[[Session], Awaitable[None]],
    *,
    prompts: int,
    groups: int,
    steps: int,
    **fields: Any,
) -> list[list[TrajectoryGroup]]:
    """Returns what a trainer took in ``steps`` steps of sessions driven by ``work``, with a kill in each step."""
    settings = settings_of(
        model,
        tmp_path,
        prompts="none",
        reward__function="dora.rewards.tiny:score",
        window__size=2,
        rollout__max_tokens=12,
        rollout__ignore_eos=False,
        **fields,
    )
    service = Killed(tmp_path, settings)
    await service.start()
    try:
        async with dora.Prompts(service.address, service.token) as source:
            await source.submit(prompts_of(prompts))
        driving = asyncio.create_task(drive_through_restarts(service, "tool", work))
        taken = await during(driving, train_through_restarts(service, model, groups=groups, steps=steps))
        driving.cancel()
    finally:
        await service.stop()
    return taken


async def test_a_killed_orchestrator_costs_no_turn(tiny_dense: Path, tmp_path: Path) -> None:
    """It dies while sessions wait for their tools and while they sample. They go on under their version."""
    steps = await through_restarts(tiny_dense, tmp_path, several_turns, prompts=5 * GROUPS, groups=GROUPS, steps=3)
    check_sessions(steps)


async def scored_turns(session: Session) -> None:
    """Three turns with the logprobs of all before them; those of a context are the beginning of its continuations'."""
    known: list[float] = []
    for number in range(session.turn.number + 1, 4):
        context = len(session.prompt_token_ids) + len(session.response) + len(TOOL)
        if number == 2:  # a call that is interrupted
            async with aclosing(session.stream(TOOL, name="tool", prompt_logprobs=True)) as pieces:
                await anext(pieces)
        turn = await session.ask(TOOL, name="tool", prompt_logprobs=number != 3)
        if number == 3:
            assert turn.prompt_logprobs is None
            continue
        assert turn.prompt_logprobs is not None
        found = turn.prompt_logprobs.tolist()
        assert len(found) == context - 1 and max(found) < 0 and found[: len(known)] == known
        again = await replace(session, turn=replace(turn, number=number - 1)).ask(TOOL, prompt_logprobs=True)
        assert again.prompt_logprobs is not None and again.prompt_logprobs.tolist() == found
        known = found
    with refused(Conflict, field="prompt_logprobs"):
        await replace(session, turn=replace(session.turn, number=1)).ask(TOOL, prompt_logprobs=True)
    await session.end(float(session.turn.number + 1), log=",".join(map(str, session.response)))


@pytest.mark.full
async def test_prompt_logprobs_survive_the_orchestrator(tiny_dense: Path, tmp_path: Path) -> None:
    steps = await through_restarts(tiny_dense, tmp_path, scored_turns, prompts=4, groups=2, steps=1)
    trajectories = [each for step in steps for group in step for each in group.trajectories]
    assert [each.reward for each in trajectories] == [4.0] * 2 * GROUP_SIZE
    assert not any("~" in each.trajectory_id for each in trajectories), "no driver has failed"
    check_promises(steps, window=2, groups=2)


async def test_sessions_that_a_client_opens_and_forks(tiny_dense: Path) -> None:
    """Its branches reach the trainer with those of its group; a single call is a session of one turn."""
    told: dict[str, list[list[int]]] = {}

    async def alone(session: Session) -> None:
        first = await session.begin([3, 4, 5], name="user")
        answer = await session.ask(TOOL, name="tool", sampling={"seed": 5, "stop": ["never"]}, max_tokens=4)
        assert answer.number == 2
        await session.ask([9, 9], first_token=len(first.token_ids), after_turn=1)
        left = [*first.token_ids, *TOOL, *answer.token_ids]
        kept = session.response
        assert kept[: len(first.token_ids)] == first.token_ids.tolist()
        assert kept[len(first.token_ids) : len(first.token_ids) + 2] == [9, 9]
        await session.begin([7], name="summary")
        told[session.session_id] = [list(map(int, left)), kept, session.response]
        await session.end(1.0)

    async def opened(handle: Any) -> None:
        async with dora.Sessions(handle.address, handle.token) as sessions:
            for number in range(4):
                group = await sessions.open(dora.Prompt(f"mine{number}", "task", ()), size=2)
                assert [each.session_id.rpartition(".")[2] for each in group] == ["0", "1"]
                again = await sessions.open(dora.Prompt(f"mine{number}", "task", ()), size=2)
                assert [each.session_id for each in again] == [each.session_id for each in group], "it is opened once"
                with refused(Conflict, field="fork", value="none"):
                    await group[0].ask(TOOL)
                await asyncio.gather(*map(alone, group))
            with refused(LimitExceeded, field="group_size: opened sessions", value=9):
                await sessions.open({"text": "ab", "prompt_id": "many"}, size=9)
            (single,) = await sessions.open({"text": "ab", "prompt_id": "single", "sampling": {"max_tokens": 3}})
            assert single.turn.finish_reason and 0 < len(single.turn.token_ids) <= 3
            await single.end(0.0)
            await asyncio.Event().wait()  # until the step has come

    async with (
        running(config_of(tiny_dense, sessions__open_max=9)) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        driving = asyncio.create_task(opened(handle))
        (step,) = await during(driving, train(handle, trainer, steps=1, groups=4))
        driving.cancel()
        counters = (await operator.status()).counters
    # of eight sessions: a turn and a fork of its branch continue, and the fork with a prompt of its own is no such turn
    assert [counters[name] for name in ("turns_resumed", "turns_forked", "turns_reprefilled")] == [16, 16, 0]
    assert not counters["tokens_reprefilled"]
    for group in step:
        for trajectory in group.trajectories:
            path = told[trajectory.trajectory_id.partition("/")[0]][trajectory.branch_index]
            assert trajectory.response_token_ids.tolist() == path
            assert trajectory.prompt_token_ids.tolist() == ([7] if trajectory.branch_index == 2 else [3, 4, 5])
            own = replace(trajectory.sampling, seed=5, stop=("never",), max_tokens=4)
            begin = [each.position_token for each in trajectory.events if each.name == "tool"]
            assert trajectory.turn_sampling == {str(position): own for position in begin}
        assert [each.branch_index for each in group.trajectories] == [0, 1, 2] * 2
    assert not list(violations([each for group in step for each in group.trajectories], 2))


async def test_a_group_of_a_version_by_its_name(tiny_dense: Path) -> None:
    """An environment's token is enough. Groups take the version that they ask for, or are refused with those that are
    live; what is withdrawn makes room.
    """

    async def open_groups(sessions: dora.Sessions) -> list[int]:
        served = await sessions.describe()
        assert (served.newest_version, served.versions, served.max_model_len_tokens) == (1, (0, 1), 256)
        assert (served.sampling.max_tokens, served.sampling.temperature) == (12, 1.0)
        with refused(Conflict, field="version", value=7, names=("0", "1")):
            await sessions.open(dora.Prompt("late", "", ()), version=7)
        versions = []
        for number, version in enumerate((0, 1)):
            (session,) = await sessions.open(dora.Prompt(f"mine{number}", "", ()), version=version)
            (again,) = await sessions.open(dora.Prompt(f"mine{number}", "", ()), version=version)
            assert again.session_id == session.session_id
            versions.append(session.version)
        with refused(Conflict, field="version", value=0):
            await sessions.open(dora.Prompt("mine1", "", ()), version=0)
        with refused(LimitExceeded, field="version", value=0):  # the one step that may train on it is full
            await sessions.open(dora.Prompt("full", "", ()), version=0)
        await sessions.withdraw("mine0", "not wanted")
        await sessions.withdraw("mine0")
        with refused(NotFound, field="prompt_id", value="p0"):
            await sessions.withdraw("p0")
        (session,) = await sessions.open(dora.Prompt("mine3", "", ()), version=0)
        return [*versions, session.version]

    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        dora.Sessions(handle.address, handle.tokens[Role.ENVIRONMENT]) as sessions,
    ):
        await prompts.submit([{"text": "ab", "prompt_id": "p0", "group_size": 1}])
        await train(handle, trainer, steps=1, groups=1)
        assert await open_groups(sessions) == [0, 1, 0]


async def test_a_group_is_opened_again_where_it_stands(tiny_dense: Path) -> None:
    """By a caller that has lost all it knew, with sessions that have ended, and after a step has trained on them."""
    prompt = dora.Prompt("mine", "task", ())

    async def opened(handle: Any, has_trained: asyncio.Event) -> None:
        async with dora.Sessions(handle.address, handle.token) as sessions:
            with refused(NotFound, field="prompt_id", value="mine"):
                await sessions.open(prompt, size=3, again=True)
            first, second, _ = await sessions.open(prompt, size=3)
            await first.begin([3, 4], name="one")
            await first.end(1.0)
            await second.begin([5, 6], name="two")
            turn = second.turn
        async with dora.Sessions(handle.address, handle.token) as sessions:
            with refused(Conflict, field="group_size", value=2):
                await sessions.open(prompt, size=2)
            group = await sessions.open(prompt, size=3, again=True)
            assert [each.has_ended for each in group] == [True, False, False]
            assert [each.given_name for each in group] == ["one", "two", ""]
            assert [len(each.turn.token_ids) > 0 for each in group] == [True, True, False]
            assert np.array_equal(group[1].turn.logprobs, turn.logprobs)
            await group[1].end(1.0)
            await group[2].begin([7])
            await group[2].end(1.0)
            group = await sessions.open(prompt, size=3, again=True)
            assert [each.has_ended for each in group] == [True] * 3
            await has_trained.wait()
            with refused(NotFound, field="prompt_id", value="mine"):
                await sessions.open(prompt, size=3, again=True)

    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        has_trained = asyncio.Event()
        driving = asyncio.create_task(opened(handle, has_trained))
        await during(driving, train(handle, trainer, steps=1, groups=1))
        has_trained.set()
        await driving


async def until_cancelled(work: Awaitable[None]) -> None:
    await work
    await asyncio.Event().wait()


async def test_the_agent_of_the_documentation(tiny_dense: Path) -> None:
    names: dict[str, Any] = {"prompt_token_ids": [3, 4], "reward_of": len, "question": TOOL, "summary": [8]}
    exec(snippet("docs/sessions.md", "async def run_group"), names)
    exec(snippet("docs/sessions.md", "async def try_again"), names)
    plain = names["run"]

    async def run(session: Session) -> None:
        if session.session_id.endswith(".0"):
            await session.begin([3, 4])
            await names["try_again"](session)
        await plain(session)

    names["run"] = run
    async with (
        running(config_of(tiny_dense)) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        driving = asyncio.create_task(until_cancelled(names["run_group"](handle.address, handle.token)))
        ((group,),) = await during(driving, train(handle, trainer, steps=1, groups=1))
        driving.cancel()
    assert [each.branch_index for each in group.trajectories] == [0, 1, 2, 3, *[0] * 7]
    assert all(each.reward == each.loss_mask.sum() for each in group.trajectories[4:])
