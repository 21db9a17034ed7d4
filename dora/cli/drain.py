"""``dora drain``"""

from typing import Annotated

import typer

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import print_reply
from dora.cli.service import ask

EXAMPLE = "dora drain w1"


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="A worker id of `dora groups`.")],
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker out of service: its requests move elsewhere, then it ends."""
    print_reply(ask(address, token, lambda operator: operator.drain(worker)), as_json)
