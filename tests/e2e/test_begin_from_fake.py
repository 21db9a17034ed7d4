"""A new run begins with a version of another one's state folder, with fake engines: ``dora serve --from STATE@N``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.client import Operator
from dora.config import Config
from dora.errors import Conflict, InvalidValue
from dora.journal.log import DEFAULT_SIZES
from dora.ops.view.service import checkpoint_line
from dora.orchestrator.recovery.begin_from import MODEL_FOLDER, begun_from, check_from
from dora.orchestrator.recovery.state_folder import SERVICE_FILE, reading_state, state_folder_of
from dora.system.ownership import hold
from tests.e2e.restarts import Killed, settings_of
from tests.refusals import refused
from tests.service import configured, until

WEIGHTS = "model.safetensors"


def other_weights(model: Path, folder: Path, step: int) -> Path:
    """A copy of the model, one weight of which has another last bit."""
    shutil.copytree(model, folder)
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-4] ^= step + 1
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(content)
    return folder


async def trained(service: Killed, model: Path, folder: Path, steps: int) -> list[str]:
    prompts, count = [], 0
    async with dora.Trainer(service.address, token=service.token) as trainer:
        async for step in trainer.steps(groups=2):
            prompts += [group.prompt_id async for group in step]
            await step.commit(weights=other_weights(model, folder / f"w{step.number + 1}", step.number), wait=True)
            count += 1
            if count == steps:
                return prompts
    raise AssertionError("the steps ended")


def with_state(state: Path, begin_from: str) -> Config:
    config = configured(state, service__state=str(state), service__begin_from=begin_from)
    return config.model_copy(update={"model": "smollm2"})


def begin(state: Path, begin_from: str) -> Config:
    """Begins as a start does before it prepares its model. A dry run has the same result, and changes nothing."""
    config, checked, refusal = with_state(state, begin_from), None, ""
    try:
        with reading_state(config, DEFAULT_SIZES) as read:
            checked = check_from(config, read)
    except InvalidValue as error:
        refusal = str(error)
    with state_folder_of(config, DEFAULT_SIZES) as opened:
        assert opened is not None
        try:
            begun = begun_from(config, opened)
        except InvalidValue as error:
            assert str(error) == refusal
            raise
    assert checked is not None
    assert (Path(checked.model) / WEIGHTS).read_bytes() == (Path(begun.model) / WEIGHTS).read_bytes()
    return begun


async def test_a_new_run_begins_with_a_version_of_another(tiny_dense: Path, tmp_path: Path) -> None:
    first = Killed(tmp_path, settings_of(tiny_dense, tmp_path, window__size=2))
    await first.start()
    await trained(first, tiny_dense, tmp_path, 3)
    await first.stop()
    state = tmp_path / "state"
    (tmp_path / "new").mkdir()
    settings = settings_of(tiny_dense, tmp_path / "new", service__begin_from=f"{state}@3")
    second = Killed(tmp_path / "new", settings | {"model": "smollm2"})
    await second.start()
    own = tmp_path / "new" / "state" / MODEL_FOLDER
    try:
        assert (own / WEIGHTS).read_bytes() == (tmp_path / "w3" / WEIGHTS).read_bytes()
        assert (own / "config.json").read_bytes() == (tiny_dense / "config.json").read_bytes()
        assert not list(own.glob("dora-*")) and not any(file.is_symlink() for file in own.iterdir())
        async with Operator(second.address, second.token) as operator:
            status = await operator.status()
        assert (status.newest_version, status.filling_step) == (0, 0), "a run of its own"
        await second.kill()
        await second.start()  # by the same command
        prompts = await trained(second, tiny_dense, tmp_path / "new", 2)
        await second.kill()
        shutil.rmtree(state)
        second.change(**{"service.begin_from": ""})  # it has all that it needs
        await second.start()
        shutil.rmtree(tmp_path / "new" / "w3", ignore_errors=True)
        prompts += await trained(second, tiny_dense, tmp_path / "new", 1)
        assert len(set(prompts)) == len(prompts)
    finally:
        await second.stop()


@pytest.mark.full
async def test_a_new_run_begins_with_a_named_checkpoint_of_one_that_goes_on(tiny_dense: Path, tmp_path: Path) -> None:
    """The versions have retired meanwhile: the one that the operator named, and the best one by evaluations."""
    row = {"prompt": "LATE", "prompt_id": "p", "verifier": {"characters": "nopqrstuvwxyz"}}
    (tmp_path / "held-out.jsonl").write_text(json.dumps(row))
    series = {"evaluation__prompts": str(tmp_path / "held-out.jsonl"), "evaluation__every": 1}
    short = {"rollout__max_tokens": 24, "evaluation__keep_best": True}
    first = Killed(tmp_path, settings_of(tiny_dense, tmp_path, **short, **series))
    state, new = tmp_path / "state", tmp_path / "new"
    new.mkdir()
    await first.start()
    try:
        async with Operator(first.address, first.token) as operator:
            assert (await operator.checkpoint("first")).kept_version == 0
            await trained(first, tiny_dense, tmp_path, 2)
            kept = await operator.checkpoint("tuned")
            assert (kept.step, kept.kept) == (2, str(state / "checkpoints" / "tuned"))
            assert "tuned" in checkpoint_line(kept)
            for name, kind in (
                ("tuned", Conflict),
                ("best", InvalidValue),
                ("../x", InvalidValue),
                ("7", InvalidValue),
            ):
                with refused(kind, field="checkpoint: name", value=name):
                    await operator.checkpoint(name)
            (tmp_path / "more").mkdir()
            await trained(first, tiny_dense, tmp_path / "more", 3)
            status = await until(operator, lambda status: len(status.evaluated) == 6)
        assert not (state / "versions" / "2").exists()
        settings = settings_of(tiny_dense, new, service__begin_from=f"{state}@tuned")
        second = Killed(new, settings | {"model": "smollm2"})
        await second.start()
        await second.stop()
        begun = (new / "state" / MODEL_FOLDER / WEIGHTS).read_bytes()
        assert begun == (tmp_path / "w2" / WEIGHTS).read_bytes()
    finally:
        await first.stop()
    begun_first = Path(begin(tmp_path / "second", f"{state}@first").model)
    assert (begun_first / WEIGHTS).read_bytes() == (tiny_dense / WEIGHTS).read_bytes()
    best = json.loads((state / "checkpoints" / "best" / "dora-checkpoint.json").read_text())
    rewards = {each.version: each.reward_mean for each in status.evaluated}
    assert rewards[best["version"]] == best["reward_mean"] == max(rewards.values())
    assert sorted(each.name for each in (state / "checkpoints").iterdir()) == ["best", "first", "tuned"]
    with refused(InvalidValue, field="service.begin_from", names=("best, first, tuned",)):
        begin(tmp_path / "third", f"{state}@other")


@pytest.fixture
async def other(tiny_dense: Path, tmp_path: Path) -> Path:
    """A run's state folder, whose newest version is 1."""
    service = Killed(tmp_path, settings_of(tiny_dense, tmp_path))
    await service.start()
    await trained(service, tiny_dense, tmp_path, 1)
    await service.stop()
    return tmp_path / "state"


