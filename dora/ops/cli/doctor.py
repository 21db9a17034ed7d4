"""``dora doctor``"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import JsonOption, TokenOption, refuse_options
from dora.ops.cli.output import print_result
from dora.ops.view.tables import Facts

if TYPE_CHECKING:
    from dora.client import Operator
    from dora.ops.doctor.verdict import StageResult
    from dora.rpc.dora_pb2 import ExaminedHost

EXAMPLE = "dora doctor --device cuda"
STYLES: Final = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def doctor(
    context: typer.Context,
    service: Annotated[
        str,
        typer.Option(
            "--service", metavar="HOST:PORT", help="Check a running service and all its hosts instead of this machine."
        ),
    ] = "",
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="With --service: each host also fetches chunks of the newest version, and sends KV blocks to others.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu or cuda; default: cuda if this process sees a GPU.")
    ] = "",
    model: Annotated[str, typer.Option(metavar="MODEL", help="A model's name or folder.")] = "tiny",
    stage: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this stage; may be repeated.")] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine before a run: packages, GPUs, engine, reloads, moves of KV, and a short run.

    Each stage runs in a process of its own. The command exits with 1 if a stage failed, or all were skipped. Attach its
    output to a report.

    With --service it checks a running service and its hosts: versions, clocks, memory, disks, certificates, links, and
    what a load and a move take. The table names figures of the run, of a probe, and estimates; others were measured
    now. It exits with 1 if something is to be done.
    """
    if service:
        refuse_options(context, ("--device", "--model", "--stage"), "with --service")
        _examine(service, token, probe, as_json)
        return
    refuse_options(context, ("--probe",), "without --service")
    from dora.host.placement import placement_of
    from dora.models import resolve_model
    from dora.ops.doctor.run import chosen, run_stages

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


def _examine(service: str, token: str | None, probe: bool, as_json: bool) -> None:
    from dora.ops.cli.control.service import ask
    from dora.ops.doctor.service import findings_of

    async def examined(operator: "Operator") -> list["ExaminedHost"]:
        return [each async for each in operator.examine(probe=probe)]

    findings = findings_of(ask(service, token, examined))
    ok = all(each.ok for each in findings)
    table = Facts(f"hosts of {service}")
    for number, each in enumerate(findings):
        if number and each.host != findings[number - 1].host:
            table.add_section()
        text = Text("ok", STYLES["ok"]) if each.ok else Text("to do", STYLES["failed"])
        text.append(f"  {each.found}", "dim" if each.ok else "default")
        if each.how != "now":
            text.append(f" ({each.how})", "dim")
        if each.action:
            text.append(f": {each.action}", "bold")
        table.add_row(f"{each.host} {each.check}", text)
    document = {"ok": ok, "service": service, "findings": [asdict(each) for each in findings]}
    print_result(document, table, as_json)
    if not ok:
        raise typer.Exit(ExitCode.FAILED)


def _table(device: str, verdicts: Sequence["StageResult"]) -> Facts:
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
