"""``dora cluster``"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.ops.cli.control.service import ask
from dora.ops.cli.exits import say
from dora.ops.cli.options import AddressOption, JsonOption, TokenOption
from dora.ops.cli.output import print_result
from dora.ops.stored_token import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from dora.cluster.adapter import Cluster, Job

UP = "dora cluster up --file run.toml --hosts 4"
STATUS = "dora cluster status --file run.toml"
SCALE = "dora cluster scale 8 --file run.toml"
DOWN = "dora cluster down --file run.toml"
FOLLOW = "dora cluster follow --file run.toml --address node7:7070 --token-file token"
FOLLOWED_S = 10.0

FileOption = Annotated[
    Path,
    typer.Option(
        "--file", metavar="FILE", help="The run's configuration, with a table \\[slurm], \\[ray] or \\[kubernetes]."
    ),
]
RayOption = Annotated[bool, typer.Option("--ray", help="On Ray, whatever tables the file has.")]


def up(
    file: FileOption = Path("run.toml"),
    hosts: Annotated[
        int | None, typer.Option(min=0, max=4096, metavar="N", help="Host jobs; default: the table's hosts.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
    on_ray: RayOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start the service and its hosts as jobs. An earlier run's state in the same folder is carried on."""
    cluster = _cluster(file, on_ray)
    if dry_run:
        for name, text in cluster.planned().items():
            typer.echo(f"# {name}\n{text}")
        return
    _shown(cluster.up(hosts), as_json)


def status(file: FileOption = Path("run.toml"), on_ray: RayOption = False, as_json: JsonOption = False) -> None:
    """List the jobs of the run. `dora hosts` shows the hosts that have joined."""
    _shown(_cluster(file, on_ray).jobs(), as_json)


def scale(
    hosts: Annotated[int, typer.Argument(min=0, max=4096, metavar="HOSTS", help="Host jobs.")],
    file: FileOption = Path("run.toml"),
    on_ray: RayOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start further hosts, or release some: their requests move, then their jobs end."""
    _shown(_cluster(file, on_ray).want(hosts), as_json)


def down(file: FileOption = Path("run.toml"), on_ray: RayOption = False) -> None:
    """End all jobs of the run, at once where they have not begun. Its state stays for the next `dora cluster up`."""
    killed = _cluster(file, on_ray).down()
    say("dora: the run has no jobs" + (f"; killed: {', '.join(killed)}" if killed else ""))


def follow(
    file: FileOption = Path("run.toml"),
    on_ray: RayOption = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, then end.")] = False,
) -> None:
    """Ask the scheduler for hosts, and give some back, as the service advises (cluster.autoscale = "act")."""
    import time

    from dora.cluster.following import follow as carry_out
    from dora.rpc.errors import ServiceUnavailable

    cluster = _cluster(file, on_ray)
    while True:
        try:
            for line in carry_out(cluster, ask(address, token, lambda operator: operator.status()).fleet_advice):
                say(f"dora: {line}")
        except ServiceUnavailable:  # it starts, or starts again elsewhere
            if once:
                raise
        if once:
            return
        time.sleep(FOLLOWED_S)


def _cluster(file: Path, on_ray: bool) -> "Cluster":
    from dora.cluster.adapters import cluster_of
    from dora.cluster.run_file import read_run_file
    from dora.config.reading import RAY

    return cluster_of(read_run_file(file, RAY if on_ray else ""))


def _shown(jobs: "Iterable[Job]", as_json: bool) -> None:
    from rich.table import Table

    found = list(jobs)
    table = Table("job", "part", "state", "machine", "reason", box=None)
    for job in found:
        table.add_row(job.name, job.part, job.state, job.machine, job.reason)
    print_result([asdict(job) for job in found], table, as_json)
