"""``dora cluster`` on Kubernetes: its manifests, and a run in the pods that they describe."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.pods import BWRAP

RUN = """
model = "/data/tiny"
prompts = "tiny"
[window]
size = 2
[rollout]
group_size = 4
max_tokens = 600
ignore_eos = true
[workers]
engine = "fake"
count = 0
slots = 8
kv_tokens = 16384
max_model_len_tokens = 2048
[kv]
pool_mb = 0
[kubernetes]
image = "registry.example:5000/team/dora:0.1"
data = "models"
hosts = 2
workers = 1
fronts = 1
service = { memory = "2Gi" }
service_shm = "1Gi"
host = { memory = "2Gi" }
host_shm = "1Gi"
"""
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on the PATH")


def planned(file: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "dora", "cluster", "up", "--dry-run", "--file", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [each for each in yaml.safe_load_all(printed) if each]


@needs_kubectl
@pytest.mark.skipif(not BWRAP.is_file(), reason="there is no bubblewrap: `make fetched` fetches it")
def test_a_run_in_pods_outlives_the_loss_of_a_host_and_of_the_service(tmp_path: Path, tiny_dense: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump_all(adapted(planned(tmp_path / "run.toml"))))
    command = ["unshare", "--net", sys.executable, "-m", "tests.clusters.pods_run", str(tmp_path), str(tiny_dense)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    names = [name for step in seen["groups"] for name in step]
    assert len(names) == len(set(names)) == 12, "each group comes once"
    assert seen["staleness"][-1] <= 1 and seen["versions_of_one"] == 1 and seen["lost"] == [0, 0]
    assert seen["asked"][-2:] == [200, 8]
    for ended in (seen["host"], seen["service"]):
        assert not ended["killed"] and ended["prestop_code"] in (0, None), ended
    assert seen["host"]["prestop_code"] == 0, "the host was drained"
    found = seen["container"]
    assert found["uid"] == "10001" and int(found["capabilities"], 16) == 0 and found["no_new_privileges"] == "1"
    assert found["root"] == "ro" and "size=1048576k" in found["shm"]


def adapted(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for each in objects:
        for container in each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            host = each["metadata"]["name"] == "dora-host"
            container["args"] = [a for a in container["args"] if not (host and a.startswith("--metrics"))]
            for action in container.get("lifecycle", {}).values():
                action["exec"]["command"][-1] = action["exec"]["command"][-1].replace(' --within "$DRAIN_S"', "")
            for probe in ("startup", "liveness", "readiness"):
                if host:
                    container.pop(f"{probe}Probe", None)
                elif f"{probe}Probe" in container:
                    get = container[f"{probe}Probe"].pop("httpGet")
                    container[f"{probe}Probe"]["tcpSocket"] = {"port": get["port"]}
    return objects
