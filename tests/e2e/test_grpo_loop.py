"""``examples/grpo_loop.py`` on a service with fake engines: it trains until the prompts end."""

import asyncio
import json
from pathlib import Path

import pytest

from dora.client import Operator
from examples.grpo_loop import main
from tests.service import configured, running


async def test_the_example_trains_every_group_once(
    tmp_path: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A fake engine does not read the weights, so it cannot reproduce the canary of a module.
    monkeypatch.setattr("dora.client.session.TrainerSession._skeleton_of", lambda *_: None)
    monkeypatch.setattr("dora.client.session.canary_of", lambda *_: None)
    prompts = [
        {"prompt": "LATE", "prompt_id": f"p{index}", "verifier": {"characters": "nopqrstuvwxyz"}} for index in range(10)
    ]
    (tmp_path / "few.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
    few = {"prompts": str(tmp_path / "few.jsonl"), "reward__function": "dora.rewards.tiny:score"}
    async with running(configured(tiny_dense, workers__engine="fake", **few)) as handle:
        monkeypatch.setenv("DORA_TOKEN", handle.token)
        monkeypatch.setattr("sys.argv", ["grpo_loop.py", "--address", handle.address, "--groups", "4"])
        await asyncio.to_thread(main)
        async with Operator(handle.address, handle.token) as operator:
            counters = (await operator.status()).counters
    steps = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert not any("tokens 0" in line.split(", ") for line in steps), "each step trained on something"
    assert counters["groups_trained"] == 10
    assert counters["groups_lost"] == counters["rewards_failed"] == counters["versions_rejected"] == 0
