"""``dora token``"""

import sys
from typing import Annotated

import typer

from dora.cli.options import AddressOption, JsonOption, TokenOption
from dora.cli.output import print_json
from dora.cli.token import DEFAULT_ADDRESS, WHERE, find_token
from dora.errors import MISSING, InvalidValue, one_of

EXAMPLE = "dora token trainer"


def token(
    role: Annotated[str, typer.Argument(help="trainer, submitter, operator, worker, host or owner.")] = "owner",
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the token of a role, derived from the owner's token."""
    from dora.rpc.errors import Unauthenticated
    from dora.rpc.roles import Role, Tokens

    if role not in list(Role):
        raise InvalidValue("ROLE", role, one_of(role, list(Role)))
    owner = token or find_token(address)
    if not owner:
        raise Unauthenticated("token", MISSING, f"the owner's: {WHERE}")
    found = Tokens(owner).of[Role(role)]
    if as_json:
        print_json({"role": role, "token": found})
    else:
        sys.stdout.write(found + "\n")
