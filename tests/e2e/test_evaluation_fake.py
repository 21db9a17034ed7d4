"""Evaluations beside training, with fake engines: one version, whole groups, and training as if there were none."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dora
from dora.client import Evaluation, Operator
from dora.config import Config
from dora.data.record_content import RecordContent
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.errors import Conflict, InvalidValue, NotFound
from dora.ops.cli.app import app
from dora.ops.view.evaluation import evaluated_line
from dora.ops.view.narration import news
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.services.evaluation_series import evaluation_prompts
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc.dora_pb2 import Status
from tests.private_token import with_token
from tests.refusals import refused
from tests.service import check_promises, configured, running, until

GROUPS = 4
WINDOW = 2


def config_of(model: Path, **fields: Any) -> Config:
    fake = {"workers__engine": "fake", "reward__function": "dora.rewards.tiny:score", "window__size": WINDOW}
    return configured(model, **{**fake, **fields})


def prompt(number: int, **fields: Any) -> dict[str, Any]:
    verifier = {"characters": "abc"}
    return {"text": "ab" * number, "prompt_id": f"p{number}", "group_size": 3, "verifier": verifier, **fields}


def check_evaluation(evaluation: Evaluation, asked: list[dict[str, Any]]) -> None:
    """All that was asked for came once, whole, scored, and of one version."""
    assert evaluation.ended and not evaluation.reason and not evaluation.refused and not evaluation.missing
    assert sorted(group.prompt_id for group in evaluation.groups) == sorted(each["prompt_id"] for each in asked)
    for group in evaluation.groups:
        assert [each.sample_index for each in group.trajectories] == [0, 1, 2]
        for each in group.trajectories:
            assert each.reward_valid and (each.behaviour_version, each.staleness) == (evaluation.version, 0)
            assert {segment.version for segment in each.worker_history} == {evaluation.version}
            assert each.worker_history[-1].last_token == each.length_tokens - 1


async def test_nothing_is_trained_meanwhile(tiny_dense: Path) -> None:
    config = config_of(tiny_dense, prompts="none")
    asked = [prompt(number) for number in range(1, 21)]
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        Operator(handle.address, handle.token) as operator,
    ):
        check_evaluation(evaluation := await prompts.evaluate(asked, name="first").whole(), asked)
        again = await prompts.evaluate(asked[:3], version=0, share=0.5).whole()
        first = {group.prompt_id: group.trajectories for group in evaluation.groups}
        for group in again.groups:  # the seeds follow from prompt and sample: versions can be compared
            for one, other in zip(group.trajectories, first[group.prompt_id], strict=True):
                assert one.response_token_ids.tolist() == other.response_token_ids.tolist()
        for wrong, error, field, value in (
            ({"version": 3}, NotFound, "version", 3),
            ({"share": 0.6}, InvalidValue, "share", 0.6),
            ({"share": float("nan")}, InvalidValue, "share", float("nan")),
            ({"name": "two\nlines"}, InvalidValue, "name", "two\nlines"),
        ):
            with refused(error, field=field, value=value):
                await prompts.evaluate(asked, **wrong).whole()  # type: ignore[arg-type]
        with refused(Conflict, names=("p1",)):
            await prompts.evaluate([prompt(1), prompt(1)]).whole()
        with refused(InvalidValue, field="prompts", value=0):
            await prompts.evaluate([]).whole()
        with refused(InvalidValue, names=("200", "000", "1", "65", "536")):
            await prompts.evaluate([prompt(n, prompt_id=f"{n}", group_size=4000) for n in range(1, 51)]).whole()
        endless = {"group_size": 64, "sampling": {"max_tokens": 200, "ignore_eos": True}}
        large = prompt(21, **{**endless, "group_size": 4000}, verifier={"characters": "a", "more": "x" * 100_000})
        others = [await prompts.evaluate([large], name="large").begun() for _ in range(2)]
        async with asyncio.timeout(60):  # large messages are read two at a time: those of calls that last are no more
            assert (await prompts.submit([large])).accepted == 1
        for other in others:
            other.cancel()
        await until(operator, lambda status: not status.evaluations)
        left = await prompts.evaluate([prompt(n, **endless) for n in range(1, 21)], name="left").begun()
        status = await until(operator, lambda status: status.evaluations and status.evaluations[0].running)
        (shown,) = status.evaluations
        assert (shown.name, shown.version, shown.prompts, shown.prompts_done) == ("left", 0, 20, 0)
        left.cancel()
        status = await until(operator, lambda status: not status.evaluations)
        check_evaluation(await prompts.evaluate(asked[:3]).whole(), asked[:3])
    assert status.counters["trajectories_finished"] == status.counters["groups_admitted"] == 0


async def test_the_command_writes_what_came_and_counts_it_by_column(tiny_dense: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "sums.jsonl", tmp_path / "out"
    rows = [{**prompt(n), "task_id": ("odd", "even")[n % 2 == 0], "level": n // 4} for n in range(1, 10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with running(config_of(tiny_dense, prompts="none")) as handle:

        async def dora_eval(*arguments: str) -> Result:
            where = ("--address", handle.address, "--token-file", with_token(handle.token))
            return await asyncio.to_thread(CliRunner().invoke, app, ["eval", str(file), *arguments, *where])

        refused = await dora_eval("--out", str(out))
        assert refused.exit_code == 2 and "level" in refused.stderr
        gone = await dora_eval("--by", "level", "--version", "7", "--out", str(out))
        assert gone.exit_code == 4 and "version = 7 is not live" in gone.stderr
        found = await dora_eval("--by", "level", "--samples", "2", "--out", str(out), "--json")
        again = await dora_eval("--by", "level", "--out", str(out))
        shown = await dora_eval("--by", "level", "--limit", "4", "--max-tokens", "5")
    assert found.exit_code == 0, found.stderr
    tree = json.loads(found.stdout)
    assert json.loads((out / "evaluation.json").read_text()) == tree
    records = [Trajectory.from_json_dict(json.loads(line)) for line in (out / "trajectories.jsonl").open()]
    assert len(records) == tree["score"]["responses"] == 18 and tree["version"] == 0 and not tree["reason"]
    assert tree["score"]["reward_mean"] == pytest.approx(sum(each.reward for each in records) / 18)
    assert {key: score["groups"] for key, score in tree["by"]["level"].items()} == {"0": 3, "1": 4, "2": 2}
    assert {key: score["responses"] for key, score in tree["by"]["task_id"].items()} == {"even": 8, "odd": 10}
    assert again.exit_code == 2 and "without a trajectories.jsonl" in again.stderr
    assert shown.exit_code == 0 and "level 1" in shown.stdout and "evaluation of v0" in shown.stdout


@pytest.mark.full
async def test_training_goes_on_as_if_there_were_none_and_a_worker_dies(tiny_dense: Path) -> None:
    asked = [prompt(number) for number in range(1, 21)]
    endless = [prompt(n, group_size=10, sampling={"max_tokens": 200, "ignore_eos": True}) for n in range(1, 21)]
    taken: list[list[TrajectoryGroup]] = []
    async with (
        running(config_of(tiny_dense), processes=True) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        Operator(handle.address, handle.token) as operator,
    ):
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            long: Evaluation | None = None
            async for step in trainer.steps(groups=GROUPS):
                if step.number == 2:
                    long = await prompts.evaluate(endless, share=0.2).begun()
                    kinds = [asyncio.create_task(prompts.evaluate(asked, share=share).whole()) for share in (0.3, 0.0)]
                    status = await until(operator, lambda status: any(each.running for each in status.evaluations))
                    os.kill(status.workers[0].pid, signal.SIGKILL)
                taken.append([group async for group in step])
                if step.number == 2:
                    for evaluation in await asyncio.gather(*kinds):
                        check_evaluation(evaluation, asked)
                        assert evaluation.version == 2
                await step.commit(weights=handle.model, wait=True)
                if step.number == 4 + WINDOW:
                    break
        assert long is not None and await long.whole() is long
        assert (long.reason, long.missing, long.version) == ("", 0, 2), "though its version has left the window"
        last = await prompts.evaluate(asked).whole()
        status = await operator.status()
    check_evaluation(last, asked)
    assert last.version == len(taken) and not status.evaluations
    check_promises(taken, window=WINDOW, groups=GROUPS)
    assert status.counters["groups_lost"] == status.counters["c1_violations"] == 0


@pytest.mark.full
async def test_every_so_many_steps_a_version_is_evaluated_and_stays_until_that_is_done(tiny_dense: Path) -> None:
    """Steps are short, so versions leave the window long before."""
    asked = [prompt(number) for number in range(1, 11)]
    config = config_of(tiny_dense, window__size=1, service__evaluation_versions=4)
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        series = prompts.every(2, asked, share=0.25, name="held out")
        async for step in trainer.steps(groups=1):
            await series.at(step.number)
            async for _ in step:
                pass
            await step.commit(weights=handle.model, wait=True)
            if step.number == 6:
                break
        found = await series.finish()
        assert list(found) == [0, 2, 4, 6]
        for version, evaluation in found.items():
            assert evaluation.version == version
            check_evaluation(evaluation, asked)
        with refused(InvalidValue, field="every", value=0):
            prompts.every(0, asked)


async def test_the_service_evaluates_every_so_many_versions_by_itself(tiny_dense: Path, tmp_path: Path) -> None:
    file, record = tmp_path / "held-out.jsonl", tmp_path / "record"
    file.write_text("".join(json.dumps(prompt(number)) + "\n" for number in range(1, 6)))
    series = {"evaluation__prompts": str(file), "evaluation__every": 2, "evaluation__share": 0.25}
    config = config_of(tiny_dense, record=str(record), service__evaluation_versions=4, **series)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        async for step in trainer.steps(groups=1):
            async for _ in step:
                pass
            await step.commit(weights=handle.model, wait=True)
            if step.number == 3:
                break
        status = await until(operator, lambda status: len(status.evaluated) == 3)
    assert [each.version for each in status.evaluated] == [0, 2, 4]
    for each in status.evaluated:
        assert (each.prompts, each.missing, each.refused, each.reason, each.responses) == (5, 0, 0, "", 15)
    assert "reward" in evaluated_line(status.evaluated[0])
    lines = [json.loads(line) for line in (record / "evaluations.jsonl").read_text().splitlines()]
    assert sorted(line["version"] for line in lines) == [0, 2, 4]
    assert {line["version"]: line["reward_mean"] for line in lines} == {
        each.version: each.reward_mean for each in status.evaluated
    }
    assert RecordContent(record).evaluated == {0, 2, 4}
    assert sum("evaluat" in line for line in news(Status(), status)) == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"evaluation__prompts": "held-out.jsonl"}, "evaluation.every"),
        ({"evaluation__every": 2}, "evaluation.every"),
        ({"evaluation__share": 0.1}, "evaluation.share"),
        ({"evaluation__split": "test"}, "evaluation.split"),
        ({"evaluation__keep_best": True}, "evaluation.keep_best"),
        ({"evaluation__prompts": "held-out.jsonl", "evaluation__every": -1}, "evaluation.every"),
        ({"evaluation__prompts": "held-out.jsonl", "evaluation__every": 1, "evaluation__share": 0.6}, "share"),
    ],
)
def test_a_series_that_is_not_whole_is_refused_by_name(tiny_dense: Path, fields: dict[str, Any], field: str) -> None:
    with refused(InvalidValue, field=field):
        config_of(tiny_dense, **fields)


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (None, "evaluation.prompts"),  # no such file
        ([], "evaluation.prompts"),
        ([{"promt": "x"}], "held-out.jsonl:1: promt"),
        ([prompt(1), prompt(2, sampling={"max_tokens": 10_000})], "sampling.max_tokens"),
        ([prompt(1), prompt(1)], "prompt_id"),
        ([prompt(n, group_size=4000) for n in range(1, 18)], "evaluation.prompts"),
    ],
    ids=["absent", "empty", "column", "too long", "twice", "too many"],
)
def test_prompts_of_a_series_are_refused_by_row(
    tiny_dense: Path, tmp_path: Path, rows: list[dict[str, Any]] | None, field: str
) -> None:
    file = tmp_path / "held-out.jsonl"
    if rows is not None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(tiny_dense, evaluation__prompts=str(file), evaluation__every=1)
    tokenizer = ChatTokenizer(tiny_dense, tmp_path)
    with refused(InvalidValue if field != "prompt_id" else Conflict, field=field):
        evaluation_prompts(config, tokenizer, PromptCheck(config, tokenizer=tokenizer, vocab_size=1000))
