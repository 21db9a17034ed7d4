"""``dora watch``"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import typer
from rich.live import Live

from dora.cli.narration import Narrator
from dora.cli.options import DEFAULT_ADDRESS, AddressOption, TokenOption
from dora.cli.output import plain, stdout
from dora.cli.service import ask
from dora.cli.view import service_view
from dora.client import Operator
from dora.rpc.dora_pb2 import Status

EXAMPLE = "dora watch --period-ms 500"


def watch(
    period_ms: Annotated[int, typer.Option(min=50, max=60_000, help="Time between two updates.")] = 500,
    updates: Annotated[int, typer.Option(min=0, help="End after so many updates; 0: when the service ends.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document a line, one an update.")] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
) -> None:
    """Watch a service live; where stdout is no terminal, one line for each event worth telling."""

    async def follow(operator: Operator) -> None:
        statuses = _first(operator.watch(period_ms), updates)
        if as_json:
            await _print_lines(statuses)
        elif sys.stdout.isatty():
            await _draw(statuses, address)
        else:
            await _narrate(statuses)

    ask(address, token, follow)


async def _first(statuses: AsyncIterator[Status], updates: int) -> AsyncIterator[Status]:
    """The first ``updates`` of ``statuses``; all for 0."""
    seen = 0
    async for status in statuses:
        yield status
        seen += 1
        if seen == updates:
            return


async def _print_lines(statuses: AsyncIterator[Status]) -> None:
    async for status in statuses:
        sys.stdout.write(json.dumps(plain(status)) + "\n")
        sys.stdout.flush()


async def _draw(statuses: AsyncIterator[Status], address: str) -> None:
    with Live(console=stdout(), auto_refresh=False) as live:
        async for status in statuses:
            live.update(service_view(status, f"dora {address}"), refresh=True)


async def _narrate(statuses: AsyncIterator[Status]) -> None:
    narrator = Narrator()
    clock = asyncio.get_running_loop().time
    async for status in statuses:
        for line in narrator.tell(status, clock()):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
