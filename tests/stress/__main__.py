"""Mixtures of experts under stress: ``python -m tests.stress``. Ends with 1 if a promise was broken.

Three vLLM workers, window 3, KV for half of what they run, a re-balance forced every few seconds, lengths with a long
tail, sessions among them; workers and trainers are killed. Then every logprob is recomputed with transformers.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.rpc import dora_pb2 as pb
from tests.stress.load import BOTH, GROUP_SIZE, MODELS, model_in, write_prompts
from tests.stress.report import SUMMED, model_report, not_killed, whole_report
from tests.stress.run import Seen, Stress, driven

TELL_PERIOD_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both")
    parser.add_argument("--trajectories", type=int, default=2000, help="of each model (%(default)s)")
    parser.add_argument("--groups-per-step", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--worker-kills", type=int, default=3, help="of each model's run (%(default)s)")
    parser.add_argument("--trainer-kills", type=int, default=3, help="of each model's run (%(default)s)")
    parser.add_argument("--sessions", type=float, default=0.5, help="share of the prompts (%(default)s)")
    parser.add_argument("--rebalance-s", type=float, default=2.0, help="between two that are forced (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each model's run (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/stress"))
    options = parser.parse_args(arguments)
    if options.trajectories < GROUP_SIZE or options.groups_per_step < 1:
        parser.error(f"--trajectories takes {GROUP_SIZE} or more, --groups-per-step 1 or more")
    if not 0.0 <= options.sessions <= 1.0:
        parser.error("--sessions takes a share from 0 to 1")
    names = BOTH if options.model == "both" else (options.model,)
    groups = -(-options.trajectories // GROUP_SIZE)
    os.environ["OMP_NUM_THREADS"] = "1"  # of torch, which checks the logprobs beside a service that has all cores
    models = {name: stressed(name, groups, options) for name in names}
    report = whole_report(models, groups * GROUP_SIZE)
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(f"{name:<20}{report[name]:>10,}" for name in SUMMED))
    print("\n".join(report["failures"][:20]) or f"ok; {options.out / 'report.json'}")
    return bool(report["failures"])


def stressed(name: str, groups: int, options: argparse.Namespace) -> dict[str, Any]:
    """One model's part of the report."""
    folder: Path = options.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, _logging_to(folder / "service.log"):
        prompts = folder / "prompts.jsonl"
        prompt_ids = write_prompts(prompts, groups, options.seed, options.sessions)
        stress = Stress(
            model=model_in(name, Path(scratch)),
            prompts=prompts,
            folder=folder,
            groups=groups,
            groups_per_step=options.groups_per_step,
            worker_kills=options.worker_kills,
            trainer_kills=options.trainer_kills,
            rebalance_s=options.rebalance_s,
            timeout_s=options.timeout_s,
        )
        teller = _Teller(name, groups)
        seen = asyncio.run(driven(stress, teller.status))
        ran_s = time.monotonic() - began_s
        report = model_report(stress.record, prompt_ids, seen, teller.checked)
        report["failures"] += not_killed(seen, options.worker_kills, options.trainer_kills)
    return {**report, "run_s": round(ran_s, 1), "check_s": round(time.monotonic() - began_s - ran_s, 1)}


class _logging_to(logging.FileHandler):
    """The log of the service goes to a file; the terminal shows the progress."""

    def __enter__(self) -> "_logging_to":
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger = logging.getLogger("dora")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(self, *exception: object) -> None:
        logger = logging.getLogger("dora")
        logger.removeHandler(self)
        logger.propagate = True
        self.close()


class _Teller:
    """A line on stderr every five seconds."""

    def __init__(self, name: str, groups: int) -> None:
        self._name, self._groups = name, groups
        self._began_s, self._told_s = time.monotonic(), -TELL_PERIOD_S
        self._tell("starting the workers")

    def status(self, status: pb.Status, seen: Seen) -> None:
        counters = status.counters
        trained = min(int(counters["groups_trained"]), self._groups) * GROUP_SIZE
        self._tell(
            f"{trained:,} of {self._groups * GROUP_SIZE:,} trajectories, step {status.filling_step}, "
            f"{int(counters['migrations_kv']):,} moved, {int(counters['requests_parked']):,} parked, "
            f"{int(counters['tokens_reprefilled']):,} tokens re-prefilled, {int(counters['turns_ended']):,} turns, "
            f"killed {seen.worker_kills} workers and {seen.trainer_kills} trainers"
        )

    def checked(self, share: float, how_far: str) -> None:
        self._tell(f"recomputing logprobs: {how_far}")

    def _tell(self, line: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_PERIOD_S:
            self._told_s = now_s
            print(f"{self._name:<12}{now_s - self._began_s:6.0f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
