"""The demo's final summary: the results in a few lines, and the paths of the files."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.ops.demo.folder import DEFAULT_RECORD, OutFolder
from dora.ops.view.numbers import duration
from dora.ops.view.service import drafts_line
from dora.ops.view.tables import Note


def print_summary(console: Console, report: Mapping[str, Any], folder: OutFolder) -> None:
    console.print(Note(_title(report), "bold"))
    console.print(summary_table(report))
    for sentence in (*report["failures"], *report["not_done"]):
        console.print(Text.assemble(("FAILED ", "bold red"), sentence))
    if report["conversation"]:
        console.print(f"session   {show_command(report['conversation'], folder)}", soft_wrap=True)
    console.print(f"report    {folder.report}", soft_wrap=True)
    console.print(f"timeline  {folder.timeline}", soft_wrap=True)
    console.print(f"record    {folder.record}   (dora verify {folder.record})", soft_wrap=True)


def show_command(trajectory_id: str, folder: OutFolder) -> str:
    """The command that shows a whole session of the run."""
    record = "" if folder.record == DEFAULT_RECORD else f" --record {shlex.quote(str(folder.record))}"
    return f"dora trajectories --show {trajectory_id}{record}"


def summary_table(report: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _lines(report):
        table.add_row(name, Text(text))
    return table


def _title(report: Mapping[str, Any]) -> Text:
    verdict = Text("every promise held", "bold green")
    if report["failures"]:
        verdict = Text("a promise was broken", "bold red")
    elif report["not_done"]:
        verdict = Text("every promise held, but an option had no effect", "bold red")
    return Text.assemble(
        f"{report['steps']} steps of {report['model']} in {duration(report['seconds_total'])}: ", verdict
    )


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "promises",
        f"{report['groups_lost']} groups lost, {report['groups_duplicated']} delivered twice, "
        f"{report['c1_violations']} responses with mixed versions",
    )
    yield "staleness", f"at most {report['staleness_max']} (allowed: {report['window'] - 1})"
    yield "versions", f"{report['versions_live_max']} live at once, {report['steps']} published"
    if report["two_versions_share"] is not None:
        yield (
            "engines",
            f"generated for two versions at once in {report['two_versions_share']:.0%} of the samples, "
            f"{report['engines_idle_share']:.0%} idle",
        )
    if report["groups_replayed"]:
        yield "replays", f"{report['groups_replayed']} groups trained on once more, within their staleness bound"
    if report["environment"]:
        yield "sessions", _sessions(report)
    yield "moves", _moves(report)
    if report["workers_killed"]:
        yield "kills", f"{report['workers_killed']} worker was killed, as asked; {report['workers_lost']} lost"
    yield "reward", _reward(report)
    if report["evaluated"]:
        yield "held-out", _evaluated(report)
    for name, answer in (("first", report["answer_first"]), ("last", report["answer_last"])):
        if answer:
            yield f"{name} step", answer
    yield "tokens", f"{report['tokens_generated']:,} generated, {report['tokens_per_s']:.0f}/s during training"
    if drafts := drafts_line(report):
        yield "drafts", drafts
    yield "time", _time(report)


def _sessions(report: Mapping[str, Any]) -> str:
    return (
        f"{report['turns_ended']:,} turns with {report['environment']}, {report['turns_resumed']:,} of them resumed "
        f"with their KV; {report['sessions_replaced']} sessions replaced"
    )


def _moves(report: Mapping[str, Any]) -> str:
    text = f"{report['migrations_kv']} requests moved to another worker with their KV"
    if report["blackout_ms_p50"] is not None and report["migrations_kv"]:
        text += f" (median time without tokens {report['blackout_ms_p50'] / 1000:.1f} s)"
    text += f", {report['migrations_reprefill']} without it"
    if report["requests_parked"]:
        text += f"; {report['requests_parked']} were parked, {report['requests_resumed']} resumed"
    return f"{text}; {report['tokens_reprefilled']} tokens were computed twice"


def _reward(report: Mapping[str, Any]) -> str:
    by_step = report["mean_reward_by_step"]
    if report["reward_first"] is None or report["reward_last"] is None:
        return "none was valid"
    text = f"{report['reward_first']:.2f} in the first quarter of the steps, {report['reward_last']:.2f} in the last"
    if 1 < len(by_step) <= 10:
        text += ": " + ", ".join("-" if reward is None else f"{reward:.2f}" for reward in by_step)
    return text


def _evaluated(report: Mapping[str, Any]) -> str:
    rewards = (
        f"{'-' if each['reward'] is None else format(each['reward'], '.2f')} at version {each['version']}"
        for each in report["evaluated"]
    )
    return f"{', '.join(rewards)} (reward on {report['evaluated'][-1]['responses']} responses)"


def _time(report: Mapping[str, Any]) -> str:
    parts = {
        "model": report["seconds_model"],
        "workers' start": report["seconds_start"],
        "first step": report["seconds_first_step"],
        "the others": report["seconds_later_steps"],
        "end and audit": report["seconds_end"],
    }
    return ", ".join(f"{name} {duration(part_s)}" for name, part_s in parts.items())
