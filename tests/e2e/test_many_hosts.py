"""A run over several hosts, which are network namespaces that the test makes: one is killed, another has a slow link.

Nothing is lost, nothing delivered twice, and every logprob of the record is that of its version's weights. With the
trainer beside the service, and with a host of its own for the service, the trainer and each rollout host.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.data.run_record import TRAJECTORIES_FILE
from dora.ops.verify import verify
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing
from dora.ops.verify.invariants import violations
from tests.e2e.service_host import Weights, farthest_of
from tests.hosts import Hosts, Link, address_of, has_hosts

pytestmark = pytest.mark.skipif(not has_hosts(), reason="no network namespaces and TUN devices for this user")

GROUPS = 4
WINDOW = 2
SLOW = Link(delay_s=0.02, bytes_per_s=1e6)  # a version of the tiny model takes a while over it
FAKE = {
    "workers__engine": "fake",
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 600,
    "kv__timeout_s": 2.0,
}
PYTHON = [sys.executable, "-m"]


class Run:
    """A service on host 0, agents on the ``rollout`` hosts, a trainer on another one, or beside the service."""

    def __init__(self, hosts: Hosts, model: Path, folder: Path, rollout: list[int], **settings: Any) -> None:
        self.hosts, self.model, self.record = hosts, model, folder / "record"
        self._folder = folder
        own = settings["workers__count"]
        fields = {"window__size": WINDOW, "service__listen": f"{address_of(0)}:0", "record": str(self.record)}
        orders = json.dumps({"model": str(model), "settings": {**fields, **settings}, "workers": own + len(rollout)})
        self._service = self._start(0, "service", [*PYTHON, "tests.e2e.rollout_host", orders])
        self.reached = self._said()
        self.agents = {host: self.join(host) for host in rollout}
        assert self._said()["workers"] == own + len(rollout), self.log(rollout[0])

    def join(self, host: int) -> Any:
        argv = [*PYTHON, "dora", "host", "--join", self.reached["address"], "--name", f"h{host}", "--workers", "1"]
        return self._start(host, f"h{host}", argv, {"DORA_TOKEN": self.reached["token"]})

    def train(self, host: int, argv: list[str]) -> Any:
        return self._start(host, "trainer", [*PYTHON, *argv], {"DORA_TOKEN": self.reached["token"]})

    def until(self, counter: str, value: float) -> dict[str, Any]:
        """The counters and the hosts, once this counter has come to this value."""
        self._tell(json.dumps({"counter": counter, "value": value}))
        return self._said()

    def end(self) -> None:
        self._tell("")
        assert self._service.wait() == 0, self.log("service")

    def log(self, name: object) -> str:
        file = self._folder / (f"h{name}.log" if isinstance(name, int) else f"{name}.log")
        return file.read_text()[-4000:]

    def _start(self, host: int, name: str, argv: list[str], environment: dict[str, str] | None = None) -> Any:
        with (self._folder / f"{name}.log").open("a") as log:
            return self.hosts.start(host, argv, environment, stderr=log)

    def _tell(self, line: str) -> None:
        self._service.stdin.write(line + "\n")
        self._service.stdin.flush()

    def _said(self) -> dict[str, Any]:
        line = self._service.stdout.readline()
        assert line, self.log("service")
        return json.loads(line)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(5) as five:
        yield five


def lose_one(run: Run, trainer: Any, steps: int, killed: int, slow: int) -> None:
    """While training runs, a host's link becomes slow and another host is killed; then all promises are checked."""
    run.until("groups_trained", GROUPS)
    run.hosts.link(0, slow, SLOW)
    run.until("groups_trained", 2 * GROUPS)
    run.agents[killed].kill()  # with its workers: they end with it
    output, _ = trainer.communicate(timeout=600)
    assert trainer.returncode == 0, run.log("trainer")
    found = run.until("groups_trained", steps * GROUPS)
    run.end()
    assert found["hosts"][f"h{killed}"] == "lost" and found["hosts"][f"h{slow}"] == "ready"
    counters = found["counters"]
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["staleness_max"] < WINDOW and counters["workers_lost"] >= 1
    trained = [group_id for line in output.splitlines() for group_id in json.loads(line)["group_ids"]]
    assert len(trained) == len(set(trained)) == steps * GROUPS


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_a_job_over_hosts_of_which_one_is_killed_and_one_is_slow(
    hosts: Hosts, tiny_dense: Path, tmp_path: Path, apart: bool
) -> None:
    steps = 6
    rollout = [2, 3] if apart else [1, 2]
    run = Run(hosts, tiny_dense, tmp_path, rollout, workers__count=0 if apart else 1, **FAKE)
    address = run.reached["address"]
    argv = ["tests.e2e.trainer_host", address, str(tiny_dense), str(steps), str(GROUPS)]
    trainer = run.train(1 if apart else 4, argv)
    lose_one(run, trainer, steps, killed=rollout[0], slow=rollout[1])
    assert {f"h{host}-w0" for host in rollout} <= check_record(run, tiny_dense)


def check_record(run: Run, model: Path) -> set[str]:
    """Each trajectory once, groups whole, of one version each, and every token and logprob that version's own. Returns
    which workers have sampled."""
    recorded = read_trajectories(run.record / TRAJECTORIES_FILE)
    assert not [*violations(recorded, WINDOW), *missing(run.record, recorded)[1]]
    assert farthest_of(recorded, Weights(model, "")) == 0.0
    return {segment.worker_id for each in recorded for segment in each.worker_history}


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(900)  # three engines and a trainer
def test_the_demos_job_with_real_engines_over_three_hosts(hosts: Hosts, tiny_dense: Path, tmp_path: Path) -> None:
    steps = 5
    run = Run(hosts, tiny_dense, tmp_path, [1, 2], workers__count=1, prompts="counting", rollout__max_tokens=64)
    options = ["--address", run.reached["address"], "--groups", str(GROUPS), "--steps", str(steps), "--lr", "1e-3"]
    trainer = run.train(3, ["dora.trainers.grpo", *options, "--json"])
    lose_one(run, trainer, steps, killed=1, slow=2)
    found = verify(run.record, atol=1e-3, window_versions=WINDOW)
    assert found.ok, found.violations
