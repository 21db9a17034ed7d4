"""Follows the service's advice on the number of hosts (``cluster.autoscale = "act"``)."""

from collections.abc import Iterator

from dora.cluster.adapter import HOST, Cluster
from dora.rpc.dora_pb2 import FleetAdvice


def follow(cluster: Cluster, advice: FleetAdvice) -> Iterator[str]:
    """Carries out an advice. Yields what was done, as sentences.

    Hosts that the scheduler has not started yet count as joined. Hosts leave in the order of the advice; one that it
    does not name stays, unless the scheduler alone chooses.
    """
    if not advice.act or advice.hosts_wanted == advice.hosts:
        return
    jobs = [job for job in cluster.jobs() if job.part == HOST]
    if advice.hosts_wanted > advice.hosts:
        if advice.hosts_wanted > len(jobs):
            cluster.want(advice.hosts_wanted)
            yield f"{advice.hosts_wanted - len(jobs)} more hosts are asked for: {advice.reason}"
        return
    by_name = {job.host: job.name for job in jobs if job.host}
    if not by_name:  # the scheduler itself chooses who leaves
        cluster.want(advice.hosts_wanted)
        yield f"{advice.hosts - advice.hosts_wanted} hosts are given back: {advice.reason}"
    for name in advice.leave_first[: advice.hosts - advice.hosts_wanted]:
        if name in by_name:
            cluster.release(by_name[name])
            yield f"host {name} is given back: {advice.reason}"
