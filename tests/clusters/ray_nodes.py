"""A real Ray on this machine: raylets at loopback, each a node with a CPU. Started and lost by lines of JSON.

The module runs in Ray's environment as ``python -m tests.clusters.ray_nodes``; ``Ray`` starts it there.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from tests.clients.environments import python_of
from tests.snippets import ROOT

# Ray sees a node's death within two seconds, not fifteen.
CONFIG: Final = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
NODE: Final = {
    "num_cpus": 1,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "object_store_memory": 80_000_000,
}


class Ray:
    """``environment``: in which Ray's commands, and DORA's, find it."""

    def __init__(self) -> None:
        self.python = python_of("ray")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback instead of this machine's address
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="ray")  # sockets lie in it, whose paths must be short
        self.environment["RAY_TMPDIR"] = self._folder
        self._process = subprocess.Popen(
            [self.python, "-m", "tests.clusters.ray_nodes"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self.environment["RAY_ADDRESS"] = self._answer()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, variables: Mapping[str, str] | None = None, **resources: Any) -> str:
        """Starts a node with these variables. Returns its id."""
        return str(self._call("add", variables or {}, resources))

    def lose(self, node: str) -> None:
        """Kills a node's raylet, as if the machine died."""
        self._call("lose", node)

    def drain(self, node: str, within_s: float) -> None:
        """Gives notice of a node's end."""
        self._call("drain", node, within_s)

    def where(self) -> dict[str, str]:
        """Returns the node of each part of the runs."""
        found: dict[str, str] = self._call("where")
        return found

    def left(self) -> list[str]:
        """Returns the names of actors and placement groups."""
        found: list[str] = self._call("left")
        return found

    def clear(self) -> None:
        """Ends all actors, groups and added nodes, of a test that failed too."""
        self._call("clear")

    def _call(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import PlacementGroup

    answers, sys.stdout = sys.stdout, sys.stderr
    cluster = Cluster(True, head_node_args={**NODE, "num_cpus": 0, "_system_config": CONFIG})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    gcs = ray._raylet.GcsClient(address=cluster.address)
    nodes: dict[str, Any] = {}

    def add(variables: Mapping[str, str], resources: Mapping[str, Any]) -> str:
        before = dict(os.environ)
        os.environ.update(variables)
        node = cluster.add_node(**{**NODE, **resources})
        os.environ.clear()
        os.environ.update(before)
        nodes[node.node_id] = node
        return str(node.node_id)

    def drain(node: str, within_s: float) -> None:
        accepted, why = gcs.drain_node(node, 2, "preempted", int((time.time() + within_s) * 1000))
        assert accepted, why

    def where() -> dict[str, str]:
        table = ray.util.placement_group_table().values()
        return {
            each["name"].rpartition("-")[2]: each["bundles_to_node_id"][0]
            for each in table
            if each["state"] == "CREATED"
        }

    def left() -> list[str]:
        groups = [each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        return [*(each["name"] for each in ray.util.list_named_actors(all_namespaces=True)), *groups]

    def clear() -> None:
        for name in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(**name))
        for group, each in ray.util.placement_group_table().items():
            if each["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))
        while nodes:
            cluster.remove_node(nodes.popitem()[1], allow_graceful=False)

    calls = {"clear": clear, "add": add, "drain": drain, "where": where, "left": left}
    calls["lose"] = lambda node: cluster.remove_node(nodes.pop(node), allow_graceful=False)
    print(json.dumps(cluster.address), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(calls[name](*arguments)), file=answers, flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
