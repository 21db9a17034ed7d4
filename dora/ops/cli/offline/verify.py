"""``dora verify``"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_result, progress_bar, stderr
from dora.ops.view.tables import Facts

if TYPE_CHECKING:
    from dora.ops.verify import VerifyReport

EXAMPLE = "dora verify out/demo/record --window 2"
SHOWN_VIOLATIONS = 20


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by `--record DIR`.")],
    atol: Annotated[
        float | None,
        typer.Option(
            help="Tolerance of a logprob; default: 0.001 in float32, 0.2 in bfloat16, 0.1 in int8, 0.5 in fp8."
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Recompute only N trajectories, evenly over the versions; every line is still checked."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    window: Annotated[
        int | None, typer.Option(help="Also check that staleness is at most WINDOW - 1, regardless of the run record.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every recorded logprob with Hugging Face transformers, and check the guarantees of the run record.

    The command exits with 1 after a violation, and if it could recompute nothing.
    """
    from dora.ops.verify import verify as verify_record

    with progress_bar(stderr(), "verifying") as tell:
        report = verify_record(folder, atol=atol, sample=sample, seed=seed, window_versions=window, progress=tell)
    print_result({"ok": report.verified, **asdict(report)}, _table(folder, report), as_json)
    if not report.verified:
        raise typer.Exit(ExitCode.FAILED)


def _table(folder: Path, report: "VerifyReport") -> Facts:
    table = Facts(Text.assemble(f"{folder}: ", _verdict(report)))
    table.add_row("steps committed", f"{report.steps:,}")
    if report.groups_replayed:
        table.add_row("groups replayed", f"{report.groups_replayed:,}")
    table.add_row("trajectories", f"{report.trajectories:,}")
    table.add_row("recomputed", f"{report.tokens:,} tokens of {report.recomputed:,} trajectories")
    table.add_row("versions", _versions(report.versions))
    if report.without_weights:
        left_out = f"{_versions(report.versions_without_weights)} ({report.without_weights:,} trajectories)"
        table.add_row("not recomputable", f"{left_out}: the service was told not to keep these weights")
    table.add_row("largest difference", f"{report.max_abs_diff:.2g} (at most {report.atol:g})")
    for rule in report.rules:
        table.add_row("tolerance", rule)
    table.add_row("mean difference", f"{report.mean_abs_diff:.2g}")
    table.add_row("moved requests", f"logits {report.exactness}")
    if report.router_ties:
        table.add_row("router ties", f"{report.router_ties:,} (choices of experts decided by rounding)")
    for sentence in report.violations[:SHOWN_VIOLATIONS]:
        table.add_row(Text("violation", "red"), sentence)
    if report.violations_total > SHOWN_VIOLATIONS:
        table.notes.append(f"{report.violations_total - SHOWN_VIOLATIONS:,} more violations (--json lists up to 1000)")
    return table


def _verdict(report: "VerifyReport") -> Text:
    """Says ``verified`` only of a record of which everything was recomputed."""
    if not report.ok:
        return Text(f"{report.violations_total} violations", "bold red")
    if not report.recomputed:
        return Text("nothing recomputed" if report.trajectories else "nothing to verify", "bold red")
    if report.recomputed < report.trajectories:
        return Text(f"in part: {report.recomputed:,} of {report.trajectories:,} trajectories recomputed", "bold yellow")
    return Text("verified", "bold green")


def _versions(versions: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], version]
        else:
            runs.append([version])
    return ", ".join(" to ".join(f"v{version}" for version in run) for run in runs) or "none"
