"""The ``dora`` application: its commands by section."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from dora.ops.cli import cluster, demo, doctor, environment, front, host, role, serve, tls, version
from dora.ops.cli.control import evaluate, service
from dora.ops.cli.exits import MEANINGS, DoraGroup
from dora.ops.cli.guarded import guarded
from dora.ops.cli.offline import plan, prepare, profile, replay, report, verify
from dora.ops.cli.offline.simulate import presets, run, sweep

EPILOG = "Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in MEANINGS.items()) + "."

# The sections of ``dora --help``, each with its commands, the most used first.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Run": ("demo", "serve", "host", "front", "environment", "cluster"),
    "Look": (
        "status",
        "workers",
        "watch",
        "versions",
        "trajectories",
        "hosts",
        "pools",
        "report",
        "doctor",
        "version",
    ),
    "Control": ("migrate", "scale", "drain", "rebalance", "cancel", "checkpoint", "eval", "token"),
    "Offline": ("verify", "simulate", "plan", "profile", "replay", "prepare", "tls"),
}

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

CLUSTER_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "up": (cluster.up, cluster.UP),
    "status": (cluster.status, cluster.STATUS),
    "scale": (cluster.scale, cluster.SCALE),
    "down": (cluster.down, cluster.DOWN),
    "follow": (cluster.follow, cluster.FOLLOW),
}
cluster_app = typer.Typer(
    cls=DoraGroup, no_args_is_help=True, help="Run on machines that Slurm, Ray or Kubernetes gives out."
)

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


def _print_version(is_requested: bool) -> None:
    if is_requested:
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


def _add(to: typer.Typer, name: str, command: tuple[Callable[..., None], str], section: str | None = None) -> None:
    function, example = command
    to.command(name, help=help_of(function), epilog=f"Example: {example}", rich_help_panel=section)(function)


for _section, _names in SECTIONS.items():
    for _name in _names:
        if _name == "simulate":
            app.add_typer(run.app, name=_name, cls=DoraGroup, help=help_of(run.simulate), rich_help_panel=_section)
        elif _name == "tls":
            app.add_typer(tls_app, name=_name, cls=DoraGroup, rich_help_panel=_section)
        elif _name == "cluster":
            app.add_typer(cluster_app, name=_name, cls=DoraGroup, rich_help_panel=_section)
        else:
            _add(app, _name, COMMANDS[_name], _section)
for _app, _commands in ((run.app, SIMULATE_COMMANDS), (tls_app, TLS_COMMANDS), (cluster_app, CLUSTER_COMMANDS)):
    for _name, _command in _commands.items():
        _add(_app, _name, _command)
