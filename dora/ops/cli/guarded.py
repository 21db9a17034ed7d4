"""The TLS options of commands that connect to a service. Given ones stand in place of the variables DORA_TLS..."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from dora.tls.files import FOLDER_VARIABLE, VARIABLES

TlsOption = Annotated[
    str | None,
    typer.Option("--tls", metavar="DIR", help="Folder with ca.pem, and cert.pem and key.pem; default: DORA_TLS."),
]
CertOption = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="This end's certificate; default: cert.pem of --tls.")
]
KeyOption = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its key; default: key.pem of --tls.")]
CaOption = Annotated[
    str | None,
    typer.Option("--tls-ca", metavar="FILE", help="Authorities whose certificates count; default: ca.pem of --tls."),
]
OPTIONS: Final = {"tls": TlsOption, "tls_cert": CertOption, "tls_key": KeyOption, "tls_ca": CaOption}
_VARIABLES: Final = {"tls": FOLDER_VARIABLE, **{f"tls_{part}": name for part, name in VARIABLES.items()}}


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with the TLS options beside its own."""
    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in OPTIONS.items()]

    @functools.wraps(command)
    def with_options(*arguments: Any, **values: Any) -> None:
        with _stated({name: values.pop(name, None) for name in OPTIONS}):
            command(*arguments, **values)

    with_options.__signature__ = signature.replace(  # type: ignore[attr-defined] # read by inspect
        parameters=[*signature.parameters.values(), *added]
    )
    with_options.__annotations__ = {**command.__annotations__, **OPTIONS}
    return with_options


@contextmanager
def _stated(options: dict[str, str | None]) -> Iterator[None]:
    values = {_VARIABLES[name]: value for name, value in options.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
