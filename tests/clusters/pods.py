"""Runs pods on this machine as a kubelet would, through bubblewrap: a read-only root, an own user without capabilities,
volumes, limits of memory, variables, probes, preStop, TERM, the grace period, KILL.

A container's root is this machine's, without its files: programs, libraries and DORA. All pods are in one network
namespace, that of this process, each with its address; the names of Services are in their /etc/hosts.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.clusters.fetch import PODS

BWRAP: Final = PODS / "usr/bin/bwrap"
ROOT: Final = Path(__file__).parents[2]
SYSTEM: Final = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/nsswitch.conf")
CODE: Final = (sys.base_prefix, sys.prefix, str(ROOT / "dora"))
MEMORY: Final = Path("/sys/fs/cgroup/memory")  # of cgroup v1; without it memory has no limit
UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
PERIOD_SHARE: Final = 0.1  # of the periods of probes, so that tests are short


@dataclass
class Ending:
    """How a pod ended. ``prestop_code``: None without a command; ``killed``: it outlived its grace period."""

    prestop_code: int | None
    prestop_said: str
    code: int
    killed: bool
    took_s: float


@dataclass
class Pod:
    name: str
    ip: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    folder: Path
    process: asyncio.subprocess.Process | None = None
    pid: int = 0  # of the container's first process, as this namespace sees it
    is_ready: bool = False
    is_ending: bool = False
    restarts: int = 0
    codes: list[int] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def kill(self) -> None:
        """Ends all its processes, with the first one of their namespace. They would outlive bubblewrap, whose wish to
        end with it is void once they are another user's.
        """
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.process.wait()

    @property
    def container(self) -> Mapping[str, Any]:
        (found,) = self.spec["containers"]
        return found

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


class Node:
    """Runs the pods of ``objects``, manifests by kind and name. ``folder`` keeps volumes of claims."""

    def __init__(self, folder: Path, objects: Iterable[Mapping[str, Any]]) -> None:
        self.folder = folder
        self.objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self.pods: dict[str, Pod] = {}
        self._addresses = 10
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")

    async def create(self, kind: str, workload: str, number: int) -> Pod:
        """Starts a pod as the controller of a StatefulSet or Deployment would make it, under the same name."""
        whole = self.objects[kind, workload]["spec"]
        template = whole["template"]
        spec = json.loads(json.dumps(template["spec"]))
        name = f"{workload}-{number}"
        for claim in whole.get("volumeClaimTemplates", ()):
            at = claim["metadata"]["name"]
            spec["volumes"].append({"name": at, "persistentVolumeClaim": {"claimName": f"{at}-{name}"}})
        return await self.run(name, spec, template["metadata"]["labels"])

    async def run(self, name: str, spec: Mapping[str, Any], labels: Mapping[str, str]) -> Pod:
        self._addresses += 1
        folder = self.folder / f"{name}-{self._addresses}"
        folder.mkdir()
        pod = self.pods[name] = Pod(name, f"127.0.9.{self._addresses}", spec, labels, folder)
        self._name_services()
        await self._start(pod)
        pod.tasks.append(asyncio.create_task(self._keep(pod)))
        pod.tasks.append(asyncio.create_task(self._probe(pod)))
        return pod

    async def delete(self, name: str) -> Ending:
        """Ends a pod: preStop, TERM, and KILL once its grace period is over. Both count in it."""
        pod, began_s = self.pods[name], time.monotonic()
        pod.is_ending, pod.is_ready = True, False
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        code, said, killed = None, "", False
        assert pod.process is not None
        if command := pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command"):
            with contextlib.suppress(TimeoutError):
                code, said = await asyncio.wait_for(self._execute(pod, command), grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pod.pid, signal.SIGTERM)
        try:
            left_s = grace_s - (time.monotonic() - began_s)
            await asyncio.wait_for(asyncio.shield(pod.process.wait()), max(2.0, left_s))
        except TimeoutError:
            killed = True
            await pod.kill()
        for task in pod.tasks:
            task.cancel()
        del self.pods[name]
        self._name_services()
        return Ending(code, said, pod.process.returncode or 0, killed, time.monotonic() - began_s)

    def replace_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Changes a Secret, and its files in the pods that mount it."""
        self.objects["Secret", name] = {**self.objects["Secret", name], "stringData": values}
        for pod in self.pods.values():
            for volume in pod.spec["volumes"]:
                if volume.get("secret", {}).get("secretName") == name:
                    self._volume(pod, volume)

    async def until_ready(self, *names: str) -> None:
        while not all(self.pods[name].is_ready for name in names):
            for name in names:
                if self.pods[name].restarts > 3:
                    raise RuntimeError(f"{name} does not start: {self.pods[name].log[-2000:]}")
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------------------------------------------------ containers

    async def _start(self, pod: Pod) -> None:
        variables = self._variables(pod)
        command = [*pod.container.get("command", ["dora"]), *pod.container.get("args", ())]
        expanded = [re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), each) for each in command]
        read_end, write_end = os.pipe()
        with (pod.folder / "log").open("ab") as log:
            pod.process = await asyncio.create_subprocess_exec(
                *(BWRAP, "--info-fd", str(write_end), "--die-with-parent", "--as-pid-1", "--clearenv"),
                *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", pod.name),
                *self._root(pod),
                *(part for name, value in variables.items() for part in ("--setenv", name, value)),
                *self._user(pod),
                *expanded,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                env={},
                preexec_fn=self._limited(pod),
            )
        os.close(write_end)
        with os.fdopen(read_end) as told:
            text = await asyncio.to_thread(told.read)
        pod.pid = json.loads(text)["child-pid"] if text else 0

    def _root(self, pod: Pod) -> list[str]:
        """A root that cannot be written, with the volumes that the container mounts."""
        found = _folders("/etc", "/run", "/home")
        found += [part for place in SYSTEM for part in ("--ro-bind-try", place, place)]
        found += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(self._hosts), "/etc/hosts"]
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        mounts = pod.container.get("volumeMounts", ())
        for mount in sorted(mounts, key=lambda each: each["mountPath"]):
            volume, at = volumes[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = size_of(volume["emptyDir"]["sizeLimit"])
                found += ["--perms", "1777", "--size", str(size), "--tmpfs", at]
                continue
            place = self._volume(pod, volume)
            found += ["--ro-bind" if mount.get("readOnly") else "--bind", str(place), at]
        assert pod.container["securityContext"]["readOnlyRootFilesystem"]
        for place in CODE:  # which may lie in /tmp
            parents = [str(each) for each in reversed(Path(place).parents[:-1])]
            found += [*_folders(*(each for each in parents if each != "/tmp")), "--ro-bind", place, place]
        return [*found, "--remount-ro", "/"]

    def _volume(self, pod: Pod, volume: Mapping[str, Any]) -> Path:
        group = pod.spec["securityContext"]["fsGroup"]
        place = pod.folder / f"volume-{volume['name']}"
        if claim := volume.get("persistentVolumeClaim"):
            place = self.folder / "claims" / claim["claimName"]
        is_new = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        kind, about = next(
            (key, volume[key]) for key in ("secret", "configMap", "emptyDir", "persistentVolumeClaim") if key in volume
        )
        if kind in ("secret", "configMap"):
            source = self.objects[
                "Secret" if kind == "secret" else "ConfigMap", about.get("secretName") or about["name"]
            ]
            project(source, about, place, group)
        elif is_new:
            os.chown(place, 0, group)
            place.chmod(0o2777 if kind == "emptyDir" else 0o2775)
        return place

    def _variables(self, pod: Pod) -> dict[str, str]:
        found = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        fields |= {f"metadata.labels['{name}']": value for name, value in pod.labels.items()}
        for each in pod.container.get("env", ()):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = fields.get(source["fieldRef"]["fieldPath"], "")
            elif reference := source.get("secretKeyRef"):
                found[each["name"]] = self.objects["Secret", reference["name"]]["stringData"][reference["key"]]
            else:
                found[each["name"]] = each.get("value", "")
        return found

    @staticmethod
    def _user(pod: Pod) -> list[str]:
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] and pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        return [
            *("setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"),
            *(f"--groups={context['fsGroup']}", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        ]

    def _limited(self, pod: Pod) -> Any:
        limit = pod.container.get("resources", {}).get("limits", {}).get("memory")
        group = MEMORY / f"dora-test-{os.getpid()}" / pod.folder.name

        def enter() -> None:
            os.setsid()
            if limit and os.access(MEMORY, os.W_OK):
                group.mkdir(parents=True, exist_ok=True)
                (group / "memory.limit_in_bytes").write_text(str(size_of(limit)))
                (group / "cgroup.procs").write_text("0")

        return enter

    async def _execute(self, pod: Pod, command: list[str]) -> tuple[int, str]:
        variables = [f"{name}={value}" for name, value in self._variables(pod).items()]
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--target={pod.pid}", "--mount", "--pid", "--ipc", "--uts", "--root", "--wd"),
            *self._user(pod),
            *("env", "--ignore-environment", *variables, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.environ["PATH"]},
        )
        said, _ = await process.communicate()
        return process.returncode or 0, said.decode(errors="replace")

    async def _keep(self, pod: Pod) -> None:
        """Starts the container again if it ends by itself, later each time."""
        while True:
            assert pod.process is not None
            pod.codes.append(await pod.process.wait())
            pod.is_ready = False
            if pod.is_ending:
                return
            pod.restarts += 1
            await asyncio.sleep(min(10.0, pod.restarts))
            if pod.is_ending:
                return
            await self._start(pod)

    async def _probe(self, pod: Pod) -> None:
        """A container is ready once its probes succeed; it is killed if it is not alive."""
        probes = {name: pod.container.get(f"{name}Probe") for name in ("startup", "liveness", "readiness")}
        started, failures = False, 0
        while not pod.is_ending:
            if not started:
                probe = probes["startup"]
                started = probe is None or await self._answers(pod, probe)
                await asyncio.sleep((probe or {}).get("periodSeconds", 10) * PERIOD_SHARE)
                continue
            pod.is_ready = not pod.is_ending and (
                probes["readiness"] is None or await self._answers(pod, probes["readiness"])
            )
            if alive := probes["liveness"]:
                failures = 0 if await self._answers(pod, alive) else failures + 1
                if failures >= alive.get("failureThreshold", 3) and not pod.is_ending:
                    os.kill(pod.pid, signal.SIGKILL)
                    started, failures, pod.is_ready = False, 0, False
            await asyncio.sleep((probes["readiness"] or {}).get("periodSeconds", 10) * PERIOD_SHARE)

    @staticmethod
    async def _answers(pod: Pod, probe: Mapping[str, Any]) -> bool:
        get = probe.get("httpGet") or {**probe["tcpSocket"], "path": ""}
        ports = {each["name"]: each["containerPort"] for each in pod.container.get("ports", ())}
        url = f"http://{pod.ip}:{ports.get(get['port'], get['port'])}{get['path']}"

        def ask() -> bool:
            try:
                if "httpGet" not in probe:
                    with socket.create_connection((pod.ip, ports[get["port"]]), 1):
                        return True
                with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                    return 200 <= answer.status < 400
            except OSError:
                return False

        return await asyncio.to_thread(ask)

    def _name_services(self) -> None:
        """Names the pods of Services in /etc/hosts; the file stays the same one, which containers have mounted."""
        lines = ["127.0.0.1 localhost"]
        for (kind, name), service in self.objects.items():
            if kind == "Service":
                wanted = service["spec"]["selector"].items()
                lines += [
                    f"{pod.ip} {name}"
                    for pod in self.pods.values()
                    if wanted <= pod.labels.items() and not pod.is_ending
                ]
        self._hosts.write_text("\n".join([*lines, ""]))


