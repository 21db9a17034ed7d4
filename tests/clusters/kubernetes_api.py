"""A real API server on this machine: etcd, kube-apiserver and kube-controller-manager, on own ports at loopback.

No kubelet: its pods stay pending, and go at once when they are deleted.
"""

import json
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Final, Self

from tests.clusters.fetch import API
from tests.prometheus.server import free_address

USERS: Final = ("admin", "reader", "scaler")
PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager")


class ApiServer:
    """``kubeconfig``: of three contexts. The admin may do everything, the reader looks, the scaler has what the
    manifests' Role gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = free_address()
        self._daemons: list[subprocess.Popen[bytes]] = []
        tokens = {user: secrets.token_hex(16) for user in USERS}
        groups = {"admin": "system:masters", "reader": "readers", "scaler": "scalers"}
        folder.mkdir(parents=True)
        (folder / "tokens.csv").write_text("".join(f"{tokens[user]},{user},{user},{groups[user]}\n" for user in USERS))
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"server": f"https://{self.address}", "insecure-skip-tls-verify": True}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "admin",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": user, "user": {"token": tokens[user]}} for user in USERS],
                    "contexts": [{"name": user, "context": {"cluster": "test", "user": user}} for user in USERS],
                }
            )
        )
        self.environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(folder)}

    def __enter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        etcd, peer = (f"http://{free_address()}" for _ in range(2))
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self._start(
            *("etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={etcd}", f"--listen-peer-urls={peer}"),
            *(f"--advertise-client-urls={etcd}", f"--initial-advertise-peer-urls={peer}", "--unsafe-no-fsync"),
            f"--initial-cluster=default={peer}",
        )
        self._start(
            *("kube-apiserver", f"--etcd-servers={etcd}", f"--bind-address={host}", f"--secure-port={port}"),
            *(f"--cert-dir={self.folder}/certificates", "--service-cluster-ip-range=10.0.0.0/24"),
            *("--authorization-mode=RBAC", f"--token-auth-file={self.folder}/tokens.csv"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            "--service-account-issuer=https://test",
        )
        while subprocess.run(["kubectl", "get", "--raw=/readyz"], env=self.environment, capture_output=True).returncode:
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise RuntimeError(f"{daemon.args} has ended: see {self.folder}")
            time.sleep(0.2)
        self._start(
            *("kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0"),
            *(f"--service-account-private-key-file={key}", "--secure-port=0"),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)

    def kubectl(self, *arguments: str, given: str = "") -> str:
        command = ["kubectl", *arguments]
        return subprocess.run(
            command, env=self.environment, input=given, capture_output=True, text=True, check=True
        ).stdout

    def names(self, kinds: str, namespace: str = "default") -> list[str]:
        listed = self.kubectl("get", kinds, f"--namespace={namespace}", "--output=name")
        return sorted(line for line in listed.split() if "dora" in line)

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen([API / program, *arguments], env=self.environment, stdout=log, stderr=log)
            )


def is_there() -> bool:
    return all((API / program).is_file() for program in PROGRAMS)
