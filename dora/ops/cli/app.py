"""The ``dora`` application: one entry per command, in the order of ``dora --help``."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from dora.ops.cli import demo, doctor, environment, front, host, role, serve, tls, version
from dora.ops.cli.control import evaluate, service
from dora.ops.cli.exits import MEANINGS, DoraGroup
from dora.ops.cli.guarded import guarded
from dora.ops.cli.offline import plan, prepare, profile, replay, report, verify
from dora.ops.cli.offline.simulate import presets, run, sweep

EPILOG = "Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in MEANINGS.items()) + "."

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "demo": (demo.demo, demo.EXAMPLE),
    "serve": (serve.serve, serve.EXAMPLE),
    "host": (guarded(host.host), host.EXAMPLE),
    "front": (guarded(front.front), front.EXAMPLE),
    "environment": (guarded(environment.environment), environment.EXAMPLE),
    **{name: (guarded(command), example) for name, (command, example) in service.COMMANDS.items()},
    "eval": (guarded(evaluate.evaluate), evaluate.EXAMPLE),
    "token": (guarded(role.token), role.EXAMPLE),
    "replay": (replay.replay, replay.EXAMPLE),
    "plan": (plan.plan, plan.EXAMPLE),
    "profile": (profile.profile, profile.EXAMPLE),
    "verify": (verify.verify, verify.EXAMPLE),
    "report": (report.report, report.EXAMPLE),
    "doctor": (guarded(doctor.doctor), doctor.EXAMPLE),
    "prepare": (prepare.prepare, prepare.EXAMPLE),
    "version": (version.version, version.EXAMPLE),
}

SIMULATE_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "sweep": (sweep.sweep, sweep.EXAMPLE),
    "presets": (presets.presets, presets.EXAMPLE),
}

TLS_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {"make": (tls.make, tls.EXAMPLE)}
tls_app = typer.Typer(cls=DoraGroup, no_args_is_help=True, help="Make certificates for a private cluster.")

app = typer.Typer(
    name="dora",
    cls=DoraGroup,
    help="A rollout service for reinforcement-learning post-training of language models.",
    epilog=f"{EPILOG}\n\nExample: dora demo --model tiny",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        version.version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print DORA's version and exit."
        ),
    ] = False,
) -> None:
    """A rollout service for reinforcement-learning post-training of language models."""


def help_of(function: Callable[..., None]) -> str:
    """Returns a command's help: its docstring, one line per paragraph, which the terminal wraps."""
    paragraphs = cleandoc(function.__doc__ or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for _app, _commands in ((app, COMMANDS), (run.app, SIMULATE_COMMANDS), (tls_app, TLS_COMMANDS)):
    for _name, (_function, _example) in _commands.items():
        _app.command(_name, help=help_of(_function), epilog=f"Example: {_example}")(_function)
app.add_typer(tls_app, name="tls", cls=DoraGroup)
app.add_typer(run.app, name="simulate", cls=DoraGroup, help=help_of(run.simulate))