async def test_what_cannot_begin_a_run_is_named(other: Path, tiny_dense: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        (str(other), ("STATE@VERSION",)),
        ("@1", ("STATE@VERSION",)),
        (f"{other}@", ("STATE@VERSION",)),
        (f"{other}@-1", ("STATE@VERSION",)),
        (f"{other}@1.0", ("STATE@VERSION",)),
        (f"{tmp_path / 'none'}@1", (tmp_path / "none",)),
        (f"{tiny_dense}@1", (tiny_dense,)),
        (f"{other}@7", (other, 1)),
    ]
    for wanted, names in wrong:
        with refused(InvalidValue, field="service.begin_from", value=wanted, names=names):
            begin(new, wanted)
        assert not (new / MODEL_FOLDER).exists()
    with refused(InvalidValue, field="service.begin_from", names=("service.state",)):
        check_from(configured(tiny_dense, service__begin_from=f"{other}@1"), None)
    with refused(InvalidValue, field="service.begin_from", names=("service.state",)):
        begun_from(configured(tiny_dense, service__begin_from=f"{other}@1"), None)
    with refused(InvalidValue, field="service.begin_from"):
        begin(other, f"{other}@1")
    held = hold(other / "dora.lock")
    assert held is not None
    with refused(InvalidValue, field="service.begin_from", names=("is in use by",)):
        begin(new, f"{other}@1")
    held.close()
    begin(new, f"{other}@1")


async def test_damaged_and_half_copied_weights_begin_no_run(other: Path, tmp_path: Path) -> None:
    kept, new = other / "versions" / "1", tmp_path / "new"
    begin(new, f"{other}@1")
    for file in (new / MODEL_FOLDER).iterdir():  # a crash before it was all there
        file.unlink()
    identity = json.loads((new / SERVICE_FILE).read_text())
    (new / SERVICE_FILE).write_text(json.dumps(identity | {"begun_from": ""}))
    assert (Path(begin(new, f"{other}@1").model) / WEIGHTS).is_file()
    content = (kept / WEIGHTS).read_bytes()
    (kept / WEIGHTS).unlink()
    (kept / WEIGHTS).write_bytes(bytes(len(content)))
    with refused(InvalidValue, field="service.begin_from", names=("undamaged",)):
        begin(tmp_path / "newer", f"{other}@1")
    assert begin(new, f"{other}@1"), "it has its copy"
    linked = next(file for file in kept.iterdir() if file.is_symlink())
    linked.unlink()
    linked.symlink_to(tmp_path / "gone.json")
    with refused(InvalidValue, field="service.begin_from", names=(linked,)):
        begin(tmp_path / "newer", f"{other}@1")
