"""``dora cluster`` on Kubernetes: its manifests, a run in the pods that they describe, and a real API server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dora.cluster.kubernetes import KubernetesTable
from tests.clusters import kubernetes_api
from tests.clusters.fetch import SCHEMAS
from tests.clusters.kubernetes_api import ApiServer
from tests.clusters.pods import BWRAP
from tests.snippets import ROOT

POD_USER: Final = 10001
RUN: Final = """
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
# The API server of the tests is of 1.20, before these.
OLD: Final = {
    "claim.yaml": """
        apiVersion: apps/v1
        kind: StatefulSet
        metadata: {name: service}
        spec:
          volumeClaimTemplates:
            - metadata: {name: state}
              spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
    """,
    **{
        f"{name}.yaml": f"""
        apiVersion: policy/v1
        kind: PodDisruptionBudget
        metadata: {{name: {name}}}
        $patch: delete
    """
        for name in ("host", "front")
    },
}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on the PATH")


def dora(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dora", "cluster", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def planned(folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "run.toml").write_text(text)
    done = dora("up", "--dry-run", "--file", str(folder / "run.toml"))
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def printed_lines() -> tuple[str, list[str]]:
    """The table and the commands of the section "On Kubernetes"."""
    section = (ROOT / "docs" / "clusters.md").read_text().partition("## On Kubernetes\n")[2].partition("\n## ")[0]
    table = section.partition("```toml\n")[2].partition("```")[0]
    return table, [line.strip() for line in section.splitlines() if line.startswith("    ")]


# --------------------------------------------------------------------------------------------------------- manifests


@needs_kubectl
def test_the_pages_table_makes_manifests(tmp_path: Path) -> None:
    found = {(each["kind"], each["metadata"]["name"]): each for each in planned(tmp_path, printed_lines()[0])}
    assert found["StatefulSet", "dora-host"]["spec"]["replicas"] == 4


def test_the_readme_describes_every_setting() -> None:
    text = (ROOT / "deploy" / "README.md").read_text()
    for name, field in KubernetesTable.model_fields.items():
        assert f"| `{name}` |" in text and f"| {field.description} |" in text, name


@needs_kubectl
def test_every_pod_has_no_rights_and_knows_its_service(tmp_path: Path) -> None:
    objects = planned(tmp_path, f'{RUN}environment = "guessing:Guess"\nenvironments = 3\nname = "exp2"\n')
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    pods = {
        name: each["spec"]["template"]["spec"]
        for (kind, name), each in found.items()
        if "template" in each.get("spec", {})
    }
    assert sorted(pods) == ["exp2-environment", "exp2-front", "exp2-host", "exp2-service"]
    for pod in pods.values():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert {"name": "DORA_ADDRESS", "value": "exp2-service:7070"} in container["env"]
        assert container["image"] == "registry.example:5000/team/dora:0.1"
        (tokens,) = (each["secret"] for each in pod["volumes"] if each["name"] == "tokens")
        assert tokens["secretName"] == "exp2-tokens"
        owner = {"key": "owner", "path": "owner"} in tokens["items"]
        assert owner == ("--token-file=/run/dora/owner" in container["args"])
    host = pods["exp2-host"]
    assert (
        host["terminationGracePeriodSeconds"] == 120
        and {"name": "DRAIN_S", "value": "90"} in host["containers"][0]["env"]
    )
    assert found["StatefulSet", "exp2-host"]["spec"]["replicas"] == 2
    (rule,) = (each for each in found["Role", "exp2-scaler"]["rules"] if "update" in each["verbs"])
    assert rule["resources"] == ["statefulsets/scale"] and rule["resourceNames"] == ["exp2-host"]
    values = found["Secret", "exp2-tokens"]["stringData"]
    assert len(set(values.values())) == len(values) == 7


@needs_kubectl
def test_a_name_is_text_also_if_yaml_has_another_meaning_for_it(tmp_path: Path) -> None:
    for name in ("null", "true", "y"):
        objects = planned(tmp_path, f'{RUN}name = "{name}"\nnodes_per_host = 2\n')
        assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects} == {name}


@needs_kubectl
@pytest.mark.parametrize(("resource", "device"), [("nvidia.com/gpu", ["--device=cuda"]), ("cpu", [])])
def test_a_host_that_asks_for_gpus_does_not_run_without_them(resource: str, device: list[str], tmp_path: Path) -> None:
    found = planned(tmp_path, RUN.replace('host = { memory = "2Gi" }', f'host = {{ "{resource}" = "8" }}'))
    (host,) = (each for each in found if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "dora-host")
    (container,) = host["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"][resource] == "8"
    assert [each for each in container["args"] if "device" in each] == device


