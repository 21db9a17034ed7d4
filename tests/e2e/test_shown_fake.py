"""What operators see of a service with fake engines: news told once, pages of trajectories, one with its tokens."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import dora
from dora.client import Operator
from dora.errors import InvalidValue, NotFound
from dora.ops.page.browsers import Browser
from dora.ops.page.views import trajectories as trajectories_page
from dora.ops.page.views import trajectory as trajectory_page
from dora.orchestrator.services.shown import TOKENS_MAX
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused
from tests.service import configured, during, move_one, running, train

STEPS = 2
LONG = {  # enough tokens that an operator finds a request to move
    "workers__engine": "fake",
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
}


@pytest.mark.full
async def test_a_stream_tells_each_step_and_move_once(tiny_dense: Path) -> None:
    config = configured(tiny_dense, window__size=2, **LONG)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps: list[int] = []
        moves: list[pb.Move] = []

        async def follow() -> None:
            async for status in operator.watch(50, only_new=True):
                steps.extend(step.step for step in status.steps)
                moves.extend(status.moves)
                if len(steps) >= STEPS and any(move.result == "done" for move in moves):
                    told.set()
                if training.done() and len(steps) == len((await operator.status()).steps):
                    return

        told, enough = asyncio.Event(), asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=STEPS, groups=4, enough=enough))
        following = asyncio.create_task(follow())
        await during(training, move_one(operator))
        await during(training, told.wait())
        enough.set()
        await training
        await following
        whole = await operator.status()
        assert steps == [step.step for step in whole.steps] == list(range(len(steps)))
        assert not whole.moves, "for a stream alone"
        assert [move.number for move in moves] == list(range(len(moves))) and moves[0].at <= moves[-1].at
        assert any(move.result == "done" for move in moves)
        assert all(move.source != move.target and move.kind == "move" and move.trajectory_id for move in moves)


async def test_trajectories_come_in_pages_and_one_with_its_tokens(tiny_dense: Path) -> None:
    fields = {"workers__engine": "fake", "workers__count": 2, "prompts": "none", "rollout__max_tokens": 12}
    async with (
        running(configured(tiny_dense, reward__function="dora.rewards.tiny:score", **fields)) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Sessions(handle.address, handle.token) as sessions,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=1, groups=1))  # it sets the size of a step
        opened = await sessions.open({"text": "abab", "prompt_id": "p", "task_id": "maze"}, 5)
        session = opened[2]
        await session.ask([5, 6, 7], name="tool")
        await session.end(0.75, turn_rewards={1: 0.5}, log="well done")

        pages = [(await operator.trajectories(limit=2, offset=offset)) for offset in (0, 2, 4, 6)]
        listed = [row.trajectory_id for page in pages for row in page.trajectories]
        assert listed == [each.session_id for each in opened] and {page.total for page in pages} == {5}
        worker = next(row.worker for row in pages[0].trajectories if row.worker)
        of_worker = (await operator.trajectories(worker=worker)).trajectories
        assert of_worker and {row.worker for row in of_worker} == {worker}
        idle = await operator.trajectories("idle", limit=1, offset=1, worker=worker)
        assert idle.total >= len(idle.trajectories)

        shown = await operator.trajectory(session.session_id)
        tokens = np.frombuffer(shown.token_ids, "<i4").tolist()
        assert tokens == [*session.prompt_token_ids.tolist(), *session.response]
        assert shown.total_tokens == len(tokens) and shown.prompt_tokens == len(session.prompt_token_ids)
        given = np.flatnonzero(np.frombuffer(shown.is_sampled, "u1") == 0)[shown.prompt_tokens :]
        assert [tokens[at] for at in given] == [5, 6, 7]
        assert shown.turns[0].at <= shown.turns[0].ended_at <= shown.turns[1].at <= shown.turns[1].ended_at
        assert shown.turns[1].ended_at == shown.finished_at
        assert [(turn.turn, turn.given_tokens, turn.name) for turn in shown.turns] == [(0, 0, ""), (1, 3, "tool")]
        sampled = sum(turn.sampled_tokens for turn in shown.turns)
        assert sampled == len(session.response) - 3 and shown.turns[1].first_token == shown.turns[0].sampled_tokens + 3
        assert (shown.reward, shown.verifier_log, dict(shown.turn_rewards)) == (0.75, "well done", {1: 0.5})
        assert {segment.worker for segment in shown.worker_history} and shown.task_id == "maze"
        part = await operator.trajectory(session.session_id, 3, 2)
        assert np.frombuffer(part.token_ids, "<i4").tolist() == tokens[3:5] and len(part.logprobs) == 8
        assert not (await operator.trajectory(session.session_id, 10_000)).token_ids
        assert not (await operator.trajectory(opened[0].session_id)).HasField("reward")
        with refused(NotFound, field="trajectory_id", value="g77.0"):
            await operator.trajectory("g77.0")
        with refused(InvalidValue, field="tokens"):
            await operator.trajectory(session.session_id, 0, TOKENS_MAX + 1)
        training.cancel()
        await asyncio.wait({training})
        await prompts.cancel(["p"])


async def test_committed_trajectories_are_read_from_the_record(tiny_dense: Path, tmp_path: Path) -> None:
    """Those of the last steps, the latest first, in pages; each shows what it showed before its commit."""
    fields = {"workers__engine": "fake", "workers__count": 2, "prompts": "none", "rollout__max_tokens": 12}
    config = configured(
        tiny_dense, reward__function="dora.rewards.tiny:score", record=str(tmp_path / "record"), **fields
    )
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Sessions(handle.address, handle.token) as sessions,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        training = asyncio.create_task(train(handle, trainer, steps=2, groups=1))
        shown: dict[str, pb.ShownTrajectory] = {}
        for name in ("p", "q"):
            opened = await sessions.open({"text": "abab", "prompt_id": name, "task_id": "maze"}, 2)
            for session in opened:
                await session.ask([5, 6, 7], name="tool")
                shown[session.session_id] = await operator.trajectory(session.session_id)
                await session.end(turn_rewards={1: 0.5}, log="well done")
        await training
        pages = [await operator.trajectories("committed", limit=3, offset=offset) for offset in (0, 3)]
        listed = [row.trajectory_id for page in pages for row in page.trajectories]
        assert sorted(listed) == sorted(shown) and {row.prompt_id for row in pages[0].trajectories[:2]} == {"q"}
        assert [len(page.trajectories) for page in pages] == [3, 1] and [page.total for page in pages] == [4, 4]
        assert not (await operator.trajectories()).trajectories
        for name, before in shown.items():
            after = await operator.trajectory(name)
            for field in ("token_ids", "logprobs", "is_sampled", "prompt_tokens", "total_tokens", "task_id"):
                assert getattr(after, field) == getattr(before, field), field
            assert (after.reward, after.verifier_log) == (0.5, "well done")
            assert list(after.worker_history) == list(before.worker_history)
            assert after.status.state == "committed" and after.status.max_tokens == 0
            part = await operator.trajectory(name, 3, 2)
            assert part.token_ids == before.token_ids[12:20]
            assert "well done" in trajectory_page(after, str, pb.Status(), Browser("", "", True, 0.0, 0.0))
        looks = {"state": "committed", "worker": "", "offset": 0, "browser": Browser("", "", True, 0.0, 0.0)}
        page = trajectories_page(pages[0], **looks)
        assert "Committed trajectories" in page and all(f"trajectory?id={name}" in page for name in listed[:3])
        with refused(NotFound, field="trajectory_id", value="g77.0"):
            await operator.trajectory("g77.0")
