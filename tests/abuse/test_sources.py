"""A prompt source that fails is the source's fault: it is shown and counted, and what is submitted goes on."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dora
from dora.client import Operator
from dora.config import validated
from dora.data.types import Prompt
from dora.errors import Conflict
from dora.ops.cli.app import app
from dora.orchestrator import starting
from dora.orchestrator.rollout.feed import FAILURE_CHARACTERS_MAX, PromptFeed
from dora.prompts.resolving import resolve_prompts
from dora.prompts.source import PromptSource
from dora.system.log_limit import LogLimit
from tests.private_token import with_token
from tests.refusals import refused
from tests.service import check_promises, configured, running, until

GROUPS = 4


def unplugged() -> None:
    raise RuntimeError("the data set's disk\nis gone")


def ends() -> None:
    raise SystemExit(3)


def endless() -> None:
    raise ValueError("x" * 1_000_000)


def breaks_after(count: int, how: Callable[[], None]) -> PromptSource:
    def at(index: int) -> Prompt | None:
        if index == count:
            how()
        return Prompt(f"p{index}", "task", (1, 2))

    return PromptSource("odd", "", at)


@pytest.mark.parametrize("how", [unplugged, ends, endless])
@pytest.mark.parametrize("count", [0, 3, 4])
async def test_what_a_source_gave_before_it_failed_is_kept(how: Callable[[], None], count: int) -> None:
    feed = PromptFeed(validated({"prompts": "some.jsonl"}), breaks_after(count, how))
    taken = []
    while len(taken) < count:
        drawn, exhausted = await feed.take(2)
        taken += [prompt.prompt_id for prompt in drawn]
        assert not exhausted
    waiting = asyncio.ensure_future(feed.take(2))
    while not feed.failure:
        await asyncio.to_thread(lambda: None)
    assert not feed.closed and feed.sources_failed == 1
    assert "\n" not in feed.failure and len(feed.failure) <= FAILURE_CHARACTERS_MAX
    feed.submit([Prompt("submitted", "task", (1, 2))])
    assert [prompt.prompt_id for prompt in (await waiting)[0]] == ["submitted"]
    waiting = asyncio.ensure_future(feed.take(2))
    feed.close()
    assert await waiting == ([], True), "a drain ends it as ever"


async def test_a_service_whose_source_fails_goes_on_with_what_is_submitted(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, whose step nothing can fill any more, gets an error with the reason, and may ask again."""

    def resolved(*arguments: Any, **options: Any) -> PromptSource:
        source = resolve_prompts(*arguments, **options)

        def at(index: int) -> Prompt | None:
            if index == GROUPS + 2:
                unplugged()
            return source.at(index)

        return PromptSource("odd", source.reward, at)

    monkeypatch.setattr(starting, "resolve_prompts", resolved)
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    steps = []
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        began = []
        with refused(Conflict, field="prompts", value="tiny"):
            async for step in trainer.steps(groups=GROUPS):
                began = []
                async for group in step:
                    began.append(group)
                await step.commit(weights=tiny_dense, wait=True)
                steps.append(began)
        assert len(steps) == 1 and len(began) == 2, "one whole step, and the rest of what the source gave"
        status = await operator.status()
        assert "the data set's disk is gone" in status.prompts_failed
        assert status.counters["prompt_sources_failed"] == 1 and not status.draining
        asked = ["status", "--address", handle.address, "--token-file", with_token(handle.token)]
        shown = await asyncio.to_thread(CliRunner().invoke, app, asked)
        assert "failed: RuntimeError: the data set's disk is gone" in " ".join(shown.stdout.split())
        async with dora.Prompts(handle.address, token=handle.token) as prompts:
            await prompts.submit([{"prompt": "12", "verifier": {"characters": "2"}} for _ in range(GROUPS)])
        async for step in trainer.steps(groups=GROUPS):
            again = [group async for group in step]
            assert {group.group_id for group in began} <= {group.group_id for group in again}
            await step.commit(weights=tiny_dense, wait=True)
            steps.append(again)
            break
        await until(operator, lambda status: status.newest_version == 2)
    check_promises(steps, window=2, groups=GROUPS)


# --------------------------------------------------------------------------------------------------------- the log


def test_whatever_comes_in_at_will_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The first few lines of each kind are logged each minute, then the number of those left out."""
    now_s = [0.0]
    limit = LogLimit(first=5, period_s=60.0, clock=lambda: now_s[0])
    log = logging.getLogger("dora.flooded")
    caplog.handler.addFilter(limit)
    try:
        for number in range(10_000):
            log.error("%s: the verdict failed: %s", f"g{number}.0", "too bad")
            log.warning("prompt refused: %s", number)
        limit.tell()
        assert len(caplog.records) == 10, "the minute is not over"
        now_s[0] = 61.0
        limit.tell()
        limit.tell()
        told = [record.getMessage() for record in caplog.records[10:]]
        assert told == [
            "9995 more lines like this one were left out in the last 61 s: %s: the verdict failed: %s",
            "9995 more lines like this one were left out in the last 61 s: prompt refused: %s",
        ]
        log.error("%s: the verdict failed: %s", "g0.0", "again")
        assert len(caplog.records) == 13, "a new minute"
        for number in range(100_000):  # each text a kind of its own
            log.error(f"odd {number}")
        assert len(limit._counts) <= 1025 and len(caplog.records) < 1100
    finally:
        caplog.handler.removeFilter(limit)
