"""The adapters of schedulers, by the name of their table in a run's file."""

from importlib.metadata import entry_points
from typing import Final

from dora.cluster.adapter import Cluster
from dora.cluster.run_file import RunFile
from dora.cluster.slurm import SlurmCluster
from dora.errors import InvalidValue

GROUP: Final = "dora.clusters"


def cluster_of(file: RunFile) -> Cluster:
    """Returns the adapter of the scheduler whose table the file has. Raises InvalidValue."""
    if file.scheduler == "slurm":
        return SlurmCluster(file)
    found = {each.name: each for each in entry_points(group=GROUP)}
    if file.scheduler not in found:
        raise InvalidValue("--file", file.scheduler, f"with a table of {', '.join(sorted({'slurm', *found}))}")
    cluster: Cluster = found[file.scheduler].load()(file)
    return cluster
