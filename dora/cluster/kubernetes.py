"""Kubernetes: the objects of ``deploy/kubernetes`` with the values of the table [kubernetes], through kubectl.

A StatefulSet for the service with a volume for its state, one for hosts (a LeaderWorkerSet if a host is a group of
nodes), Deployments for fronts and environments. A host's pod that must go is drained by its preStop command. ``want``
changes the number of hosts through the scale subresource: Kubernetes gives back the highest numbers first.
"""

import contextlib
import json
import re
import secrets
import shutil
import tempfile
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from dora.cluster.adapter import Job
from dora.cluster.commands import called
from dora.cluster.rendering import TEMPLATES, rendered
from dora.cluster.run_file import RunFile
from dora.cluster.starting import check_new, check_started
from dora.config.reading import KUBERNETES
from dora.config.section import Section
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.rpc.roles import Role, TokenGeneration

TABLE: Final = KUBERNETES
PART: Final = "app.kubernetes.io/component"
INSTANCE: Final = "app.kubernetes.io/instance"
LEADER_WORKER: Final = "leaderworkersets.leaderworkerset.x-k8s.io"
KINDS: Final = (  # those of deploy/kubernetes/base, in the order of their end
    *("deployments.apps", "statefulsets.apps", "services", "configmaps", "poddisruptionbudgets.policy"),
    *("rolebindings.rbac.authorization.k8s.io", "roles.rbac.authorization.k8s.io", "serviceaccounts"),
)
ARGUMENTS: Final = "/spec/template/spec/containers/0/args"
CLAIM: Final = "/spec/volumeClaimTemplates/0/spec"
ENDING_S: Final = 30  # of a host's grace period, after its drain
BEGINS_S: Final = 30.0  # the controllers create pods in this time, or say why not
POLL_S: Final = 0.5
SAID_MAX: Final = 400  # characters of kubectl's
NOTHING: Final[Mapping[str, Any]] = {}
ROLES: Final = (Role.OWNER, Role.TRAINER, Role.HOST, Role.OPERATOR, Role.ENVIRONMENT, Role.METRICS)
FRONT_KEY: Final = "front"
LOGGED: Final = re.compile(r'^[EF]\d{4} .*?] "command failed" err=')  # before a reason
GPUS: Final = "nvidia.com/"  # the resources of NVIDIA's device plugin: whole GPUs and parts of them
SIZE: Final = r"^\d+[KMGTP]i?$"
# What kubectl says, and what to do about it.
ADVICE: Final = (
    ("exceeded quota", "what the namespace's quota allows: raise it, or ask for less"),
    ("orbidden", "something that you may do here: ask for the role `edit` in the namespace"),
    ("namespaces ", "in a namespace that exists: `kubectl create namespace`, or kubernetes.namespace"),
    ("no matches for kind", "of kinds that the cluster knows: install their controller, or change the table"),
    ("nauthorized", "with valid credentials: `kubectl config get-contexts`, or kubernetes.context"),
    ("patch-", "with kustomize patches in the files of kubernetes.patches"),
    ("context", "with a context of the kubeconfig: `kubectl config get-contexts`, or kubernetes.context"),
    ("refused", "with a cluster that answers: `kubectl config get-contexts`, or kubernetes.context"),
)


