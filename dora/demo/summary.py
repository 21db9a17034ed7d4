"""The demo's last words: what was promised, what was measured."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.demo.folder import OutFolder
from dora.view.numbers import duration
from dora.view.tables import Note


def print_summary(console: Console, report: Mapping[str, Any], folder: OutFolder) -> None:
    """Prints the table, every failure in a sentence, and where the files are."""
    console.print(Note(_title(report), "bold"))
    console.print(summary_table(report))
    for sentence in report["failures"]:
        console.print(Text.assemble(("FAILED ", "bold red"), sentence))
    console.print(f"report    {folder.report}", soft_wrap=True)
    console.print(f"timeline  {folder.timeline}", soft_wrap=True)
    console.print(f"record    {folder.record}   (dora verify {folder.record})", soft_wrap=True)


def summary_table(report: Mapping[str, Any]) -> Table:
    """Promises first, then what the run was like."""
    table = Table(header_style="bold")
    table.add_column("promise or measure", no_wrap=True)
    table.add_column("wanted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right")
    for name in ("groups_lost", "groups_duplicated", "c1_violations"):
        _promise(table, name, "0", report[name], kept=report[name] == 0)
    bound = report["window"] - 1
    _promise(table, "staleness_max", f"<= {bound}", report["staleness_max"], kept=report["staleness_max"] <= bound)
    table.add_section()
    names = ("groups_admitted", "groups_trained", "versions_live_max", "migrations_kv", "migrations_reprefill")
    for name in (*names, "tokens_reprefilled", "workers_lost"):
        table.add_row(name, "", f"{report[name]:,}")
    for name in ("blackout_ms_p50", "blackout_ms_p99", "tokens_per_s"):
        table.add_row(name, "", "-" if report[name] is None else f"{report[name]:,.1f}")
    table.add_row("mean reward", "", _rewards(report["mean_reward_by_step"]))
    return table


def _title(report: Mapping[str, Any]) -> Text:
    ok = not report["failures"]
    verdict = Text("every promise held", "bold green") if ok else Text("a promise was broken", "bold red")
    return Text.assemble(
        f"{report['steps']} steps of {report['model']} in {duration(report['seconds_total'])}: ", verdict
    )


def _promise(table: Table, name: str, wanted: str, measured: int, *, kept: bool) -> None:
    table.add_row(name, wanted, Text(f"{measured:,}", "green" if kept else "bold red"))


def _rewards(by_step: list[float | None]) -> str:
    """Every step of a short run; first ten and last ten steps of a long one."""
    if len(by_step) <= 10:
        return ", ".join("-" if reward is None else f"{reward:.3f}" for reward in by_step)
    first, last = _mean(by_step[:10]), _mean(by_step[-10:])
    return f"{first} (first 10 steps) to {last} (last 10)"


def _mean(rewards: list[float | None]) -> str:
    scored = [reward for reward in rewards if reward is not None]
    return f"{sum(scored) / len(scored):.3f}" if scored else "-"
