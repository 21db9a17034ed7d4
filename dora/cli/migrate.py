"""``dora migrate``"""

from typing import Annotated

import typer

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import print_reply
from dora.cli.service import ask

EXAMPLE = "dora migrate g12.0 --to w1"


def migrate(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="A trajectory id of `dora trajectories`.")],
    worker: Annotated[str, typer.Option("--to", metavar="WORKER", help="A worker that hosts the same version.")],
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a running request, with its KV-cache, to another DP group of its version."""
    print_reply(ask(address, token, lambda operator: operator.migrate(request, worker)), as_json)
