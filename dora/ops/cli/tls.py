"""``dora tls make``"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from dora.errors import InvalidValue
from dora.ops.cli.exits import say
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_json

EXAMPLE = "dora tls make certificates --hosts gpu-1,gpu-2,10.0.0.5"
DAYS = 90.0
AUTHORITY_DAYS = 3650.0


def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority and its certificates.")],
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            metavar="NAME,...",
            help="Host names and addresses of the cluster's machines, each of which gets a certificate; the service's "
            "names all of them.",
        ),
    ] = "",
    days: Annotated[float, typer.Option(min=0.01, metavar="DAYS", help="How long certificates are valid.")] = DAYS,
    new_authority: Annotated[
        bool,
        typer.Option(
            "--new-authority", metavar="", help="Make another authority. Certificates of both are accepted afterwards."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make or renew the certificates of a private cluster: of its service, its machines, and each role.

    Each folder in DIR is for --tls of one process. Run the command again before the certificates end: services,
    workers and clients read the files again when they change. Keep DIR/authority/ca.key off the cluster.
    """
    from dora.rpc.roles import Role
    from dora.tls.authority import make_cluster

    names = [each.strip() for each in hosts.split(",") if each.strip()]
    try:
        made = make_cluster(
            folder,
            names,
            [str(role) for role in Role if role is not Role.HOST],
            days=days,
            authority_days=max(AUTHORITY_DAYS, days),
            new_authority=new_authority,
            now=datetime.now(UTC),
        )
    except OSError as error:
        raise InvalidValue("DIR", str(folder), f"a folder to write in ({error.strerror})") from error
    if as_json:
        print_json({"folders": [str(each) for each in made]})
    else:
        for each in made:
            say(f"dora: wrote {each}")
