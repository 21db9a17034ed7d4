"""The commands that ask a running service, each against one that always looks the same."""

import json
from collections.abc import Sequence
from typing import Any, Final

import typer

from dora.ops.cli.control import evaluate
from dora.ops.cli.control.service import COMMANDS
from tests.unit.cli.service import TOKEN
from tests.unit.effects.commands import Bench, Done, OptionRow, Ran, Shown

AT: Final = ("--address", "{address}", "--token-file", "{token}")
ARGUMENTS: Final[dict[str, Sequence[str]]] = {  # with which each command succeeds
    "status": (),
    "versions": (),
    "workers": (),
    "pools": (),
    "hosts": (),
    "trajectories": (),
    "migrate": ("g3.0", "--to", "w1"),
    "drain": ("w0",),
    "scale": ("--workers", "3"),
    "rebalance": (),
    "checkpoint": (),
    "cancel": ("q1",),
    "watch": ("--updates", "1"),
}
assert ARGUMENTS.keys() == COMMANDS.keys()

# --------------------------------------------------------------------------------------------------- the common options


def succeeds(done: Done) -> bool:
    return done.code == 0


def is_json(done: Done) -> bool:
    return done.code == 0 and done.tree is not None


def common(command: str, *arguments: str) -> dict[tuple[str, str], OptionRow]:
    return {
        (command, "address"): Ran([command, *arguments, *AT[2:]], AT[:2], succeeds),
        (command, "token"): Ran([command, *arguments, *AT[:2]], AT[2:], succeeds),
        (command, "as_json"): Ran([command, *arguments, *AT], ["--json"], is_json),
    }


# ----------------------------------------------------------------------------------------------------------- dora eval


