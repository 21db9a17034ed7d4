"""perf/observed_run.py: what an event log says of a run, against the simulation that the log is of."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dora.config import Config
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim import world
from dora.lab.sim.presets import composed
from dora.lab.sim.run import simulate
from perf.observed_run import Books, group_correlation, observed, scenario
from tests.eventlogs import FolderWriter

WARMUP, STEPS = 4, 12


class LoggedMachine(Machine):
    """A core that logs its events as the service does."""

    def __init__(self, config: Config, log: FolderWriter) -> None:
        super().__init__(config)
        self._log = log

    def handle(self, event: on.Event, now_s: float) -> list[do.Command]:
        self._log.append(event, now_s)
        return super().handle(event, now_s)


def test_what_is_observed_of_a_run_simulates_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, lengths = tmp_path / "events.log", tmp_path / "lengths.json"
    hist = {"60": 3, "150": 4, "400": 2, "900": 1}
    lengths.write_text(json.dumps({"hist": hist}))
    drawn = composed(
        {
            "window": {"size": 2},
            "balance": {"predictor": "statistics"},
            "cluster": {"load_s": 2.0, "link_latency_s": 0.05, "kv_tokens": 30_000},
            "trainer": {"step_s": 2.0, "micro_batches": 1},
            "workload": {
                "prompts": 17_000,
                "lengths": {"kind": "histogram", "file": str(lengths), "group_correlation": 0.6},
            },
        },
        "small",
    )
    config = world.core_config(drawn)
    with FolderWriter(log, config, now_s=0.0) as writer:
        monkeypatch.setattr(world, "Machine", partial(LoggedMachine, log=writer))
        report = simulate(drawn, steps=STEPS, warmup=WARMUP, seed=5)
        monkeypatch.undo()

    seen = observed(log, WARMUP)
    assert seen.steps == STEPS
    assert seen.seconds / seen.steps == pytest.approx(60 * report.step_time_min)
    assert seen.tokens_per_s == pytest.approx(report.generated_tokens_per_s, rel=0.03)  # reported now and then
    assert seen.latency_s == pytest.approx(0.05)
    assert seen.load_s == pytest.approx(2.0)
    assert seen.training_s == pytest.approx(2.0)
    assert {str(tokens) for tokens in seen.lengths} == set(hist)
    step = 4 * 8  # responses; the last step may have taken some of the newest version, which has others under way
    assert step * (WARMUP + STEPS - 1) <= sum(seen.lengths.values()) <= step * (WARMUP + STEPS)
    assert seen.lengths[60] / sum(seen.lengths.values()) == pytest.approx(0.3, abs=0.08)
    assert seen.group_correlation == pytest.approx(0.5, abs=0.15)  # of the scores 0.6; lengths have four values
    assert seen.prompt_tokens == pytest.approx(150, rel=0.1)

    told = {
        "workers": {"count": 2, "slots": drawn.cluster.slots, "kv_tokens": 30_000},
        "window": {"size": 2, "groups_per_step": 8},
        "rollout": {"group_size": 4, "max_tokens": 2000},
    }
    own = Config.model_validate(config.model_dump() | told)
    lengths.write_text(json.dumps({"hist": {str(tokens): count for tokens, count in seen.lengths.items()}}))
    again = composed(scenario(seen, own, drawn.cluster.cost.model_dump(), lengths))
    predicted = simulate(again, steps=3 * STEPS, warmup=WARMUP, seed=6)
    assert predicted.generated_tokens_per_s == pytest.approx(report.generated_tokens_per_s, rel=0.06)


def test_the_correlation_within_groups_is_that_of_a_variance_analysis() -> None:
    rng = np.random.default_rng(2)
    for correlation in (0.0, 0.3, 0.8):
        common, own = rng.normal(size=(4000, 1)), rng.normal(size=(4000, 4))
        logs = 5 + correlation**0.5 * common + (1 - correlation) ** 0.5 * own
        assert group_correlation(np.exp(logs).tolist()) == pytest.approx(correlation, abs=0.02)
    assert group_correlation([[7, 7], [9, 9]]) == 1.0


def test_a_blackout_runs_from_the_last_token_at_the_source_to_the_first_at_the_target() -> None:
    """A request moves, is parked, and is resumed. Its copies begin while it still decodes."""
    books, number = Books(), iter(range(100))
    books.prompt_tokens, books.prompts = {"p0": 5}, {"r0": "p0"}

    def told(now_s: float, worker: str, tokens: int) -> None:
        books.see(now_s, on.Progress(worker, 1, 0, {"r0": tokens}), ())

    def obeyed(sent_s: float, now_s: float, kind: type, worker: str, **fields: object) -> None:
        command = kind(worker, 1, next(number), "r0", **fields)
        books.see(sent_s, on.Tick(), (command,))
        books.see(now_s, on.CommandDone(worker, 1, command.command_id, tokens=9), ())

    told(1.0, "w0", 6)
    books.see(1.0, on.Tick(), (copy := do.CopyOut("w0", 1, 99, "r0"),))
    told(4.0, "w0", 9)
    books.see(4.5, on.CommandDone("w0", 1, copy.command_id, tokens=9), ())
    obeyed(4.5, 4.75, do.CopyIn, "w1", version=0, locator="")
    told(5.0, "w1", 10)
    told(6.0, "w1", 11)
    obeyed(6.0, 6.5, do.Park, "w1")
    obeyed(6.5, 6.75, do.CopyIn, "pool-0", version=0, locator="")
    obeyed(9.0, 9.5, do.Resume, "pool-0")
    obeyed(9.5, 9.75, do.CopyIn, "w1", version=0, locator="")
    told(10.0, "w1", 11)  # nothing new
    told(10.5, "w1", 12)
    assert books.without_token_s == {do.CopyOut: [1.0], do.Resume: [4.5]}
    assert books.blackouts_steps == [1.0], "it had got three tokens in three seconds"
    assert [round(took_s, 2) for took_s, _ in books.moved] == [3.75, 0.75, 0.75]
