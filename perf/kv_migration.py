"""What moving KV costs, in ratios of one run: the transports, the blackout of a request that moves.

    python perf/kv_migration.py --json
    python perf/kv_migration.py --only transports --part-kilobytes 48

With ``--json`` one object by name of ratio, and otherwise tables. Each part's module says what its numbers mean.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Final

from rich.console import Console
from rich.table import Table

Found = tuple[Mapping[str, float], list[Table]]  # the numbers that have names, and tables of more

AT_LEAST: Final = {
    "shm_vs_memcpy": 0.60,
    "tcp_vs_sendall": 0.90,
    "gloo_vs_gloo_raw": 0.90,
    "decode_while_migrating": 0.95,
}
AT_MOST: Final = {
    "blackout_steps_p50": 2.0,
    "blackout_16k_vs_1k": 1.5,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="of what is measured")
    parser.add_argument("--megabytes", type=int, default=96, help="of one snapshot")
    parser.add_argument("--part-kilobytes", type=int, default=1440, help="of a run of neighbouring blocks in a layer")
    parser.add_argument("--rounds", type=int, default=15, help="of each transport")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="contexts that move")
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
        return
    for each in [*tables, against_bars(values)]:
        Console(width=120).print(each)


# Modules are imported where they are used: an engine takes seconds to import, and not every run needs one.


def the_transports(options: argparse.Namespace) -> Found:
    from transports import measured, table

    rows = measured(options.megabytes << 20, options.part_kilobytes << 10, options.rounds)
    return {name: round(row.ratio, 3) for name, row in rows.items() if name in AT_LEAST}, [table(rows)]


def the_blackout(options: argparse.Namespace) -> Found:
    from blackout import measured, table, values
    from full_batch import decode_while_migrating
    from one_engine import ends

    with ends(max(options.tokens)) as found:
        rows = measured(found, options.tokens)
        decoding = decode_while_migrating(found)
    return {**values(rows), "decode_while_migrating": round(decoding, 3)}, [table(rows)]


PARTS: Final[dict[str, Callable[[argparse.Namespace], Found]]] = {
    "transports": the_transports,
    "blackout": the_blackout,
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
    main()
