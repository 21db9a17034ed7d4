"""``dora token``"""

import asyncio
import sys
from typing import Annotated

import typer

from dora.errors import MISSING, InvalidValue, one_of
from dora.ops.cli.options import AddressOption, JsonOption, TokenOption
from dora.ops.cli.output import print_json
from dora.ops.stored_token import DEFAULT_ADDRESS, WHERE, find_token

EXAMPLE = "dora token trainer"


def token(
    role: Annotated[
        str, typer.Argument(help="trainer, submitter, operator, worker, host, environment, session, metrics or owner.")
    ] = "owner",
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    call: Annotated[
        str,
        typer.Option(
            metavar="SERVICE/METHOD",
            help="Print the header of one call instead, for clients such as grpcurl: a proof of the token, valid once, "
            "for 30 s.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print the token of a role, derived from the owner's token."""
    from dora.rpc.errors import Unauthenticated
    from dora.rpc.roles import Role, ServiceTokens

    if role not in list(Role):
        raise InvalidValue("ROLE", role, one_of(role, list(Role)))
    owner = token or find_token(address)
    if not owner:
        raise Unauthenticated("token", MISSING, f"the owner's: {WHERE}")
    found = ServiceTokens(owner).of[Role(role)]
    if call:
        name, value = asyncio.run(header_of(address, found, f"/{call.strip('/')}"))
        if as_json:
            print_json({name: value})
        else:
            sys.stdout.write(f"{name}: {value}\n")
        return
    if as_json:
        print_json({"role": role, "token": found})
    else:
        sys.stdout.write(found + "\n")


async def header_of(address: str, token: str, method: str) -> tuple[str, str]:
    """Returns a call's metadata. Raises InvalidValue for an unguarded method, Unauthenticated, ServiceUnavailable."""
    import grpc

    from dora.rpc.access import name_of
    from dora.rpc.errors import from_rpc_error
    from dora.rpc.proven import proven_channel

    if not name_of(method):
        raise InvalidValue("--call", method.strip("/"), "a method such as dora.v1.Prompts/Submit")
    async with proven_channel(address, token) as channel:
        try:
            ((name, value),) = (await channel.credential(method)).metadata
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return name, value
