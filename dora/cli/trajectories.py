"""``dora trajectories``"""

from enum import StrEnum
from typing import Annotated

import typer

from dora.cli.options import DEFAULT_ADDRESS, AddressOption, JsonOption, TokenOption
from dora.cli.output import plain, print_json, stdout
from dora.cli.service import ask
from dora.cli.tables import trajectories_table

EXAMPLE = "dora trajectories --state running --limit 20"


class TrajectoryState(StrEnum):
    """The states that the service knows."""

    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    LEASED = "leased"


def trajectories(
    state: Annotated[TrajectoryState | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 100,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the trajectories that are not committed yet, with the request ids that `dora migrate` takes."""
    wanted = state.value if state is not None else ""
    answer = ask(address, token, lambda operator: operator.trajectories(wanted, limit))
    if as_json:
        print_json(plain(answer))
    else:
        stdout().print(trajectories_table(answer.trajectories, answer.total))
