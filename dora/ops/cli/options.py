"""Options that several commands share, and access to the options that were given."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dora.errors import InvalidValue
from dora.ops.cli import completion
from dora.system.environment import taken
from dora.system.secret_file import read_token

if TYPE_CHECKING:
    from dora.config import WindowSize

AddressOption = Annotated[
    str, typer.Option("--address", "-a", metavar="HOST:PORT", envvar="DORA_ADDRESS", help="Address of the service.")
]


_FILES: Final[dict[str, Path]] = {}  # of the tokens that this process has read from one


def source_of(token: str) -> str | Path:
    """Returns the file from which a token was read, for clients that read it again; else the token itself."""
    return _FILES.get(token, token)


def passed_token(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Returns the token of ``--token-file`` or DORA_TOKEN. A token is no argument: every user can read arguments. This
    process shows it to no other one of its user.
    """
    source = context.get_parameter_source(parameter.name or "")
    if not context.resilient_parsing:
        taken("DORA_TOKEN")
    if value is None or source is None or source.name != "COMMANDLINE" or context.resilient_parsing:
        return value
    found = read_token(Path(value))
    _FILES[found] = Path(value)
    return found


def token_option(meaning: str) -> Any:
    """Returns the option of a command that needs a token. ``meaning`` says which token, and the default."""
    return typer.Option(
        "--token-file", metavar="FILE", envvar="DORA_TOKEN", show_envvar=False, callback=passed_token, help=meaning
    )


TokenOption = Annotated[
    str | None,
    token_option(
        "File (mode 0600) with the operator's or owner's token; default: DORA_TOKEN, or what your service on this host "
        "stored."
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


def check_no_secret(settings: Iterable[str] | None) -> None:
    """Raises InvalidValue if a ``--set`` gives the owner's token, in whatever form."""
    from dora.config import settings_tree

    service = settings_tree(None, settings or ()).get("service")
    if isinstance(service, dict) and "token" in service:
        allowed = "in DORA_TOKEN, --token-file or the configuration file: other users can read arguments"
        raise InvalidValue("service.token", "an argument", allowed)


def window_size(option: str | None) -> "WindowSize | None":
    """Parses ``--window``. Other text is returned unchanged, for the settings to refuse."""
    try:
        return None if option is None else int(option)
    except ValueError:
        return option  # type: ignore[return-value]


def passed_options(context: typer.Context) -> dict[str, Any]:
    """The options given on the command line and their values, in the order of the help; names as text."""
    passed = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[parameter.name or ""]
            passed[parameter.opts[0]] = value if isinstance(value, int | float | list) else str(value)
    return passed


def refuse_options(context: typer.Context, options: Iterable[str], reason: str) -> None:
    """Raises InvalidValue for the first of ``options`` that was given. ``reason`` says why it has no effect."""
    passed = passed_options(context)
    for option in options:
        if option in passed:
            raise InvalidValue(option, passed[option], f"left out {reason}")
