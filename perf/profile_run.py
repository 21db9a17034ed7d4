"""Whether `dora profile` predicts a real run: engines are profiled, then a service runs on such engines, in turns.

    python perf/profile_run.py --model smollm2 --rounds 2 --json

Each round: `dora profile --engines` writes cost.toml; `dora serve` runs real vLLM workers under a trainer that takes
its groups, waits and publishes the same weights; `dora simulate` runs a scenario with that cost and with what is known
of the run otherwise (engines, slots, KV, window, groups, response lengths, training time, links). Nothing is fitted to
the run that is predicted. Compared are generated tokens a second, of the run's steady part and of the simulation.

On a shared machine others take cores from the one and from the other. So engines are profiled in time on a core, and it
is measured for how long the run's engines were ready and had none (Linux's scheduler counts it). "With a core" is the
ratio to the throughput that the run would have had without that share: what the profile is to predict.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import tomli_w
from contention import Children, Shares, shares
from observed_run import Observed, observed, scenario
from rich.console import Console
from rich.table import Table

import dora
from dora.client import Operator
from dora.config import load_config

SIMULATED_STEPS: Final = ("--steps", "40", "--warmup", "5")
SEEDS: Final = 4  # of simulations that are averaged
QUIET: Final = 0.1  # share of waiting for a core up to which the ratio as it is measured counts, and not the other
DORA: Final = (sys.executable, "-m", "dora")


@dataclass(frozen=True)
class Round:
    """One profile, the run after it, and the prediction."""

    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    ratio: float  # predicted over measured
    ratio_with_a_core: float  # over what was measured, had engines never waited for a core
    profile_waited: float  # share of the time in which engines wanted a core: they had none
    run_waited: float  # likewise, in the steady part
    step_s: float  # of the run
    predicted_step_s: float
    profile: dict[str, Any]  # its own check: ratios, and what the clock said
    cost: dict[str, float]
    run: dict[str, Any]


def main() -> None:
    options = _options()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="dora-profile-run-") as folder:
            rounds.append(one_round(options, Path(folder), number))
        print(_line(number, rounds[-1]), file=sys.stderr, flush=True)
    quiet = all(each.run_waited <= QUIET for each in rounds)
    medians = {name: median(getattr(each, name) for each in rounds) for name in ("ratio", "ratio_with_a_core")}
    held = "ratio" if quiet else "ratio_with_a_core"
    passed = abs(medians[held] - 1.0) <= options.tolerance
    if options.json:
        tree = {"model": options.model, **medians, "held": held, "error": abs(medians[held] - 1.0), "passed": passed}
        print(json.dumps(tree | {"rounds": [asdict(each) for each in rounds]}, indent=2))
    else:
        show(options, rounds, medians)
    sys.exit(0 if passed else 1)


def one_round(options: argparse.Namespace, folder: Path, number: int) -> Round:
    profile, profile_waited = profiled(options, folder, number)
    settings = service_settings(options, profile["cost"], folder, number)
    run_waited = serve(settings, options)
    seen = observed(folder / "state", options.warmup)
    predicted = simulated(seen, settings, profile["cost"], folder)
    predicted_tokens_per_s = fmean(report["generated_tokens_per_s"] for report in predicted)
    ratio = predicted_tokens_per_s / seen.tokens_per_s
    return Round(
        measured_tokens_per_s=seen.tokens_per_s,
        predicted_tokens_per_s=predicted_tokens_per_s,
        ratio=ratio,
        ratio_with_a_core=ratio * (1.0 - run_waited),
        profile_waited=profile_waited,
        run_waited=run_waited,
        step_s=seen.seconds / seen.steps,
        predicted_step_s=60.0 * fmean(report["step_time_min"] for report in predicted),
        profile={name: profile[name] for name in ("predicted_over_measured", "predicted_over_wall", "decode_error")},
        cost=profile["cost"],
        run=asdict(seen),
    )


def profiled(options: argparse.Namespace, folder: Path, number: int) -> tuple[dict[str, Any], float]:
    """Returns the output of `dora profile --json`, and its engines' waits. Its check may fail: the run counts."""
    out = folder / "cost.toml"
    engine = ["--slots", options.slots, "--kv-tokens", options.kv_tokens, "--max-model-len", options.max_model_len]
    how = ["--engines", options.workers, "--clock", options.clock]
    how += ["--rounds", options.profile_rounds, "--seed", number]
    argv = [*DORA, "profile", "--model", options.model, *engine, *how, "--out", out, "--force", "--json"]
    process = subprocess.Popen(_text(argv), stdout=subprocess.PIPE, text=True)
    with Children(process) as engines:
        answer, _ = process.communicate()
    if not answer:  # it has said why
        sys.exit(process.returncode)
    found: dict[str, Any] = json.loads(answer)
    return found | {"cost": tomllib.loads(out.read_text())["cluster"]["cost"]}, engines.last.since(Shares())


