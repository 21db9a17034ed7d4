"""Measures all benchmarks, and writes the table of docs/performance.md.

    python -m perf.all                       # each in a process of its own, one after the other: about 35 minutes
    python -m perf.all --only journal stream
    python -m perf.all --short               # small sizes, which show that each can measure; the page stays as it is
    python -m perf.all --check               # measures nothing: marks each row that is older than the code it measures

A benchmark's figures are kept in perf/figures.jsonl as soon as it ends, with date, commit and CPU. A row is older if a
commit after its own changed one of the paths that its benchmark measures, or if such a path was changed and not
committed when it was measured: its benchmark is marked. Exits with 1 if a benchmark could not measure, and with --check
if a row is older.
"""

import argparse
import json
import math
import operator
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, Final

from experiments.convergence.page import with_results
from perf.benchmarks import BENCHMARKS, Benchmark, Figure

ROOT: Final = Path(__file__).parents[1]
ROWS: Final = ROOT / "perf" / "figures.jsonl"
PAGE: Final = ROOT / "docs" / "performance.md"
MARK: Final = "<!-- figures -->"
END: Final = "<!-- end of figures -->"
LIMIT_S: Final = 900.0  # of one benchmark
SAID: Final = 2000  # characters of a failed benchmark's last words
OLDER: Final = " (older)"
WORDS: Final = {">=": "at least", "<=": "at most"}
BARS: Final[Mapping[str, Callable[[float, float], bool]]] = {">=": operator.ge, "<=": operator.le}


class NotMeasured(Exception):
    """A benchmark that failed, with its last words."""


def measured(benchmark: Benchmark, short: bool = False) -> dict[str, float]:
    """The figures by title. Raises NotMeasured."""
    words = [sys.executable, *shlex.split(benchmark.command), *(shlex.split(benchmark.short) if short else ())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        answer, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"it took more than {LIMIT_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a service or an engine may outlive its benchmark
        process.wait()
    try:
        tree = json.loads(answer)
        found = {figure.title: float(_at(tree, figure.field)) for figure in benchmark.figures}
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise NotMeasured(f"exit code {process.returncode}, {error!r}: {errors[-SAID:]}") from error
    if not all(map(math.isfinite, found.values())):
        raise NotMeasured(f"these are no numbers: {found}")
    return found


def _at(tree: Any, field: str) -> Any:
    return reduce(lambda at, name: at[int(name) if isinstance(at, list) else name], field.split("."), tree)


def missing(benchmark: Benchmark) -> bool:
    return bool(benchmark.needs) and not (ROOT / benchmark.needs).exists()


# ---------------------------------------------------------------------------------------------------------------- rows


def stored() -> dict[str, dict[str, Any]]:
    """The last measurement of each benchmark, by name."""
    return {row["benchmark"]: row for row in map(json.loads, ROWS.read_text().splitlines())}


def store(benchmark: Benchmark, figures: Mapping[str, float]) -> None:
    changed = _git("status", "--porcelain", "--", *benchmark.measures)
    row = {
        "benchmark": benchmark.name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short=10", "HEAD") + ("+" if changed else ""),
        "cpu": _cpu(),
        "figures": {title: float(f"{value:.4g}") for title, value in figures.items()},
    }
    rows = stored() | {benchmark.name: row}
    ROWS.write_text("".join(json.dumps(rows[each.name]) + "\n" for each in BENCHMARKS if each.name in rows))


def is_older(benchmark: Benchmark, row: Mapping[str, Any]) -> bool:
    """Whether the code has changed since. A row of uncommitted code, or of a commit that this clone lacks, is older."""
    try:
        return bool(_git("log", "-1", "--format=%h", f"{row['commit']}..HEAD", "--", *benchmark.measures))
    except subprocess.CalledProcessError:
        return True


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


# ---------------------------------------------------------------------------------------------------------------- page


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures, and the benchmarks by when and where they were measured. OLDER marks those of changed code."""
    lines = ["| name | number | bar | benchmark |", "|---|---|---|---|"]
    measurements: dict[tuple[str, str, str], list[str]] = {}
    unmeasured: list[str] = []
    for benchmark in BENCHMARKS:
        row = rows.get(benchmark.name, {"figures": {}})
        for figure in benchmark.figures:
            value = row["figures"].get(figure.title)
            if value is None:
                unmeasured.append(f"- {figure.title} (`{benchmark.name}`)")
            else:
                lines.append(f"| {figure.title} | {' | '.join(_cells(figure, value))} | `{benchmark.name}` |")
        if row["figures"]:
            mark = OLDER if is_older(benchmark, row) else ""
            measurements.setdefault((row["date"], row["commit"], row["cpu"]), []).append(f"`{benchmark.name}`{mark}")
    lines += ["", "| date | commit | CPU | benchmarks |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(of)} | {', '.join(names)} |" for of, names in sorted(measurements.items())]
    if unmeasured:
        lines += ["", "Not measured:", "", *unmeasured]
    return "\n".join(lines)


def _cells(figure: Figure, value: float) -> tuple[str, str]:
    """The number, bold if it is outside of its bar, and the bar."""
    sign, _, bar = figure.bar.partition(" ")
    limit = f"{WORDS[sign]} {_shown(float(bar), figure.form)}" if bar else "-"
    number = _shown(value, figure.form)
    return (number if not bar or BARS[sign](value, float(bar)) else f"**{number}**"), limit


def _shown(value: float, form: str) -> str:
    form, _, unit = form.partition(" ")
    return f"{value:{form}} {unit}".strip()


def write_page() -> None:
    PAGE.write_text(with_results(PAGE.read_text(), markdown(stored()), MARK, END))


# ------------------------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in BENCHMARKS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--short", action="store_true", help="small sizes; nothing is written")
    parser.add_argument(
        "--check", action="store_true", help="measure nothing: mark rows that are older than their code"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    chosen = [each for each in BENCHMARKS if each.name in options.only]
    if options.check:
        return check(chosen, options.json)
    found, failed = {}, 0
    for number, benchmark in enumerate(chosen, start=1):
        where, began_s = f"[{number}/{len(chosen)}] {benchmark.name}", time.monotonic()
        if missing(benchmark):
            _say(f"{where}: left out, {benchmark.needs} does not exist")
            continue
        _say(f"{where} begins; load average {os.getloadavg()[0]:.1f}")
        try:
            found[benchmark.name] = measured(benchmark, options.short)
        except NotMeasured as error:
            failed += 1
            _say(f"{where} failed: {error}")
            continue
        _say(f"{where} took {time.monotonic() - began_s:.0f} s")
        if not options.short:
            store(benchmark, found[benchmark.name])
            write_page()
    if options.json:
        print(json.dumps(found))
    else:
        for name, figures in found.items():
            print("\n".join(f"{name:16} {title:72} {value:,.4g}" for title, value in figures.items()))
    return int(failed > 0)


def check(chosen: Sequence[Benchmark], as_json: bool) -> int:
    """Writes the marks of all rows into the page; prints the benchmarks among ``chosen`` whose rows are older."""
    rows = stored()
    older = [each.name for each in chosen if each.name not in rows or is_older(each, rows[each.name])]
    write_page()
    print(json.dumps(older) if as_json else "\n".join(f"{name}: older than the code it measures" for name in older))
    return int(bool(older))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
