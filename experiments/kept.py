"""``python -m experiments.kept``: the raw results behind the pages, which the repository keeps in short form.

python -m experiments.kept restore staleness out/staleness/cells    # then: python -m experiments.staleness
python -m experiments.kept again tiny-truncated-lr0.001-lag1-seed0  # is another machine's run like the others?
python -m experiments.kept keep staleness out/staleness/cells
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from experiments.convergence.intervals import NORMAL_95, T_95
from experiments.convergence.plan import write_json

DIGITS: Final = 5  # significant ones of a kept number
STEP_FIELDS: Final = ("reward", "movement", "groups_replayed")  # of a cell's steps: what the map's tables are made of


@dataclass(frozen=True, slots=True)
class Kind:
    """Results that are one JSON file a run, whose field ``run`` specifies it and is not rounded. ``shortened``: what is
    kept of one; ``whole``: a result from that.
    """

    file: Path
    shortened: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda result: result
    whole: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda result: result


def _columns(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A cell's steps, field by field."""
    fields = [name for name in STEP_FIELDS if name in result["steps"][0]]
    return {**result, "steps": {name: [line[name] for line in result["steps"]] for name in fields}}


def _lines(result: Mapping[str, Any]) -> Mapping[str, Any]:
    columns = result["steps"]
    return {**result, "steps": [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]}


_HERE: Final = Path(__file__).parent
KINDS: Final[Mapping[str, Kind]] = {
    "staleness": Kind(_HERE / "staleness" / "results.jsonl", _columns, _lines),
    "fleet": Kind(_HERE / "staleness" / "fleet-results.jsonl"),
    "convergence": Kind(_HERE / "convergence" / "results.jsonl"),
    "pinning": Kind(_HERE / "pinning" / "results.jsonl"),
    "pinning-fleet": Kind(_HERE / "pinning" / "fleet-results.jsonl"),
}


def keep(folders: Sequence[Path], kind: Kind) -> int:
    """Writes the results of these folders as the kept ones. Returns their number."""
    found = {path.stem: json.loads(path.read_text()) for folder in folders for path in sorted(folder.glob("*.json"))}
    lines = (json.dumps([name, _rounded(kind.shortened(found[name]))], separators=(",", ":")) for name in sorted(found))
    kind.file.write_text("".join(f"{line}\n" for line in lines))
    return len(found)


def kept(kind: Kind) -> dict[str, Any]:
    """Returns the kept results by name."""
    lines = map(json.loads, kind.file.read_text().splitlines())
    return {name: kind.whole(short) for name, short in lines}


def restore(folder: Path, kind: Kind) -> int:
    """Writes the kept results into a folder, where the experiments find them. Returns their number. A result that is
    there stays.
    """
    missing = {name: each for name, each in kept(kind).items() if not (folder / f"{name}.json").exists()}
    for name, each in missing.items():
        write_json(folder / f"{name}.json", each)
    return len(missing)


def _rounded(value: Any) -> Any:
    match value:
        case float() if math.isfinite(value):
            return float(f"{value:.{DIGITS}g}")
        case Mapping():
            return {name: each if name == "run" else _rounded(each) for name, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
    return value


@dataclass(frozen=True, slots=True)
class Again:
    """A cell that was run again: its steps to the level, those of the kept run, and where 95% of further seeds lie."""

    steps: float
    kept: float
    low: float
    high: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.steps <= self.high


def compared(again: Mapping[str, Any], results: Mapping[str, Any]) -> Again:
    """Compares a new run of a kept cell with the kept runs of the same cell with any seed. Raises KeyError for a cell
    that is not kept.
    """
    from experiments.staleness.report import counted

    def mode(result: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in result["cell"].items() if name != "seed"}

    (own,) = (each for each in results.values() if each["cell"] == again["cell"])
    steps = [counted(each) for each in results.values() if mode(each) == mode(own)]
    quantile = T_95[len(steps) - 2] if 2 <= len(steps) < len(T_95) + 2 else NORMAL_95
    half = quantile * stdev(steps) * math.sqrt(1 + 1 / len(steps)) if len(steps) > 1 else math.inf
    return Again(counted(again), counted(own), fmean(steps) - half, fmean(steps) + half)


def _run_again(name: str) -> int:
    import torch

    from experiments.staleness.cell import Cell
    from experiments.staleness.lagged import Lagged

    results = kept(KINDS["staleness"])
    if name not in results:
        print(f"{name} = not a kept cell; kept are {', '.join(sorted(results)[:3])} and others", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    cell = Cell(**results[name]["cell"])
    found = compared({"cell": cell.specification, "steps": Lagged(cell).steps()}, results)
    verdict = "agrees" if found.agrees else "DIFFERS"
    print(
        f"{name}: {found.steps:g} steps to the level, kept: {found.kept:g}; "
        f"95% of seeds lie between {found.low:.0f} and {found.high:.0f}: {verdict}"
    )
    return 0 if found.agrees else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a run that differs, 2 for a name that is not kept."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.kept", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, words in (("keep", "from these folders"), ("restore", "into a folder")):
        of_kind = verbs.add_parser(verb, help=words)
        of_kind.add_argument("kind", choices=list(KINDS))
        of_kind.add_argument("folders", nargs="+" if verb == "keep" else 1, type=Path)
    verbs.add_parser("again", help="run a kept cell and compare").add_argument("name")
    options = parser.parse_args(arguments)
    if options.verb == "again":
        return _run_again(options.name)
    kind = KINDS[options.kind]
    count = keep(options.folders, kind) if options.verb == "keep" else restore(options.folders[0], kind)
    print(f"{count} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
