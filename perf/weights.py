"""What publishing and loading a version costs, in ratios of one run.

    python perf/weights.py --json
    python perf/weights.py --only stall delta --model smollm2 --dtype bfloat16

    stall_vs_memcpy    how long `commit` holds the trainer, by one copy of the model's bytes in memory
    stall_work_vs_memcpy  the same in processor time, which says more where others run beside it
    load_vs_memcpy     a version's load into a vLLM engine, without what the engine repacks, by one copy of one thread,
                       both in processor time
    reload_vs_load     vLLM's own `reload_weights` from disk, by that load with what is repacked
    delta_vs_full      bytes that travel of a version after a typical step of an optimiser, by all of them

and those of `perf/relays.py`, which says what they mean. With ``--json`` one object, else tables against the bars.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

Found = tuple[Mapping[str, float], list[Table]]

ROOT: Final = Path(__file__).resolve().parent.parent
AT_MOST: Final = {"stall_vs_memcpy": 1.3, "load_vs_memcpy": 2.0, "fanout8_vs_1": 1.2}
AT_LEAST: Final = {"decode_during_broadcast": 0.95}


def main() -> int:
    sys.path.insert(0, str(ROOT))  # a service for the trainer's client is among the tests
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="of what is measured")
    parser.add_argument("--model", default="smollm2", help="a model of `dora prepare`, or a folder")
    parser.add_argument("--rounds", type=int, default=9, help="of each; medians are shown")
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
    return 0


def the_stall(options: argparse.Namespace) -> Found:
    from publishing import stall

    return stall(options.model, options.rounds)


def the_delta(options: argparse.Namespace) -> Found:
    from publishing import delta

    return delta(options.model)


def the_load(options: argparse.Namespace) -> Found:
    from loading import load

    return load(options.model, options.rounds)


def the_relays(options: argparse.Namespace) -> Found:
    argv = [sys.executable, "-m", "perf.relays", "--json"]
    found = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    values: dict[str, float] = json.loads(found.stdout)
    return values, []


PARTS: Final[dict[str, Callable[[argparse.Namespace], Found]]] = {
    "stall": the_stall,
    "load": the_load,
    "delta": the_delta,
    "relays": the_relays,
}


def against_bars(values: Mapping[str, float]) -> Table:
    found = Table(title="Against their bars")
    for heading in ("", "measured", "bar"):
        found.add_column(heading, justify="left" if not heading else "right")
    for name, value in values.items():
        bar = f"at most {AT_MOST[name]:g}" if name in AT_MOST else ""
        bar = f"at least {AT_LEAST[name]:g}" if name in AT_LEAST else bar
        found.add_row(name, f"{value:g}", bar)
    return found


if __name__ == "__main__":
    sys.exit(main())
