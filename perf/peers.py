"""DORA beside other ways to train, on the same task, model, batch, optimiser and cores.

    python -m perf.peers                                  # what is not there yet, then the table; about 15 minutes
    python -m perf.peers --only waiting dora-2 --steps 20 --out out/short
    python -m perf.peers --page docs/peers.md             # writes the table into the page

Each peer runs alone, in processes of its own, on the cores that this command has, and leaves a run record. The peer
``trl`` needs ``.venv-trl`` (``python3 locks/install.py trl``) and is left out without it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import psutil

from experiments.convergence.page import with_results
from perf.peer_figures import LEVEL, LEVEL_STEPS, code_lines, figures_of
from perf.peer_record import RECORD_FOLDER, Task

ROOT: Final = Path(__file__).parents[1]
TRL_PYTHON: Final = ROOT / ".venv-trl" / "bin" / "python"
MARK: Final = "<!-- results: written by python -m perf.peers -->"
LOOK_S: Final = 0.25  # between two looks at the CPU time of a peer's processes
RESULT_FILE: Final = "result.json"
LOOP_CODE: Final = ("Reloading", "Engine", "_response", "Loop", "loop_in")


@dataclass(frozen=True, slots=True)
class Peer:
    """``code``: the functions and classes of ``module`` that a user writes; empty: two commands. ``threads``: of each
    engine and trainer.
    """

    name: str
    title: str
    module: str
    arguments: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    threads: int = 1

    @property
    def effort(self) -> str:
        if not self.code:
            return "2 commands"
        return str(code_lines(ROOT / f"{self.module.replace('.', '/')}.py", self.code))


def _dora(name: str, title: str, *settings: str) -> Peer:
    return Peer(name, title, "perf.peer_dora", settings)


def _twice(peer: Peer) -> tuple[Peer, Peer]:
    """With one thread, and with two: its engine and its trainer take turns, so each has two cores."""
    return peer, replace(peer, name=f"{peer.name}-2-threads", title=f"{peer.title}, 2 threads", threads=2)


_TRL: Final = Peer("trl", "TRL", "perf.peer_trl", (), ("reward_of_characters", "trainer_of"), TRL_PYTHON)


def _loop(name: str, title: str) -> Peer:
    return Peer(name, title, "perf.peer_loops", (name,), (*LOOP_CODE, name))


PEERS: Final = (
    _dora("dora-sync", "DORA sync", "balance.policy=sync", "window.size=1"),
    _dora("dora-2", "DORA window 2", "balance.policy=laxity", "window.size=2"),
    _dora("dora-auto", "DORA window auto", "balance.policy=laxity", "window.size=auto"),
    *_twice(_TRL),
    *_twice(_loop("waiting", "loop that waits")),
    _loop("partial", "loop with partial rollouts"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    began_s = time.monotonic()
    peers = [each for each in PEERS if not options.only or each.name in options.only]
    task = Task(**{each.name: getattr(options, each.name) for each in fields(Task)})
    found: dict[str, dict[str, Any]] = {}
    for peer in peers:
        folder = options.out / peer.name
        result = _stored(folder, task)
        is_late = options.minutes and time.monotonic() - began_s > 60 * options.minutes
        if result is None and not options.report and not is_late:
            result = _ran(peer, folder, task)
        if result is not None:
            found[peer.name] = result
    text = markdown(found, task)
    if options.page:
        options.page.write_text(with_results(options.page.read_text(), text, MARK))
    print(json.dumps(found, indent=1) if options.json else text)
    return 0 if len(found) == len(peers) else 1


def _stored(folder: Path, task: Task) -> dict[str, Any] | None:
    """The result of the peer. None: there is none, or it is of another task."""
    file = folder / RESULT_FILE
    found = json.loads(file.read_text()) if file.exists() else {}
    return found["figures"] if found.get("task") == task.as_json() else None


def _ran(peer: Peer, folder: Path, task: Task) -> dict[str, Any] | None:
    """Runs the peer. None: it cannot run here, or it failed; the folder keeps its log."""
    if not peer.python.exists():
        _say(f"{peer.name} is left out: {peer.python} does not exist")
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task.write(folder)
    began_s = time.monotonic()
    _say(f"{peer.name} begins")
    code, used = _watched(peer, folder, task.limit_s)
    if code:
        words = (folder / "log").read_text(errors="replace").splitlines()[-1:]
        _say(f"{peer.name} failed with exit code {code}: {' '.join(words)}; {folder / 'log'}")
        return None
    figures = {**figures_of(folder / RECORD_FOLDER, used), "load": os.getloadavg()[0]}
    (folder / RESULT_FILE).write_text(json.dumps({"task": task.as_json(), "figures": figures}, indent=1) + "\n")
    shutil.rmtree(folder / RECORD_FOLDER)
    _say(f"{peer.name}: {figures['samples_s']:.1f} samples/s, {time.monotonic() - began_s:.0f} s in all")
    return figures


def _watched(peer: Peer, folder: Path, limit_s: float) -> tuple[int, list[tuple[float, float]]]:
    """The exit code, and the CPU time of all processes over time. A peer of twice ``limit_s`` is ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(peer.threads), "PYTHONPATH": str(ROOT)}
    used = []
    ends_s = time.monotonic() + 2 * limit_s
    with (folder / "log").open("wb") as log:
        argv = [str(peer.python), "-m", peer.module, str(folder), *peer.arguments]
        process = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < ends_s:
                used.append((time.time(), _cpu_seconds(process.pid)))
                time.sleep(LOOK_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # an engine's process may outlive its loop
    return process.wait(), used


def _cpu_seconds(pid: int) -> float:
    """Of the process and its children, including those that have ended."""
    spent = 0.0
    try:
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            spent += sum(each.cpu_times()[:4])  # own and of children that ended: user and system
    except psutil.NoSuchProcess:
        pass  # the next look has the others
    return spent


def markdown(found: Mapping[str, Mapping[str, Any]], task: Task) -> str:
    """The table, with what was run."""
    cores = len(os.sched_getaffinity(0))
    loads = [each["load"] for each in found.values()]
    words = (
        f"{task.steps} steps of {task.groups} groups of {task.group_size}, learning rate {task.learning_rate:g}, "
        f"{cores} cores; load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f}. The level is a mean "
        f"reward of {LEVEL:g} over {LEVEL_STEPS} steps."
    )
    heads = [
        "",
        "steps",
        "samples/s",
        "tokens/s",
        "s to the level",
        "reward at the end",
        "staleness",
        "mixed",
        "logprob error",
    ]
    heads += ["largest", "cores used", "core-ms a sample", "lines"]
    rows = [_row(peer, found[peer.name]) for peer in PEERS if peer.name in found]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([words, "", *lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _row(peer: Peer, figures: Mapping[str, Any]) -> list[str]:
    end = figures["rewards"][-LEVEL_STEPS:]
    return [
        peer.title,
        str(figures["steps"] + 1),
        f"{figures['samples_s']:.1f}",
        f"{figures['tokens_s']:.0f}",
        _number(figures["seconds_to_level"], ".0f"),
        f"{sum(end) / len(end):.2f}",
        f"{figures['staleness']:.2f}",
        f"{figures['mixed_share']:.1%}",
        _number(figures["error_mean"], ".1e"),
        _number(figures["error_max"], ".1e"),
        f"{figures['cores']:.2f}",
        f"{1000 * figures['cpu_s_per_sample']:.1f}",
        peer.effort,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in PEERS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no peer after so long; 0: no limit")
    parser.add_argument("--out", type=Path, default=Path("out/peers"), help="results; a second call goes on with them")
    parser.add_argument("--page", type=Path, help="Markdown page whose table is written anew")
    parser.add_argument("--report", action="store_true", help="run nothing: show what is there")
    parser.add_argument("--json", action="store_true", help="print the figures in place of the table")
    task = Task()
    for each in fields(Task):
        value = getattr(task, each.name)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(value), default=value, help="(%(default)s)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the peer under way ends too
    sys.exit(main())
