"""Options that several commands share, and access to the options that were given."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dora.cli import completion
from dora.errors import InvalidValue

if TYPE_CHECKING:
    from dora.config import WindowSize

AddressOption = Annotated[
    str, typer.Option("--address", "-a", metavar="HOST:PORT", envvar="DORA_ADDRESS", help="Address of the service.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="DORA_TOKEN",
        show_envvar=True,
        help="The operator's or owner's token; default: the one stored by your service on this host.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document for programs.")]
WINDOW_METAVAR: Final = "N|auto"  # for every --window
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.service_settings,
        help="Override one field; may be repeated.",
    ),
]


def window_size(option: str | None) -> "WindowSize | None":
    """Parses ``--window``. Other text is returned unchanged, for the settings to refuse."""
    try:
        return None if option is None else int(option)
    except ValueError:
        return option  # type: ignore[return-value]


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options given on the command line and their values, in the order of the help; names as text."""
    given = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[parameter.name or ""]
            given[parameter.opts[0]] = value if isinstance(value, int | float | list) else str(value)
    return given


def refuse_given(context: typer.Context, options: Iterable[str], reason: str) -> None:
    """Raises InvalidValue for the first of ``options`` that was given. ``reason``: why it has no effect."""
    given = given_options(context)
    for option in options:
        if option in given:
            raise InvalidValue(option, given[option], f"left out {reason}")
