"""``dora doctor``"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from dora.cli.exits import ExitCode
from dora.cli.options import JsonOption
from dora.cli.output import print_result
from dora.view.tables import Facts

if TYPE_CHECKING:
    from dora.doctor.verdict import Verdict

EXAMPLE = "dora doctor --device cuda"
STYLES: Final = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def doctor(
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu or cuda; default: cuda if this process sees a GPU.")
    ] = "",
    model: Annotated[str, typer.Option(metavar="MODEL", help="A model's name or folder.")] = "tiny",
    stage: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this stage; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine before a run: packages, GPUs, engine, reloads, moves of KV, and a short run.

    Each stage runs in a process of its own. The command exits with 1 if a stage failed, or all were skipped. Attach its
    output to a report.
    """
    from dora.doctor.run import chosen, run_stages
    from dora.host.placement import placement_of
    from dora.models import resolve_model

    stages = chosen(stage or ())
    kind = placement_of(device, field="--device").kind
    folder = Path(resolve_model(model))
    verdicts = []
    for verdict in run_stages(stages, kind, folder, lambda each: typer.echo(f"dora: {each.name} ...", err=True)):
        verdicts.append(verdict)
    outcomes = {verdict.outcome for verdict in verdicts}
    ok = "ok" in outcomes and "failed" not in outcomes
    document = {"ok": ok, "device": kind, "model": model, "stages": [asdict(verdict) for verdict in verdicts]}
    print_result(document, _table(kind, verdicts), as_json)
    if not ok:
        raise typer.Exit(ExitCode.FAILED)


def _table(device: str, verdicts: Sequence["Verdict"]) -> Facts:
    table = Facts(f"this machine, on {device}")
    for verdict in verdicts:
        text = Text(verdict.outcome, STYLES[verdict.outcome])
        if verdict.said:
            text.append(f": {verdict.said}", "default")
        elif verdict.found:
            text.append(f"  {_words(verdict.found)}", "dim")
        table.add_row(verdict.stage, text)
    return table


def _words(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in found.items() if value not in ([], None, ""))


def _word(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
