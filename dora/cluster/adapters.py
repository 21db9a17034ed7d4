"""The adapters of schedulers, by the name of their table in a run's file."""

from importlib.metadata import entry_points

from dora.cluster.adapter import Cluster
from dora.cluster.kubernetes import KubernetesCluster
from dora.cluster.ray import Cluster as RayCluster
from dora.cluster.run_file import RunFile
from dora.cluster.slurm import SlurmCluster
from dora.config.reading import CLUSTERS, KUBERNETES, RAY, SLURM


def cluster_of(file: RunFile) -> Cluster:
    if file.scheduler == SLURM:
        return SlurmCluster(file)
    if file.scheduler == RAY:
        return RayCluster(file, detached=True)
    if file.scheduler == KUBERNETES:
        return KubernetesCluster(file)
    (point,) = entry_points(group=CLUSTERS, name=file.scheduler)
    cluster: Cluster = point.load()(file)
    return cluster