def asks(bench: Bench) -> None:
    """The command prints its request to the service, and ends."""

    class Asked:
        def evaluate(self, rows: list[Any], **how: Any) -> None:
            typer.echo(json.dumps({"rows": rows, **how}))
            raise typer.Exit

    def ask(_address: str, _token: str | None, call: Any, _kind: object) -> None:
        call(Asked()).send(None)

    bench.monkeypatch.setattr(evaluate, "ask", ask)
    rows = [{"prompt": "ab", "prompt_id": f"p{number}", "level": number} for number in range(3)]
    (bench.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (bench.folder / "set").mkdir()
    for name in ("train", "test"):
        (bench.folder / "set" / f"{name}.jsonl").write_text(json.dumps({"prompt": "ab", "prompt_id": name}) + "\n")


def evaluated(given: Sequence[str], field: str, value: Any, base: Sequence[str] = ()) -> Ran:
    """``field``: of what is asked for, or of its first prompt."""

    def shows(done: Done) -> bool:
        asked = done.tree
        return asked is not None and value == asked.get(field, asked["rows"][0].get(field) if asked["rows"] else None)

    return Ran(["eval", "{folder}/rows.jsonl", *(base or ("--other-columns", "ignore"))], given, shows, asks)


def count(done: Done) -> bool:
    return done.tree is not None and len(done.tree["rows"]) == 2


EVALUATION: Final = "tests/e2e/test_evaluation_fake.py::test_the_command_writes_what_came_and_counts_it_by_column"

SHOWN: Final = "tests/unit/test_conversation.py::"

ROWS: Final[dict[tuple[str, str], OptionRow]] = {
    **{row: how for command, given in ARGUMENTS.items() for row, how in common(command, *given).items()},
    ("status", "everything"): Ran(["status", *AT], ["--all"], lambda done: "workers_lost" in done.out),
    ("versions", "workers"): Ran(["versions", *AT], ["--workers"], lambda done: "silent for 61 s" in done.out),
    ("trajectories", "state"): Ran(
        ["trajectories", *AT, "--json"], ["--state", "running"], lambda done: done.at("total") == 1
    ),
    ("trajectories", "limit"): Ran(
        ["trajectories", *AT, "--json"], ["--limit", "1"], lambda done: len(done.at("trajectories")) == 1
    ),
    ("trajectories", "shown"): Shown(SHOWN + "test_the_command_shows_token_ids_without_a_tokenizer"),
    ("trajectories", "record"): Shown(SHOWN + "test_the_command_shows_texts_with_escapes"),
    ("migrate", "request"): Ran(["migrate", "--to", "w1", *AT], ["g3.0"], succeeds),
    ("migrate", "worker"): Ran(["migrate", "g3.0", *AT], ["--to", "w1"], succeeds),
    ("drain", "worker"): Ran(["drain", *AT], ["w2"], lambda done: "w2 drains" in done.out),
    ("drain", "within_s"): Ran(["drain", "h1", *AT], ["--within", "30"], lambda done: "within 30 s" in done.out),
    ("scale", "workers"): Ran(["scale", *AT], ["--workers", "5"], lambda done: "5 workers" in done.out),
    ("scale", "host"): Ran(["scale", "--workers", "5", *AT], ["--host", "h7"], lambda done: "on h7" in done.out),
    ("checkpoint", "name"): Ran(["checkpoint", *AT], ["--name", "tuned"], lambda done: "tuned" in done.out),
    ("checkpoint", "trainer"): Ran(
        ["checkpoint", "--name", "tuned", *AT], ["--trainer", "{folder}"], lambda done: "step-3" in done.said
    ),
    ("cancel", "names"): Ran(["cancel", *AT], ["q2"], lambda done: "g2" in done.out),
    ("cancel", "reason"): Ran(["cancel", "q1", *AT], ["--reason", "unheard"], lambda done: done.code != 0),
    ("watch", "period_ms"): Ran(
        ["watch", *AT, "--json"], ["--period-ms", "100"], lambda done: done.out.count("\n") == 10
    ),
    ("watch", "updates"): Ran(["watch", *AT, "--json"], ["--updates", "1"], lambda done: done.out.count("\n") == 1),
    ("eval", "prompts"): Shown(EVALUATION),
    ("eval", "version"): evaluated(["--version", "4"], "version", 4),
    ("eval", "share"): evaluated(["--share", "0.25"], "share", 0.25),
    ("eval", "samples"): evaluated(["--samples", "5"], "group_size", 5),
    ("eval", "temperature"): evaluated(["--temperature", "0.5"], "sampling", {"temperature": 0.5}),
    ("eval", "max_tokens"): evaluated(["--max-tokens", "9"], "sampling", {"max_tokens": 9}),
    ("eval", "by"): Shown(EVALUATION),
    ("eval", "other_columns"): evaluated(["--other-columns", "verifier"], "verifier", {"level": 0}),
    ("eval", "split"): Ran(
        ["eval", "{folder}/set"], ["--split", "test"], lambda done: bool(done.tree) and "test" in done.out, asks
    ),
    ("eval", "limit"): Ran(["eval", "{folder}/rows.jsonl", "--other-columns", "ignore"], ["--limit", "2"], count, asks),
    ("eval", "name"): evaluated(["--name", "mine"], "name", "mine"),
    ("eval", "out"): Shown(EVALUATION),
    ("eval", "address"): Shown(EVALUATION),
    ("eval", "token"): Shown(EVALUATION),
    ("eval", "as_json"): Shown(EVALUATION),
    ("token", "role"): Ran(["token", "--token-file", "{token}"], ["trainer"]),
    ("token", "address"): Ran(["token"], ["--address", "{left}"], lambda done: TOKEN in done.out),
    ("token", "token"): Ran(["token"], ["--token-file", "{token}"], lambda done: TOKEN in done.out),
    ("token", "call"): Ran(
        ["token", "owner", *AT],
        ["--call", "dora.v1.Operator/GetStatus"],
        lambda done: done.out.startswith("authorization: "),
    ),
    ("token", "as_json"): Ran(["token", "--token-file", "{token}"], ["--json"], is_json),
}
