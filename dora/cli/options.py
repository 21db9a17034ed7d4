"""Options that several commands share."""

from typing import Annotated

import typer

AddressOption = Annotated[
    str, typer.Option("--address", "-a", metavar="HOST:PORT", envvar="DORA_ADDRESS", help="Where the service listens.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="DORA_TOKEN",
        show_envvar=True,
        help="The service's secret; by default that which a service of yours on this host left.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]

DEFAULT_ADDRESS = "127.0.0.1:7070"
