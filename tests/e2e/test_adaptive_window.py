"""A whole service with fake engines whose window adapts: wider as its trainer waits, narrower as its signals say."""

from pathlib import Path

import dora
from dora.client import Operator
from dora.core import commands as do
from dora.data.run_record import TRAJECTORIES_FILE
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.invariants import violations
from dora.ops.view.service import window_lines
from dora.orchestrator.recording.eventlog import EventLog
from dora.orchestrator.recovery.replay import Replay
from tests.service import configured, running


async def test_the_window_follows_the_trainers_wait_and_its_signals(tiny_dense: Path, tmp_path: Path) -> None:
    events, record = tmp_path / "state", tmp_path / "record"
    config = configured(
        tiny_dense,
        workers__engine="fake",
        window__size="auto",
        window__max=3,
        window__look_steps=1,
        record=str(record),
        service__state=str(events),
        service__keep_events=True,
    )
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        first = await operator.status()
        assert (first.window_versions, first.adaptive_window.max) == (1, 3)
        assert list(window_lines(first))[1:] == ["has not changed yet"]
        size = first.window_versions
        async for step in trainer.steps(groups=4):
            _ = [group async for group in step]
            # A trainer that waits for nothing else gets a wider window; then it reports that too much is clipped.
            signals = {"clip_fraction": 0.5, "effective_sample": 0.9} if size > 1 else {}
            await step.commit(weights=handle.model, metrics=signals, wait=True)
            status = await operator.status()
            last, size = status.adaptive_window.last_change, status.window_versions
            if "clipped" in last.reason:
                break
        assert (last.before - last.size, "clipped fraction 50.0% is above 20.0%") == (1, last.reason)
        assert f"after step {last.step}: clipped" in list(window_lines(status))[1]

    log = EventLog(events)
    resized = [each for it in Replay(log.config, log) for each in it.commands if isinstance(each, do.ResizeWindow)]
    assert resized[0].size == 2 and "the trainer waited" in resized[0].reason
    assert resized[-1] == do.ResizeWindow(last.size, last.reason)

    trajectories = read_trajectories(record / TRAJECTORIES_FILE)
    assert {each.window_versions for each in trajectories} >= {1, 2}
    assert not list(violations(trajectories, 3))