class KubernetesTable(Section):
    image: str = Field(pattern=r"^\S+$", description="made from deploy/Containerfile, with your code if it needs any")
    name: str = Field("dora", pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", description="another one is another run")
    namespace: str = Field("", description="empty: the context's")
    context: str = Field("", description="of the kubeconfig; empty: the current one")
    hosts: int = Field(1, ge=0, le=4096, description="host pods at the start")
    workers: int = Field(-1, ge=-1, le=256, description="of each host; -1: as the service's own host")
    fronts: int = Field(0, ge=0, le=256, description="pods that serve agents over HTTP")
    environments: int = Field(0, ge=0, le=4096, description="pods that drive the sessions of `environment`")
    environment: str = Field("", description="as of dora environment; code in the image or the data volume")
    data: str = Field("", description="claim of a volume with models, prompts and code: pods read it at /data")
    storage: str = Field("20Gi", pattern=SIZE, description="size of the state's volume")
    storage_class: str = Field("", description="of the state's volume, with locks and fsync; empty: the default")
    service: dict[str, str] = Field({}, description='its resources, such as { cpu = "4", memory = "16Gi" }')
    host: dict[str, str] = Field({}, description='resources of each host, such as { "nvidia.com/gpu" = "8" }')
    service_shm: str = Field("4Gi", pattern=SIZE, description="its shared memory, a part of its memory")
    host_shm: str = Field("32Gi", pattern=SIZE, description="shared memory of each host, a part of its memory")
    drain_s: int = Field(90, ge=1, le=3600, description="time in which a host that must go moves its requests")
    nodes_per_host: int = Field(1, ge=1, le=64, description="above 1: hosts are groups of a LeaderWorkerSet")
    tls: bool = Field(False, description="with certificates of the Secrets dora-tls-service, -host, -operator, ...")
    monitoring: bool = Field(False, description="with a PodMonitor for Prometheus Operator")
    patches: tuple[str, ...] = Field((), description="kustomize patches beside this file, such as node selectors")


class KubernetesCluster:
    def __init__(self, file: RunFile) -> None:
        self._file = file
        self._table = table = validated_as(KubernetesTable, file.table, TABLE)
        if table.environments and not table.environment:
            raise InvalidValue(f"{TABLE}.environment", "", "module:Class, as kubernetes.environments is above 0")
        if file.config.service.token:
            raise InvalidValue("service.token", "of the file", "left out: the run's Secret has it")
        self._selector = f"{INSTANCE}={table.name}"
        self._host = f"{table.name}-host"
        kind = LEADER_WORKER if table.nodes_per_host > 1 else "statefulsets.apps"
        self._hosts = f"{kind}/{self._host}"

    def planned(self) -> Mapping[str, str]:
        with self._overlay(self._table.hosts, _new_tokens()) as folder:
            return {"run.yaml": _called("kustomize", str(folder))}

    def up(self, hosts: int | None) -> list[Job]:
        check_new(self._file, self.jobs())
        wanted = self._table.hosts if hosts is None else hosts
        tokens, claims = self._tokens(), self._names("persistentvolumeclaims")
        with self._overlay(wanted, tokens or _new_tokens()) as folder:
            try:
                known = self._refusals()
                self._kubectl("apply", "--kustomize", str(folder))
                self._await_pods(wanted, known)
            except BaseException:  # also Ctrl-C
                with contextlib.suppress(InvalidValue):  # the first reason is what the user needs
                    self._delete(() if tokens else ("secrets",))
                    for new in set(self._names("persistentvolumeclaims")) - set(claims):
                        self._kubectl("delete", "persistentvolumeclaim", new, "--wait=false")
                raise
        return self.jobs()

    def jobs(self) -> list[Job]:
        found = [_job(each) for each in self._listed("pods")]
        parts = {job.part for job in found}
        for each in self._listed("statefulsets.apps"):
            name, part = each["metadata"]["name"], each["spec"]["template"]["metadata"]["labels"][PART]
            if each["spec"]["replicas"] and part not in parts:  # none could be created
                reasons = [text for (refused, _), text in self._refusals().items() if refused == name]
                found.append(Job(name, part, "pending", "", "".join(reasons[-1:])))
        return sorted(found, key=lambda job: (job.part != "service", job.part, _number(job.name), job.name))

    def want(self, hosts: int) -> list[Job]:
        check_started(self._file, self.jobs())
        before, known = self._kubectl("get", self._hosts, "--output=jsonpath={.spec.replicas}"), self._refusals()
        self._kubectl("scale", self._hosts, f"--replicas={hosts}")
        try:
            self._await_pods(hosts, known)
        except BaseException:
            self._kubectl("scale", self._hosts, f"--replicas={before}")
            raise
        return self.jobs()

    def release(self, host: str) -> None:
        latest = int(self._kubectl("get", self._hosts, "--output=jsonpath={.spec.replicas}")) - 1
        if host != f"{self._host}-{latest}":
            allowed = f"{self._host}-{latest}: Kubernetes gives back the highest number first"
            raise InvalidValue("host", host, allowed if latest >= 0 else "a host of a run that has some")
        self.want(latest)

    def down(self) -> list[str]:
        self._delete()
        ends_s = time.monotonic() + self._table.drain_s + 2 * ENDING_S
        while (left := self._names("pods")) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
        if left:
            self._kubectl("delete", "pods", "--force", "--grace-period=0", "--wait=false", *left)
        return left

    # ------------------------------------------------------------------------------------------------------------ own

    @contextlib.contextmanager
    def _overlay(self, hosts: int, tokens: Mapping[str, str]) -> Iterator[Path]:
        """Yields a folder of kustomize: deploy/kubernetes, the file, the tokens, and the table's values."""
        table = self._table
        image, _, digest = table.image.partition("@")
        name, colon, tag = image.rpartition(":")
        if not colon or "/" in tag:  # a registry's port
            name, tag = image, "latest"
        with tempfile.TemporaryDirectory(prefix="dora-") as temporary:
            folder = Path(temporary)
            (folder / "values").mkdir()
            shutil.copytree(TEMPLATES / "kubernetes", folder / "dora")
            shutil.copyfile(self._file.path, folder / "values" / "run.toml")
            patches = self._patches()
            for number, given in enumerate(table.patches):
                patches.append({"path": f"patch-{number}.yaml"})
                try:
                    shutil.copyfile(self._file.path.parent / given, folder / "values" / f"patch-{number}.yaml")
                except OSError as error:
                    allowed = f"a file beside {self._file.path} ({error.strerror})"
                    raise InvalidValue(f"{TABLE}.patches", given, allowed) from error
            counts = {"host": hosts, "front": table.fronts, "environment": table.environments}
            component = {
                "apiVersion": "kustomize.config.k8s.io/v1alpha1",
                "kind": "Component",
                "generatorOptions": {"disableNameSuffixHash": True},
                "configMapGenerator": [{"name": "run", "files": ["run.toml"]}],
                "replicas": [{"name": name, "count": count} for name, count in counts.items()],
                "patches": patches,
            }
            (folder / "values" / "kustomization.yaml").write_text(json.dumps(component), encoding="utf-8")
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tokens"}, "stringData": {**tokens}}
            (folder / "tokens.yaml").write_text(json.dumps(secret), encoding="utf-8")
            values = {**table.model_dump(), "image": name, "tag": tag, "digest": digest}
            (folder / "kustomization.yaml").write_text(rendered("kubernetes_run.yaml.j2", values), encoding="utf-8")
            yield folder

    def _patches(self) -> list[dict[str, Any]]:
        """Returns the changes of the pods that the table asks for."""
        table = self._table
        found: list[dict[str, Any]] = []

        def add(name: str, kind: str = "StatefulSet|Deployment", pod: Mapping[str, Any] = NOTHING, **own: Any) -> None:
            spec = {**pod, "containers": [{"name": "dora", **own}]}
            whole = {"kind": kind, "metadata": {"name": name}, "spec": {"template": {"spec": spec}}}
            found.append({"target": {"kind": kind, "name": name}, "patch": json.dumps(whole)})

        def change(name: str, *operations: Mapping[str, Any]) -> None:
            found.append({"target": {"kind": "StatefulSet", "name": name}, "patch": json.dumps(operations)})

        def sized(given: Mapping[str, str], shm: str) -> dict[str, Any]:
            pod = {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": shm}}]}
            return {"pod": pod, **({"resources": {"requests": given, "limits": given}} if given else {})}

        add("service", "StatefulSet", **sized(table.service, table.service_shm))
        add("host", "StatefulSet", **sized(table.host, table.host_shm))
        grace = {"terminationGracePeriodSeconds": table.drain_s + ENDING_S}
        add("host", "StatefulSet", grace, env=[{"name": "DRAIN_S", "value": str(table.drain_s)}])
        if table.environment:
            add("environment", env=[{"name": "ENVIRONMENT", "value": table.environment}])
        if table.data:
            claim = {"name": "data", "persistentVolumeClaim": {"claimName": table.data, "readOnly": True}}
            mount = {"name": "data", "mountPath": "/data", "readOnly": True}
            add(".*", pod={"volumes": [claim]}, volumeMounts=[mount])
        change("service", {"op": "replace", "path": f"{CLAIM}/resources/requests/storage", "value": table.storage})
        if table.storage_class:
            change("service", {"op": "add", "path": f"{CLAIM}/storageClassName", "value": table.storage_class})
        if any(resource.startswith(GPUS) for resource in table.host):  # without them it would run on its CPU
            change("host", {"op": "add", "path": f"{ARGUMENTS}/-", "value": "--device=cuda"})
        if table.workers >= 0:
            change("host", {"op": "add", "path": f"{ARGUMENTS}/-", "value": f"--workers={table.workers}"})
        return found

    def _tokens(self) -> dict[str, str]:
        """Returns the tokens of the run's Secret, which an earlier start made; none if there is no such Secret."""
        found = self._kubectl("get", "secret", f"{self._table.name}-tokens", "--ignore-not-found", "--output=json")
        return {key: b64decode(value).decode() for key, value in json.loads(found or "{}").get("data", {}).items()}

    def _await_pods(self, hosts: int, known: Mapping[tuple[str, int], str]) -> None:
        """Returns once the pods exist, or after BEGINS_S. Raises InvalidValue if Kubernetes refuses to create one, and
        this refusal is not ``known``.
        """
        ends_s = time.monotonic() + BEGINS_S
        while time.monotonic() < ends_s:
            for (name, count), text in self._refusals().items():
                if (name, count) not in known:
                    raise _refused(text, name)
            parts = Counter(_job(each).part for each in self._listed("pods"))
            if parts["service"] and parts["host"] >= hosts * self._table.nodes_per_host:
                return
            time.sleep(POLL_S)

    def _refusals(self) -> dict[tuple[str, int], str]:
        """Returns why the run's StatefulSets could not create a pod or a volume, by name and how often."""
        found = json.loads(self._kubectl("get", "events", "--field-selector=reason=FailedCreate", "--output=json"))
        names = [(event["involvedObject"]["name"], event) for event in found["items"]]
        return {
            (name, event.get("count") or 1): event["message"]
            for name, event in names
            if name.startswith(f"{self._table.name}-")
        }

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        return json.loads(self._kubectl("get", kind, f"--selector={self._selector}", "--output=json"))["items"]

    def _names(self, kind: str) -> list[str]:
        return [each["metadata"]["name"] for each in self._listed(kind)]

    def _delete(self, also: Iterable[str] = ()) -> None:
        """Deletes the run's objects, without waiting for their end. Its tokens and its state's volume stay."""
        kinds = [*KINDS, *also]
        if self._table.monitoring:
            kinds.append("podmonitors.monitoring.coreos.com")
        if self._table.nodes_per_host > 1:
            kinds.insert(0, LEADER_WORKER)
        self._kubectl("delete", ",".join(kinds), f"--selector={self._selector}", "--wait=false")

    def _kubectl(self, *arguments: str) -> str:
        table = self._table
        where = [f"--{name}={value}" for name in ("context", "namespace") if (value := getattr(table, name))]
        return _called(*arguments, *where)


def _new_tokens() -> dict[str, str]:
    of = TokenGeneration.following(secrets.token_hex(32)).of
    return {**{str(role): of[role] for role in ROLES}, FRONT_KEY: secrets.token_hex(32)}


def _job(pod: Mapping[str, Any]) -> Job:
    """``state``: the pod's phase, ending, or why its container waits."""
    about, status = pod["metadata"], pod["status"]
    state, reason = status.get("phase", "Pending").lower(), status.get("reason", "")
    for each in (*status.get("conditions", ()), *status.get("containerStatuses", ())):
        waits = each.get("state", {}).get("waiting")
        if waits or (each.get("type") == "PodScheduled" and each["status"] == "False"):
            waits = waits or each
            reason = ": ".join(filter(None, (waits.get("reason"), waits.get("message"))))
    if "deletionTimestamp" in about:
        state = "ending"
    return Job(about["name"], about["labels"].get(PART, ""), state, pod["spec"].get("nodeName", ""), reason)


def _number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else 0


def _refused(said: str, given: str) -> InvalidValue:
    advice = next((advice for mark, advice in ADVICE if mark in said), "what Kubernetes accepts")
    return InvalidValue(TABLE, given, f"{advice} ({said})", why="was refused")


def _called(*arguments: str) -> str:
    """Runs kubectl. Raises InvalidValue with the reason, on one line, if it fails."""
    done = called("kubectl", *arguments, setting=TABLE, which="of 1.27 or newer", answers="the cluster")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "rror" in line] or [done.stderr]
        raise _refused(" ".join(LOGGED.sub("", errors[0]).split())[:SAID_MAX], f"kubectl {arguments[0]}")
    return done.stdout
