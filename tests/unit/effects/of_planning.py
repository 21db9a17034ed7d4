"""The commands that ask no service: plans, simulations, measurements, replays, checks of records and machines."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from dora.data.engine_samples import Measurement
from dora.lab.sim.faults import sweep
from dora.lab.sim.faults.trial import Trial
from dora.ops.doctor import run as doctor_run
from dora.ops.doctor.verdict import StageResult
from dora.worker import side_by_side, timing
from dora.worker.profiling import default_grid, measure
from tests.unit.effects.commands import Bench, Done, OptionRow, Ran, Shown
from tests.unit.effects.of_operators import is_json
from tests.unit.timed_engine import CONTEXT, KV_TOKENS, SLOTS, timed_engine

# ------------------------------------------------------------------------------------------------- plan and simulate

PLAN: Final = ("plan", "--gpus", "64", "--json")
TWO: Final = ("plan", "--rollout-gpus", "32", "--train-gpus", "32", "--json")
SIMULATION: Final = ("simulate", "--preset", "small", "--steps", "2", "--warmup", "1", "--json")
SWEEP: Final = ("simulate", "sweep", "--jobs", "1", "--json")


def planned(*given: str) -> Ran:
    return Ran(PLAN, given)


def simulated(*given: str) -> Ran:
    return Ran(SIMULATION, given)


def scenario(bench: Bench) -> None:
    (bench.folder / "scenario.toml").write_text("[trainer]\nstep_s = 600\n")
    (bench.folder / "cost.toml").write_text(
        "[cluster.cost]\nkv_token_s = 1e-7\nweights_s = 0.1\nrequest_s = 1e-4\nstep_s = 0.05\nprefill_token_s = 1e-4\n"
    )


def swept(bench: Bench) -> None:
    """Each trial that is run is printed."""

    def run(self: Trial) -> None:
        print(json.dumps([self.seed, self.policy, self.kinds, self.window]))

    def outcomes(trials: Sequence[Trial], jobs: int = 1) -> Iterator[None]:
        print(f"{jobs} processes")
        for trial in trials:
            yield trial.run()

    bench.monkeypatch.setattr(Trial, "run", run)
    bench.monkeypatch.setattr(sweep, "outcomes", outcomes)


def prints(text: str) -> Any:
    return lambda done: text in done.out


# ---------------------------------------------------------------------------------------------------------- profile


def timed(bench: Bench) -> None:
    """An engine whose steps take a known time is measured; how it would have been started is printed."""
    weights = bench.folder / "weights"
    weights.mkdir()
    save_file({"weight": np.zeros(4, np.float32)}, weights / "model.safetensors")
    engine = timed_engine(weights)
    grid = default_grid(SLOTS, KV_TOKENS, CONTEXT, 1)
    found = measure(engine, grid, seed=1, clock=engine.clock)

    def alone(asked: timing.Timing) -> Measurement:
        print(asked)
        return found

    def beside(asked: timing.Timing, engines: int) -> list[Measurement]:
        print(asked, f"{engines} engines")
        return [found] * engines

    bench.monkeypatch.setattr(timing, "measure_alone", alone)
    bench.monkeypatch.setattr(side_by_side, "measure_side_by_side", beside)


def off(bench: Bench) -> None:
    """The same, and the prediction is 30% off."""
    timed(bench)
    whole = timing.measure_alone

    def slowed(asked: timing.Timing) -> Measurement:
        found = whole(asked)
        return replace(found, mixed_s=1.3 * found.mixed_s)

    bench.monkeypatch.setattr(timing, "measure_alone", slowed)


PROFILE: Final = ("profile", "--model", "{dense}", "--max-model-len", "512")


def profiled(given: Sequence[str], shown: str) -> Ran:
    return Ran(PROFILE, given, prints(shown), timed)


# ---------------------------------------------------------------------------------------------------- verify and doctor

EXAMINED: Final = "tests/e2e/test_examination.py::test_two_hosts_are_examined_and_nothing_is_to_be_done"


def examined(bench: Bench) -> None:
    """Each stage that would run in a process succeeds, and says on what."""

    def stage(each: Any, device: str, model: Path) -> StageResult:
        return StageResult(each.name, "ok", "", {"device": device, "model": model.name})

    bench.monkeypatch.setattr(doctor_run, "run_stage", stage)


VERIFY: Final = "tests/unit/test_verify.py::"
REPLAY: Final = "tests/unit/test_replay.py::"
SHOWN_REPLAY: Final = Shown(REPLAY + "test_the_command_shows_what_it_is_asked_for")


def fewer_stages(done: Done) -> bool:
    return len(done.at("stages")) == 1


ROWS: Final[dict[tuple[str, str], OptionRow]] = {
    ("plan", "model"): planned("--model", "qwen2.5-7b"),
    ("plan", "hardware"): planned("--hardware", "h100"),
    ("plan", "gpus"): Ran(["plan", "--json"], ["--gpus", "64"], is_json),
    ("plan", "rollout_gpus"): Ran(["plan", "--train-gpus", "32", "--json"], ["--rollout-gpus", "32"], is_json),
    ("plan", "train_gpus"): Ran(["plan", "--rollout-gpus", "32", "--json"], ["--train-gpus", "32"], is_json),
    ("plan", "rollout_hardware"): Ran(TWO, ["--rollout-hardware", "h20"]),
    ("plan", "link_gbps"): Ran(TWO, ["--link-gbps", "1"]),
    ("plan", "train_s_at"): planned("--train-s-at", "40=77"),
    ("plan", "train_multiple"): planned("--train-multiple", "16"),
    ("plan", "window"): planned("--window", "1"),
    ("plan", "groups"): planned("--groups", "64"),
    ("plan", "group_size"): planned("--group-size", "4"),
    ("plan", "prompt_tokens"): planned("--prompt-tokens", "2000"),
    ("plan", "mean_tokens"): planned("--mean-tokens", "300"),
    ("plan", "cap_tokens"): planned("--cap-tokens", "6000"),
    ("plan", "lengths"): planned("--lengths", "lognormal:5,1,6000"),
    ("plan", "slots"): planned("--slots", "16"),
    ("plan", "gpus_per_engine"): planned("--gpus-per-engine", "8"),
    ("plan", "cost"): Ran([*PLAN, "--gpus-per-engine", "4"], ["--cost", "{folder}/cost.toml"], None, scenario),
    ("plan", "efficiency"): planned("--efficiency", "2"),
    ("plan", "draft_acceptance"): planned("--draft-acceptance", "0.6"),
    ("plan", "generation_s"): Ran(
        ["plan", "--training-s", "10", "--engines", "4", "--json"], ["--generation-s", "40"], is_json
    ),
    ("plan", "training_s"): Ran(
        ["plan", "--generation-s", "40", "--engines", "4", "--json"], ["--training-s", "10"], is_json
    ),
    ("plan", "engines"): Ran(
        ["plan", "--generation-s", "40", "--training-s", "10", "--json"], ["--engines", "4"], is_json
    ),
    ("plan", "as_json"): Ran(PLAN[:-1], ["--json"], is_json),
    ("simulate", "preset"): Ran(["simulate", *SIMULATION[3:]], ["--preset", "small"], is_json),
    ("simulate", "policy"): simulated("--policy", "dora"),
    ("simulate", "window"): simulated("--window", "1"),
    ("simulate", "steps"): simulated("--steps", "3"),
    ("simulate", "warmup"): simulated("--warmup", "2"),
    ("simulate", "seed"): simulated("--seed", "5"),
    ("simulate", "predictor"): simulated("--predictor", "statistics"),
    ("simulate", "settings"): Ran(
        SIMULATION, ["--set", "trainer.step_s=600"], lambda done: done.at("step_time_min") > 9.99
    ),
    ("simulate", "file"): Ran(
        SIMULATION, ["--file", "{folder}/scenario.toml"], lambda done: done.at("step_time_min") > 9.99, scenario
    ),
    ("simulate", "split"): Ran(
        [*SIMULATION, "--set", "cluster.rollout_gpus=1"], ["--split", "plan"], lambda done: done.at("train_gpus") == 2
    ),
    ("simulate", "compare"): Ran(SIMULATION, ["--compare"], lambda done: len(done.at("policies") or ()) > 2),
    ("simulate", "plot"): Ran(SIMULATION, ["--plot", "{folder}/run.svg"], lambda done: "run.svg" in done.files),
    ("simulate", "as_json"): Ran(SIMULATION[:-1], ["--json"], is_json),
    ("simulate presets", "as_json"): Ran(["simulate", "presets"], ["--json"], is_json),
    ("simulate sweep", "seeds"): Ran(SWEEP, ["--seeds", "3"], lambda done: done.out.count("[") == 4, swept),
    ("simulate sweep", "first"): Ran([*SWEEP, "--seeds", "1"], ["--first", "77"], prints("[77,"), swept),
    ("simulate sweep", "faults"): Ran([*SWEEP, "--seeds", "1"], ["--faults", "kill"], prints('"kill"'), swept),
    ("simulate sweep", "policy"): Ran([*SWEEP, "--seeds", "1"], ["--policy", "sync"], prints('"sync"'), swept),
    ("simulate sweep", "window"): Ran([*SWEEP, "--seeds", "1"], ["--window", "auto"], prints('"auto"'), swept),
    ("simulate sweep", "jobs"): Ran([*SWEEP[:2], "--seeds", "1"], ["--jobs", "3"], prints("3 processes"), swept),
    ("simulate sweep", "replay"): Shown(
        "tests/unit/test_sweep.py::test_a_failure_is_printed_with_the_command_that_replays_it"
    ),
    ("simulate sweep", "as_json"): Ran([*SWEEP[:-1], "--seeds", "1"], ["--json"], is_json),
    ("profile", "model"): profiled(["--model", "{moe}"], "tiny-moe"),
    ("profile", "slots"): profiled(["--slots", "5"], "slots=5"),
    ("profile", "kv_tokens"): profiled(["--kv-tokens", "9999"], "kv_tokens=9999"),
    ("profile", "max_model_len"): profiled(["--max-model-len", "400"], "max_model_len_tokens=400"),
    ("profile", "dtype"): profiled(["--dtype", "bfloat16"], "dtype='bfloat16'"),
    ("profile", "threads"): profiled(["--threads", "2"], "threads=2"),
    ("profile", "seed"): profiled(["--seed", "9"], "seed=9"),
    ("profile", "rounds"): profiled(["--rounds", "2"], "rounds=2"),
    ("profile", "clock"): profiled(["--clock", "cpu"], "clock='cpu'"),
    ("profile", "engines"): profiled(["--engines", "3"], "3 engines"),
    ("profile", "tolerance"): Ran(PROFILE, ["--tolerance", "0.9"], lambda done: done.code == 0, off),
    ("profile", "out"): Ran(
        PROFILE, ["--out", "{folder}/cost.toml"], lambda done: done.code == 0 and "cost.toml" in done.files, timed
    ),
    ("profile", "force"): Ran(
        [*PROFILE, "--out", "{folder}/cost.toml"], ["--force"], lambda done: "cost.toml" in done.files, off
    ),
    ("profile", "as_json"): Ran(PROFILE, ["--json"], prints('"predicted_over_measured"'), timed),
    ("verify", "folder"): Ran(["verify"], ["{record}"], lambda done: done.code == 0),
    ("verify", "atol"): Shown(VERIFY + "test_one_corrupted_logprob_is_found"),
    ("verify", "sample"): Shown(VERIFY + "test_a_sample_is_even_over_versions_and_follows_its_seed"),
    ("verify", "seed"): Shown(VERIFY + "test_a_sample_is_even_over_versions_and_follows_its_seed"),
    ("verify", "window"): Ran(["verify", "{record}"], ["--window", "1"], lambda done: done.code == 1),
    ("verify", "as_json"): Shown(VERIFY + "test_the_command_tells_its_progress_in_lines_on_stderr_alone"),
    ("report", "folder"): Ran(["report"], ["{record}"], lambda done: done.code == 0),
    ("report", "out"): Ran(
        ["report", "{record}"], ["--html", "{folder}/out.html"], lambda done: "out.html" in done.files
    ),
    ("report", "hourly"): Ran(
        ["report", "{record}", "--json"], ["--hourly", "2"], lambda done: done.at("cost") is not None
    ),
    ("report", "as_json"): Ran(["report", "{record}"], ["--json"], lambda done: done.tree is not None),
    ("doctor", "device"): Ran(
        ["doctor", "--model", "{dense}"], ["--device", "cuda:99"], lambda d: d.code == 2, examined
    ),
    ("doctor", "model"): Ran(["doctor", "--json"], ["--model", "{moe}"], prints('"model": "tiny-moe"'), examined),
    ("doctor", "stage"): Ran(["doctor", "--model", "{dense}", "--json"], ["--stage", "blocks"], fewer_stages, examined),
    **{("doctor", option): Shown(EXAMINED) for option in ("service", "token", "probe")},
    ("doctor", "as_json"): Ran(["doctor", "--model", "{dense}"], ["--json"], is_json, examined),
    ("replay", "file"): SHOWN_REPLAY,
    ("replay", "first"): SHOWN_REPLAY,
    ("replay", "last"): SHOWN_REPLAY,
    ("replay", "only"): SHOWN_REPLAY,
    ("replay", "decisions"): SHOWN_REPLAY,
    ("replay", "as_json"): Shown(REPLAY + "test_the_commands_json_is_one_document"),
}
