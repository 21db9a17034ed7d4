"""``dora report``"""

from pathlib import Path
from typing import Annotated

import typer

from dora.errors import InvalidValue
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_result
from dora.ops.view.tables import Facts

EXAMPLE = "dora report out/demo/record --html report.html"


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by `--record DIR`.")],
    out: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with curves and samples, for a browser.")
    ] = None,
    hourly: Annotated[
        float,
        typer.Option(min=0.0, metavar="PRICE", help="Price of an hour of all machines, for the cost; 0: unknown."),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Report a learning run from its record: reward and evaluations, time of the steps, staleness, samples, cost.

    The service may still run. The page contains everything it shows.
    """
    from dora.ops.view.learning import learning_of
    from dora.ops.view.learning_page import facts, page, text_of

    run = learning_of(folder)
    found = facts(run, hourly)
    if out is not None:
        try:
            out.write_text(page(run, folder.resolve().name, hourly, text_of(folder)), encoding="utf-8")
        except OSError as error:
            raise InvalidValue("--html", str(out), f"a file that can be written ({error.strerror})") from error
    table = Facts(str(folder))
    for name, value in found.items():
        if not isinstance(value, list):
            table.add_row(
                name, "none" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
            )
    print_result(found, table, as_json)
