"""A run on a cluster, by the commands that its user would type."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dora
from dora.client import Operator
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError
from tests.prometheus.server import free_address

GROUPS = 3  # of a step


class Run:
    """``shared``: its folder; ``record``: that of a run with real engines. Each command runs with ``python`` in
    ``environment``.
    """

    def __init__(
        self,
        scheduler: str,
        python: str | Path,
        environment: Mapping[str, str],
        at: Path,
        model: Path,
        engine: str = "fake",
        **table: Any,
    ) -> None:
        at.mkdir(exist_ok=True)
        self.file, self.shared, self.address = at / "run.toml", at / "shared", free_address()
        self._python, self._environment = python, environment
        is_real = engine == "vllm"
        self.record = at / "record" if is_real else ""
        self._own = set() if is_real else {"local"}  # hosts with workers, beside those that join
        self._start_s = 600.0 if is_real else 150.0  # engines share two cores
        port = int(self.address.rpartition(":")[2])
        values = {"folder": str(self.shared), "hosts": 1, "workers": 1, "port": port, **table}
        lines = "\n".join(f"{name} = {toml_of(value)}" for name, value in values.items())
        self.file.write_text(f"""
            model = "{model}"
            prompts = "tiny"
            record = "{self.record}"
            [window]
            size = 2
            [rollout]
            group_size = 4
            max_tokens = {100 if is_real else 600}
            ignore_eos = true
            [workers]
            engine = "{engine}"
            count = {len(self._own)}
            slots = 8
            kv_tokens = 16384
            max_model_len_tokens = {512 if is_real else 2048}
            [kv]
            pool_mb = 0
            [{scheduler}]
            {lines}
        """)

    def dora(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.called("cluster", *arguments, "--file", str(self.file))

    def called(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self._python, "-m", "dora", *arguments]
        return subprocess.run(
            command, cwd=self.file.parent, env=self._environment, capture_output=True, text=True, check=False
        )

    def jobs(self, part: str = "") -> list[dict[str, str]]:
        found = json.loads(self.dora("status", "--json").stdout)
        return [job for job in found if part in ("", job["part"])]

    async def until_hosts(self, *names: str) -> None:
        """Returns once exactly these hosts are ready, beside the service's own if that has workers."""
        token = (self.shared / "token").read_text()
        async with asyncio.timeout(self._start_s):
            while True:
                try:
                    async with Operator(self.address, token) as operator:
                        found = (await operator.status()).hosts
                    if {each.name for each in found if each.workers_ready} == {*self._own, *names}:
                        return
                except DoraError:
                    pass
                await asyncio.sleep(0.5)

    async def trained(self, model: Path, happenings: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Trains a step for each happening, which comes before the step's commit, and one more. Checks that each group
        came once and is of one version within the window.
        """
        taken: list[TrajectoryGroup] = []
        token = (self.shared / "token").read_text()
        patience = {"connect_s": self._start_s, "reconnect_s": self._start_s}
        async with dora.Trainer(self.address, token=token, **patience) as trainer:
            left = list(happenings)
            async for step in trainer.steps(groups=GROUPS):
                taken += [group async for group in step]
                is_last = not left
                if left:
                    await left.pop(0)()
                await step.commit(weights=model, wait=True)
                if is_last:
                    break
        assert len({group.group_id for group in taken}) == len(taken) == GROUPS * (len(happenings) + 1)
        for group in taken:
            assert set(group.staleness.tolist()) <= {0, 1} and len(set(group.versions)) == 1

    def check_record(self) -> None:
        """Of a run with real engines: each logprob is that of its version's weights."""
        if self.record:
            verified = self.called("verify", str(self.record))
            assert verified.returncode == 0, verified.stdout + verified.stderr


def toml_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}" = {toml_of(each)}' for name, each in value.items()) + "}"
    return json.dumps(value)
