"""Kills and faults under load: ``python -m tests.chaos``. Ends with 1 if a promise was broken, or something got stuck.

A service with workers, a pool, a host that has joined, a reward function, a trainer, an environment and a front; each
is killed at each moment of a handoff and of a commit, in turns of sessions and between them, is stopped, finds its disk
full, its clock changed and its link cut one way. Then all is trained to the end, and every logprob is computed again.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.models.tiny import TinyKind, make_tiny
from tests.abuse.full import has_namespaces
from tests.chaos import alarms
from tests.chaos.faults import OF_SESSIONS, Fault, drawn, named, offered
from tests.chaos.link import go_apart, is_apart
from tests.chaos.prompts import long_rows
from tests.chaos.report import MUST_BE_0, not_struck, report_of
from tests.chaos.setting import Setting
from tests.chaos.strikes import Striker, Struck
from tests.chaos.world import Stuck, opened
from tests.prometheus.fetch import tool

SOAK_PERIOD_S = 60.0  # between two faults of a soak


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--minutes", type=float, help="a soak in place of that: a fault a minute, for so long")
    parser.add_argument("--engine", choices=("fake", "vllm"), default="fake")
    parser.add_argument(
        "--speculation",
        choices=("off", "history", "ngram", "model"),
        default="off",
        help="with --engine vllm; model: drafts of the model's first version",
    )
    parser.add_argument("--model", choices=("tiny", "tiny-hybrid"), default="tiny", help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="on the service's host (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of each worker, which are killed too (%(default)s)")
    parser.add_argument("--groups-per-step", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults, and of the lengths")
    parser.add_argument("--without", default="", help="actions, victims or moments that are left out, with commas")
    parser.add_argument("--only", type=named, help="these faults in place of drawn ones, by name, with semicolons")
    parser.add_argument("--alerts", action="store_true", help="faults that last until a Prometheus fires their alert")
    parser.add_argument("--sessions", type=float, default=0.5, help="share of the prompts (%(default)s)")
    parser.add_argument("--no-host", action="store_true", help="without a host that has joined")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.groups_per_step < 1:
        parser.error("--kills and --groups-per-step take 1 or more")
    if options.workers < 2:
        parser.error("--workers takes 2 or more: requests move between them")
    if options.alerts and tool("prometheus") is None:
        parser.error("--alerts takes a Prometheus: `make prometheus` fetches Debian's")
    if options.speculation != "off" and (options.engine == "fake" or options.model == "tiny-hybrid"):
        parser.error("--speculation takes --engine vllm, and a model whose layers keep no state")
    if not 0.0 <= options.sessions <= 1.0:
        parser.error("--sessions takes a share from 0 to 1")
    if not options.no_host:
        go_apart(["-m", "tests.chaos", *(sys.argv[1:] if arguments is None else arguments)])
    out: Path = options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        kind: TinyKind = "hybrid" if options.model == "tiny-hybrid" else "dense"
        model = make_tiny(kind, Path(scratch) / "model", kv_heads=2)
        setting = Setting(
            model=model,
            folder=out,
            engine=options.engine,
            speculation=f"model:{model}" if options.speculation == "model" else options.speculation,
            rows=long_rows(1000, options.seed, options.sessions),
            groups_per_step=options.groups_per_step,
            workers=options.workers,
            ranks=options.ranks,
            has_sessions=options.sessions > 0,
            has_host=not options.no_host,
            has_link=is_apart(),
            has_disk=has_namespaces(),
            has_alerts=options.alerts,
        )
        report = asyncio.run(_run(setting, options))
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    shown = ("kills", "faults", "trajectories", "sessions", "branches", "turns", "chats", *MUST_BE_0)
    print("\n".join(f"{name:<24}{report[name]:>10,}" for name in shown))
    print("".join(f"left out: {name}: {why}\n" for name, why in report["left_out"].items()), end="")
    print("\n".join(report["failures"][:20]) or f"ok; {out / 'report.json'}")
    return bool(report["failures"])


async def _run(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    left_out = _left_out(setting)
    without = {each for each in options.without.split(",") if each} | set(left_out)
    if options.alerts:
        return await _run_alerts(setting, offered(options.only or alarms.FAULTS, without), left_out)
    faults = drawn(options.seed, without, has_ranks=setting.ranks > 1)
    if options.only:
        faults = iter(offered(options.only, without))
    ends_s = time.monotonic() + 60.0 * options.minutes if options.minutes else None
    stuck, status = "", None
    stop = asyncio.Event()  # asked to end: no further fault
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with opened(setting) as world:
        striker = Striker(world)
        struck = striker.struck
        began_s = time.monotonic()
        try:
            for fault in faults:
                is_enough = len(struck.kills) >= options.kills if ends_s is None else time.monotonic() >= ends_s
                if is_enough or stop.is_set():
                    break
                if ends_s is not None:
                    await asyncio.sleep(SOAK_PERIOD_S)
                came = await striker.strike(fault)
                _tell(began_s, struck, fault.name if came else f"{fault.name}: missed")
            status = await world.finish()
        except Stuck as reason:
            stuck = str(reason)
            _tell(began_s, struck, stuck)
    report = report_of(world, struck, status, stuck)
    report["failures"] += not_struck(struck, 0 if options.only or options.minutes else options.kills)
    run_s = round(time.monotonic() - began_s, 1)
    return {**report, "left_out": left_out, "seed": options.seed, "engine": setting.engine, "run_s": run_s}


async def _run_alerts(setting: Setting, faults: Sequence[Fault], left_out: dict[str, str]) -> dict[str, Any]:
    """Strikes with each fault until its alert has fired. The report has the alerts by fault."""
    stuck, status = "", None
    async with opened(setting) as world, alarms.alarmed(world) as alarm:
        striker = Striker(world, alarm)
        began_s = time.monotonic()
        try:
            for fault in faults:
                await striker.strike_until_told(fault, alarm)
                _tell(began_s, striker.struck, f"{fault.name}: {', '.join(alarm.found[fault.name])}")
            status = await world.finish()
        except Stuck as reason:
            stuck = str(reason)
            _tell(began_s, striker.struck, stuck)
    report = report_of(world, striker.struck, status, stuck)
    run_s = round(time.monotonic() - began_s, 1)
    return {**report, "alerts": alarm.found, "left_out": left_out, "engine": setting.engine, "run_s": run_s}


def _left_out(setting: Setting) -> dict[str, str]:
    """The actions and victims that this machine or this run does not have, and why."""
    left_out = {}
    if not setting.has_disk:
        left_out["fill"] = "this user may not mount a file system in a namespace here"
    if not setting.has_sessions:
        left_out |= dict.fromkeys(OF_SESSIONS, "--sessions 0")
    if not setting.has_host:
        left_out |= dict.fromkeys(("agent", "host worker", "cut"), "--no-host")
    elif not setting.has_link:
        left_out["cut"] = "this user may not make network namespaces and TUN devices here"
    return left_out


def _tell(began_s: float, struck: Struck, line: str) -> None:
    print(f"{time.monotonic() - began_s:7.1f} s  {len(struck.kills):4} kills  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