@contextlib.asynccontextmanager
async def node(folder: Path, objects: Iterable[Mapping[str, Any]]) -> AsyncIterator[Node]:
    """A node, whose pods end with the block."""
    found = Node(folder, objects)
    try:
        yield found
    finally:
        for pod in found.pods.values():
            pod.is_ending = True
            for task in pod.tasks:
                task.cancel()
            await pod.kill()
        for group in sorted(MEMORY.glob(f"dora-test-{os.getpid()}/*")):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            (MEMORY / f"dora-test-{os.getpid()}").rmdir()


def project(source: Mapping[str, Any], about: Mapping[str, Any], place: Path, group: int) -> None:
    """Writes the files of a Secret or ConfigMap as a kubelet does: of root, for the pod's group, swapped in one act."""
    values = source.get("stringData") or source.get("data") or {}
    items = about.get("items") or [{"key": key, "path": key} for key in values]
    content = place / f"..{time.monotonic_ns()}"
    content.mkdir()
    for item in items:
        file = content / item["path"]
        file.write_text(values[item["key"]])
        os.chown(file, 0, group)
        file.chmod(about.get("defaultMode", 0o644) | 0o040)
        link = place / item["path"]
        if not link.is_symlink():
            link.symlink_to(Path("..data") / item["path"])
    (place / "..new").symlink_to(content.name)
    before = os.readlink(place / "..data") if (place / "..data").is_symlink() else None
    (place / "..new").rename(place / "..data")
    if before:
        shutil.rmtree(place / before)


def _folders(*places: str) -> list[str]:
    """Folders that all may enter: bubblewrap makes private ones by itself."""
    return [part for place in places for part in ("--perms", "0755", "--dir", place)]


def size_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]