def service_settings(options: argparse.Namespace, cost: dict[str, float], folder: Path, number: int) -> list[str]:
    """Overrides of the service's configuration."""
    fields = {
        "model": options.model,
        "prompts": options.prompts,
        "window.size": options.window,
        "window.groups_per_step": options.groups,
        "rollout.group_size": options.group_size,
        "rollout.max_tokens": options.max_tokens,
        "rollout.seed": number,
        "workers.count": options.workers,
        "workers.slots": options.slots,
        "workers.kv_tokens": options.kv_tokens,
        "workers.max_model_len_tokens": options.max_model_len,
        "service.listen": "127.0.0.1:0",
        "service.drain_timeout_s": 0.0,
        "service.state": str(folder / "state"),
        "service.keep_events": True,
        **{f"balance.cost.{name}": value for name, value in cost.items()},
    }
    return [f"{name}={json.dumps(value)}" for name, value in fields.items()]


def serve(settings: list[str], options: argparse.Namespace) -> float:
    """A service in a process of its own, trained by the scripted trainer for as many steps as are asked for; how its
    engines waited in the steady part."""
    argv = [*DORA, "serve", "--json", *(text for setting in settings for text in ("--set", setting))]
    with _running(argv) as attach:
        return asyncio.run(train(attach, options))


async def train(attach: dict[str, str], options: argparse.Namespace) -> float:
    """Takes a step's groups, waits as long as training is to take, and publishes the weights that there are."""
    async with (
        Operator(attach["address"], attach["token"]) as operator,
        dora.Trainer(attach["address"], token=attach["token"]) as trainer,
    ):
        pids = [worker.pid for worker in (await operator.status()).workers]
        before = Shares()
        async for step in trainer.steps(groups=options.groups):
            async for _ in step:
                pass
            await asyncio.sleep(options.training_s)
            await step.commit(weights=Path(attach["model"]))
            if step.number + 1 == options.warmup:
                before = shares(pids)
            if step.number + 1 == options.warmup + options.steps:
                return shares(pids).since(before)
    raise RuntimeError("prompts have run out")


@contextmanager
def _running(argv: list[str]) -> Iterator[dict[str, str]]:
    """The service's process, from when it says how to attach; SIGTERM at the end."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        yield json.loads("".join(lines))
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def simulated(seen: Observed, settings: list[str], cost: dict[str, float], folder: Path) -> list[dict[str, Any]]:
    """Returns the output of `dora simulate --json` for the same run, with several seeds."""
    lengths, file = folder / "lengths.json", folder / "scenario.toml"
    lengths.write_text(json.dumps({"hist": seen.lengths}))
    file.write_text(tomli_w.dumps(scenario(seen, load_config(None, settings), cost, lengths)))
    argv = [*DORA, "simulate", "--file", str(file), *SIMULATED_STEPS, "--json", "--seed"]
    runs = [subprocess.run([*argv, str(seed)], stdout=subprocess.PIPE, text=True, check=True) for seed in range(SEEDS)]
    return [json.loads(run.stdout) for run in runs]


def _text(argv: list[Any]) -> list[str]:
    return [str(word) for word in argv]


def _line(number: int, found: Round) -> str:
    return (
        f"round {number + 1}: measured {found.measured_tokens_per_s:,.1f} tokens/s, predicted"
        f" {found.predicted_tokens_per_s:,.1f}, ratio {found.ratio:.3f}; a step {found.step_s:.1f} s, predicted"
        f" {found.predicted_step_s:.1f}; profile's own check {found.profile['predicted_over_measured']:.3f};"
        f" engines waited for a core {found.profile_waited:.1%} and {found.run_waited:.1%} of their time,"
        f" with a core {found.ratio_with_a_core:.3f}"
    )


def show(options: argparse.Namespace, rounds: list[Round], medians: dict[str, float]) -> None:
    table = Table(title=f"{options.model}, {options.workers} engines: generated tokens a second")
    for name in ("", "measured", "predicted", "predicted/measured", "waited for a core", "ratio with a core"):
        table.add_column(name, justify="right")
    for number, each in enumerate(rounds, start=1):
        values = (f"{each.measured_tokens_per_s:,.1f}", f"{each.predicted_tokens_per_s:,.1f}", f"{each.ratio:.3f}")
        table.add_row(f"round {number}", *values, f"{each.run_waited:.1%}", f"{each.ratio_with_a_core:.3f}")
    table.add_section()
    table.add_row("median", "", "", f"{medians['ratio']:.3f}", "", f"{medians['ratio_with_a_core']:.3f}")
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder"
    )
    parser.add_argument("--prompts", default="reasoning-gym:spell_backward:2,syllogism:1")
    parser.add_argument("--rounds", type=int, default=2, help="of a profile and a run")
    parser.add_argument("--profile-rounds", type=int, default=2)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="of the profile's steps")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="prompt groups a step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--training-s", type=float, default=5.0, help="the trainer waits for so long in a step")
    parser.add_argument("--steps", type=int, default=5, help="of the steady part")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
