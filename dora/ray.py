"""Runs on a Ray cluster from a script of one's own. It needs the extra ``ray``.

with dora.ray.Cluster("run.toml", hosts=3) as cluster:
    with dora.sync.Trainer(cluster.address, token=cluster.token) as trainer:
        ...
"""

from dora.cluster.ray import Cluster

__all__ = ["Cluster"]
