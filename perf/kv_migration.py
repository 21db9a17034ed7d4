"""What moving KV costs, in ratios of one run, and whether a damaged snapshot gets in or a block is kept.

    python perf/kv_migration.py --json
    python perf/kv_migration.py --only transports --part-kilobytes 48
    python perf/kv_migration.py --only abuse --mutations 100000 --migrations 10000

With ``--json`` one object by name of number, and otherwise tables. Each part's module says what its numbers mean;
``abuse`` is ``python -m tests.abuse.kv`` and ``python -m tests.abuse.migrations``, each in a process of its own. Ends
with 1 where one of them finds a fault.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

Found = tuple[Mapping[str, float], list[Table]]  # the numbers that have names, and tables of more

ROOT: Final = Path(__file__).resolve().parent.parent
AT_LEAST: Final = {
    "shm_vs_memcpy": 0.60,
    "tcp_vs_sendall": 0.90,
    "gloo_vs_gloo_raw": 0.90,
    "park_vs_memcpy": 0.50,
    "resume_vs_memcpy": 0.50,
    "decode_while_migrating": 0.95,
}
AT_MOST: Final = {
    "blackout_steps_p50": 2.0,
    "blackout_16k_vs_1k": 1.5,
    "mutations_accepted": 0,
    "blocks_leaked": 0,
    "failures": 0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="of what is measured")
    parser.add_argument("--megabytes", type=int, default=96, help="of one snapshot")
    parser.add_argument("--part-kilobytes", type=int, default=1440, help="of a run of neighbouring blocks in a layer")
    parser.add_argument("--rounds", type=int, default=15, help="of each transport")
    parser.add_argument("--park-by", choices=("shm", "tcp"), default="shm", help="transport between worker and pool")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="contexts that move")
    parser.add_argument("--mutations", type=int, default=2000, help="snapshots that are damaged")
    parser.add_argument("--migrations", type=int, default=600, help="requests that move at random steps")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    options = parser.parse_args()
    values: dict[str, float] = {}
    tables: list[Table] = []
    for name in options.only:
        found, more = PARTS[name](options)
        values.update(found)
        tables += more
    if options.json:
        print(json.dumps(values))
    else:
        for each in [*tables, against_bars(values)]:
            Console(width=120).print(each)
    return int(values.get("failures", 0) > 0)


# Modules are imported where they are used: an engine takes seconds to import, and not every run needs one.


def the_transports(options: argparse.Namespace) -> Found:
    from transports import measured, table

    rows = measured(options.megabytes << 20, options.part_kilobytes << 10, options.rounds)
    return {name: round(row.ratio, 3) for name, row in rows.items() if name in AT_LEAST}, [table(rows)]


def the_parking(options: argparse.Namespace) -> Found:
    from park import measured, table

    rows = measured(options.megabytes << 20, options.part_kilobytes << 10, options.rounds, options.park_by)
    return {name: round(row.ratio, 3) for name, row in rows.items() if name in AT_LEAST}, [table(rows)]


def the_blackout(options: argparse.Namespace) -> Found:
    from blackout import measured, table, values
    from full_batch import decode_while_migrating
    from one_engine import ends

    with ends(max(options.tokens)) as found:
        rows = measured(found, options.tokens)
        decoding = decode_while_migrating(found)
    return {**values(rows), "decode_while_migrating": round(decoding, 3)}, [table(rows)]


def the_abuse(options: argparse.Namespace) -> Found:
    storm = reported("tests.abuse.kv", options.mutations)
    moves = reported("tests.abuse.migrations", options.migrations)
    found = Table(title="Damaged snapshots, and requests that move at random steps")
    for heading in ("", "tried", "taken in", "compared", "wrong", "blocks leaked"):
        found.add_column(heading, justify="left" if not heading else "right")
    for room in storm["rooms"]:
        found.add_row(room["name"], *map(str, (room["mutations"], len(room["accepted"]), *outcome(room))))
    for lane in moves["lanes"]:
        found.add_row(f"moves by {lane['transport']}", str(lane["handoffs"]), "-", *map(str, outcome(lane)))
    values = {
        "mutations_accepted": storm["mutations_accepted"],
        "blocks_leaked": storm["blocks_leaked"] + moves["blocks_leaked"],
        "failures": len(storm["failures"]) + len(moves["failures"]),
    }
    return values, [found]


def outcome(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["compared"], len(row["wrong"]), row["blocks_leaked"]


def reported(module: str, count: int) -> dict[str, Any]:
    """Returns the report of a program of the tests. Its failures go to the standard error."""
    argv = [sys.executable, "-m", module, "--count", str(count), "--json"]
    report = json.loads(subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, check=False).stdout)
    for failure in report["failures"]:
        print(f"{module}: {failure}", file=sys.stderr)
    return report


PARTS: Final[dict[str, Callable[[argparse.Namespace], Found]]] = {
    "transports": the_transports,
    "park": the_parking,
    "blackout": the_blackout,
    "abuse": the_abuse,
}


def against_bars(values: Mapping[str, float]) -> Table:
    found = Table(title="Against their bars")
    for heading in ("", "measured", "bar"):
        found.add_column(heading, justify="left" if not heading else "right")
    for name, value in values.items():
        bar = f">= {AT_LEAST[name]:g}" if name in AT_LEAST else f"<= {AT_MOST[name]:g}" if name in AT_MOST else "-"
        found.add_row(name, f"{value:g}", bar)
    return found


if __name__ == "__main__":
    sys.exit(main())