@needs_kubectl
def test_groups_certificates_and_patches(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(
        "kind: StatefulSet\napiVersion: apps/v1\nmetadata: {name: host}\n"
        "spec: {template: {spec: {nodeSelector: {gpu: h200}}}}\n"
    )
    text = f'{RUN}nodes_per_host = 4\ntls = true\nmonitoring = true\npatches = ["nodes.yaml"]\n'
    found = {(each["kind"], each["metadata"]["name"]): each for each in planned(tmp_path, text)}
    assert ("StatefulSet", "dora-host") not in found
    group = found["LeaderWorkerSet", "dora-host"]["spec"]
    template = group["leaderWorkerTemplate"]["workerTemplate"]
    assert group["replicas"] == 2 and group["leaderWorkerTemplate"]["size"] == 4
    assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == "dora"
    assert template["spec"]["nodeSelector"] == {"gpu": "h200"} and template["spec"]["serviceAccountName"] == "dora-pod"
    names = {each["name"]: each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each}
    assert names == {"tokens": "dora-tokens", "tls": "dora-tls-host", "tls-operator": "dora-tls-operator"}
    assert {"name": "DORA_ADDRESS", "value": "dora-service:7070"} in template["spec"]["containers"][0]["env"]
    assert found["PodMonitor", "dora-dora"]["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/instance": "dora"}
    (rule,) = (each for each in found["Role", "dora-scaler"]["rules"] if "update" in each["verbs"])
    assert rule["resources"] == ["leaderworkersets/scale"] and rule["resourceNames"] == ["dora-host"]


@needs_kubectl
def test_the_manifests_fit_the_published_schemas(tmp_path: Path) -> None:
    if not (SCHEMAS / "kubernetes_validate").is_dir():
        pytest.skip("there are no schemas: `make slurm` fetches them")
    planned(tmp_path, f"{RUN}tls = true\n")
    program = (
        "import sys, yaml, kubernetes_validate\n"
        "for each in yaml.safe_load_all(sys.stdin):\n"
        "    kubernetes_validate.validate(each, sys.argv[1], strict=True)\n"
    )
    for version in ("1.30", "1.37"):
        environment = {**os.environ, "PYTHONPATH": str(SCHEMAS)}
        printed = dora("up", "--dry-run", "--file", str(tmp_path / "run.toml")).stdout
        command = [sys.executable, "-c", program, version]
        done = subprocess.run(command, input=printed, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("", "kubernetes.image"),
        ('image = "a b"', "kubernetes.image"),
        ('image = "a"\nname = "Big"', "kubernetes.name"),
        ('image = "a"\nenvironments = 2', "kubernetes.environment"),
        ('image = "a"\nstorage = "much"', "kubernetes.storage"),
        ('image = "a"\nhost = { cpu = 4 }', "kubernetes.host"),
        ('image = "a"\npatches = ["absent.yaml"]', "kubernetes.patches"),
        ('image = "a"\n[service]\ntoken = "0123456789abcdef0123456789abcdef"', "service.token"),
        ('image = "a"', "kubectl"),
    ],
)
def test_a_wrong_table_is_refused_by_name(lines: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[kubernetes]\n{lines}\n")
    done = dora(
        "up", "--dry-run", "--file", str(tmp_path / "run.toml"), environment={"PATH": "", "HOME": str(tmp_path)}
    )
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr


@needs_kubectl
def test_a_file_that_is_no_patch_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[kubernetes]\nimage = "a"\npatches = ["run.toml"]\n')
    done = dora("up", "--dry-run", "--file", str(tmp_path / "run.toml"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "files of kubernetes.patches" in done.stderr and "run.go" not in done.stderr


# ---------------------------------------------------------------------------------------------------------------- pods


@needs_kubectl
@pytest.mark.skipif(
    not BWRAP.is_file(), reason="there is no bubblewrap: `make slurm` fetches it from Debian's packages"
)
@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace and another user need root")
def test_a_run_in_pods_outlives_the_loss_of_a_host_and_of_the_service(tmp_path: Path, tiny_dense: Path) -> None:
    """Each group comes once, although a host's pod and the service's are deleted and come again."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump_all(planned(tmp_path, RUN)))
    command = ["unshare", "--net", sys.executable, "-m", "tests.clusters.pods_run", str(tmp_path), str(tiny_dense)]
    before = of_pods()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not of_pods() - before, "no pod outlives its node"
    seen = json.loads(done.stdout)
    names = [name for step in seen["groups"] for name in step]
    assert len(names) == len(set(names)) == 12, "each group comes once"
    assert seen["staleness"][-1] <= 1 and seen["versions_of_one"] == 1 and seen["lost"] == [0, 0]
    assert seen["asked"][-2:] == [200, 200], "an agent's session went on"
    assert not seen["host"]["killed"] and "is draining" in seen["host"]["prestop_said"], seen["host"]
    assert not seen["service"]["killed"] and set(seen["restarts"].values()) == {0}, seen
    assert not seen["shows_token"], "a pod's log can be read by those who may not read Secrets"
    found = seen["container"]
    assert found["uid"] == f"{POD_USER}" and int(found["capabilities"], 16) == 0 and found["no_new_privileges"] == "1"
    assert found["root"] == "ro" and "size=1048576k" in found["shm"]


def of_pods() -> set[str]:
    """The processes of the user of pods."""
    return {each.name for each in Path("/proc").glob("[0-9]*") if each.exists() and each.stat().st_uid == POD_USER}


# ---------------------------------------------------------------------------------------------------------- API server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not kubernetes_api.is_there():
        pytest.skip("there is no API server: `make kubernetes` builds it from Debian's sources")
    with ApiServer(tmp_path_factory.mktemp("kubernetes") / "api") as started:
        yield started


class Run:
    """A run of its own namespace."""

    def __init__(self, server: ApiServer, folder: Path, namespace: str, more: str = "") -> None:
        self.server, self.namespace, self.file = server, namespace, folder / "run.toml"
        self.text = f'[kubernetes]\nimage = "dora:test"\npatches = {json.dumps(list(OLD))}\n'
        for name, text in OLD.items():
            (folder / name).write_text(text)
        self.change(more)

    def change(self, more: str) -> None:
        self.file.write_text(f'{self.text}namespace = "{self.namespace}"\n{more}\n')

    def dora(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return dora(*arguments, "--file", str(self.file), environment=self.server.environment)

    def parts(self, done: subprocess.CompletedProcess[str]) -> list[str]:
        assert done.returncode == 0, done.stderr
        return [job["part"] for job in json.loads(done.stdout)]

    def left(self) -> list[str]:
        kinds = "all,configmaps,secrets,persistentvolumeclaims,roles,rolebindings,serviceaccounts"
        return self.server.names(kinds, self.namespace)


@pytest.mark.full
@needs_kubectl
def test_a_real_api_server_starts_scales_and_ends_a_run(server: ApiServer, tmp_path: Path) -> None:
    server.kubectl("create", "namespace", "life")
    run = Run(server, tmp_path, "life", "hosts = 2\nfronts = 1")
    early = run.dora("scale", "4")
    assert early.returncode == 2 and "dora cluster up" in early.stderr and len(early.stderr.splitlines()) == 1
    assert run.parts(run.dora("up", "--json")) == ["service", "front", "host", "host"]
    again = run.dora("up")
    assert again.returncode == 2 and "dora-service-0" in again.stderr, "one state has one service"
    assert run.parts(run.dora("scale", "4", "--json")).count("host") == 4
    server.kubectl("create", "rolebinding", "test", "--role=dora-scaler", "--group=scalers", "--namespace=life")
    run.change("context = 'scaler'")
    assert run.parts(run.dora("scale", "1", "--json")).count("host") == 1, "the Role suffices"
    refused = run.dora("down")
    assert refused.returncode == 2 and "orbidden" in refused.stderr and len(refused.stderr.splitlines()) == 1
    run.change("")
    tokens = server.kubectl("get", "secret", "dora-tokens", "--namespace=life", "--output=jsonpath={.data}")
    assert run.dora("down").returncode == 0
    assert run.left() == ["persistentvolumeclaim/state-dora-service-0", "secret/dora-tokens"]
    assert run.parts(run.dora("up", "--hosts", "0", "--json")) == ["service"]
    assert server.kubectl("get", "secret", "dora-tokens", "--namespace=life", "--output=jsonpath={.data}") == tokens
    assert run.dora("down").returncode == 0


@pytest.mark.full
@needs_kubectl
def test_the_pages_lines_work_as_printed(server: ApiServer, tmp_path: Path) -> None:
    """From nothing to a run; the table has patches for the old API server beside it."""
    table, commands = printed_lines()
    assert len(commands) <= 10
    for name, text in OLD.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "run.toml").write_text(f"{table}patches = {json.dumps(list(OLD))}\n")
    environment = {**server.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "\n".join(["set -e", *commands, "echo token ${#DORA_TOKEN}"])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dora-service-0") == 3 and "dora-host-7" in done.stdout and "token 32" in done.stdout
    assert server.names("pods") == []


@pytest.mark.full
@needs_kubectl
def test_a_real_api_server_refuses_and_nothing_stays(server: ApiServer, tmp_path: Path) -> None:
    server.kubectl("create", "namespace", "small")
    server.kubectl("create", "quota", "pods", "--hard=pods=2", "--namespace=small")
    run = Run(server, tmp_path, "small", "hosts = 2")
    for more, namespace, named in (
        ("hosts = 2", "small", "exceeded quota"),
        ("", "nowhere", "kubectl create namespace"),
        ("context = 'reader'", "small", "ask for the role"),
        ("context = 'nobody'", "small", "kubectl config get-contexts"),
    ):
        run.namespace = namespace
        run.change(more)
        done = run.dora("up")
        assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    run.namespace = "small"
    run.change("")
    assert run.left() == []
    assert run.parts(run.dora("up", "--json")) == ["service", "host"]
    more = run.dora("scale", "2")
    assert more.returncode == 2 and "exceeded quota" in more.stderr
    assert run.parts(run.dora("status", "--json")) == ["service", "host"], "the number is the earlier one again"
    assert run.dora("down").returncode == 0
