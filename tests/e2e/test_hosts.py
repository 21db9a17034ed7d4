"""A service over three hosts, whose workers' link is slow, lossy or cut: requests move over it, or stay.

The hosts are network namespaces that the test makes; workers find each other by addresses, and share no loopback and no
shared memory for KV.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dora.rpc.roles import Role
from dora.tls.authority import make_cluster
from tests.hosts import GOOD, Hosts, Link, address_of, has_hosts

pytestmark = pytest.mark.skipif(not has_hosts(), reason="no network namespaces and TUN devices for this user")

SETTINGS = {
    "workers__engine": "fake",
    "workers__count": 0,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "workers__slots": 8,
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "service__listen": f"{address_of(0)}:0",
    "kv__timeout_s": 1.0,
    "balance__handoff_timeout_s": 4.0,
}


class Run:
    """The hosts' processes: a service with its trainer, and workers, or agents that have one each."""

    def __init__(
        self,
        hosts: Hosts,
        model: Path,
        folder: Path,
        *,
        agents: bool = False,
        certificates: Path | None = None,
        zones: Sequence[str] = ("", ""),
        weights: Path | str = "",
        **settings: Any,
    ) -> None:
        """``certificates``: of ``make_cluster``, for mutual TLS; agents then have no token. ``zones``: the agents'.
        ``weights``: a folder for versions that differ.
        """
        self.hosts = hosts
        content = {
            "model": str(model),
            "settings": {**SETTINGS, **settings},
            "workers": len(zones),
            "folder": str(weights),
        }
        orders = json.dumps(content)
        self._logs = [folder / f"host-{host}.log" for host in range(1 + len(zones))]
        python = [sys.executable, "-m"]
        with self._logs[0].open("w") as log:
            own = {} if certificates is None else {"DORA_TLS": str(certificates / "owner")}
            self._service = hosts.start(0, [*python, "tests.e2e.service_host", orders], own, stderr=log)
        reached = self._said()
        for host, zone in enumerate(zones, 1):
            argv = [*python, "dora.worker", "--orchestrator", reached["address"], "--worker-id", f"w{host}"]
            argv += ["--engine", "fake", "--model", str(model), "--slots", "8", "--kv-tokens", "16384"]
            if agents:
                argv = [*python, "dora", "host", "--join", reached["address"], "--name", f"h{host}", "--workers", "1"]
                argv += ["--model", str(model), "--folder", str(folder / f"h{host}"), "--kv-host", address_of(host)]
                argv += ["--zone", zone] if zone else []
            surroundings = {"DORA_TOKEN": reached["host_token" if agents else "token"]}
            if certificates is not None:
                surroundings = {"DORA_TLS": str(certificates / f"host-{address_of(host)}")}
            with self._logs[host].open("w") as log:
                hosts.start(host, argv, surroundings, stderr=log)
        assert self._said() == {"workers": len(zones)}

    def until(self, counter: str, more: int) -> dict[str, float]:
        """The counters, once moves that an operator asks for have made this one grow by so many."""
        self._tell(json.dumps({"until": counter, "more": more}))
        return self._said()

    def crosses(self, *near: str) -> None:
        """Returns when an operator has moved a request between these workers and the others."""
        self._tell(json.dumps({"across": near}))
        self._said()

    def end(self) -> dict[str, Any]:
        """Ends training. Returns what the trainer saw."""
        self._tell("")
        return self._said()

    def fetched_bytes(self) -> dict[str, int]:
        """Of the last version, by host, after the end of training. Hosts measure their links for it."""
        self._tell("")
        return self._said()

    def log(self, host: int) -> str:
        return self._logs[host].read_text()

    def _tell(self, line: str) -> None:
        assert self._service.stdin is not None
        self._service.stdin.write(line + "\n")
        self._service.stdin.flush()

    def _said(self) -> dict[str, Any]:
        assert self._service.stdout is not None
        line = self._service.stdout.readline()
        assert line, self.log(0)
        return json.loads(line)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as three:
        yield three


@pytest.mark.parametrize("transport", ["tcp", pytest.param("gloo", marks=pytest.mark.full)])
def test_requests_move_over_bad_links_or_stay(hosts: Hosts, tiny_dense: Path, tmp_path: Path, transport: str) -> None:
    run = Run(hosts, tiny_dense, tmp_path, kv__transports=transport)
    run.until("migrations_kv", 2)
    for bad in (Link(delay_s=0.05), Link(loss=0.03), Link(bytes_per_s=200e3)):
        hosts.link(1, 2, bad)
        run.until("migrations_kv", 2)
    before = run.until("migrations_kv", 1)
    hosts.link(1, 2, Link(is_up=False))
    cut = run.until("migrations_failed", 2)
    assert cut["tokens_reprefilled"] == before["tokens_reprefilled"] == 0, "what cannot move goes on where it is"
    hosts.link(1, 2, GOOD)
    run.until("migrations_kv", 2)
    found = run.end()
    assert found["farthest_logprob"] == 0.0
    assert found["moved"] >= 2  # a request may have moved several times
    counters = found["counters"]
    assert counters["groups_lost"] == counters["c1_violations"] == counters["workers_lost"] == 0
    assert found["kv_use"] == 0


@pytest.mark.full
def test_one_way_of_a_link_is_cut(hosts: Hosts, tiny_dense: Path, tmp_path: Path) -> None:
    """First the service does not hear a host, then a host does not hear the service: either is lost, and comes back."""
    run = Run(hosts, tiny_dense, tmp_path, agents=True, workers__silence_timeout_s=3.0)
    run.until("migrations_kv", 1)
    for source, target in ((1, 0), (0, 1)):
        hosts.cut(source, target)
        run.until("workers_lost", 1)
        hosts.mend(source, target)
        run.until("migrations_kv", 2)
    found = run.end()
    assert found["farthest_logprob"] == 0.0 and found["kv_use"] == 0
    counters = found["counters"]
    assert counters["groups_lost"] == counters["c1_violations"] == 0


@pytest.mark.full
def test_a_run_with_mutual_tls_over_three_hosts(hosts: Hosts, tiny_dense: Path, tmp_path: Path) -> None:
    """Agents, their workers and relays have certificates and no token of a role. All certificates are replaced."""
    folder, machines = tmp_path / "tls", [address_of(host) for host in range(3)]

    def made(*, new_authority: bool) -> None:
        make_cluster(folder, machines, list(Role), days=1, authority_days=2, new_authority=new_authority)

    made(new_authority=False)
    settings = {"tls__folder": str(folder / "service"), "kv__transports": "tcp"}
    run = Run(hosts, tiny_dense, tmp_path, agents=True, certificates=folder, **settings)
    run.until("migrations_kv", 2)
    made(new_authority=True)
    hosts.link(1, 2, Link(is_up=False))
    run.until("migrations_failed", 1)
    hosts.link(1, 2, GOOD)
    run.until("migrations_kv", 2)
    found = run.end()
    assert found["farthest_logprob"] == 0.0 and found["moved"] >= 2 and found["kv_use"] == 0
    counters = found["counters"]
    assert counters["groups_lost"] == counters["c1_violations"] == counters["workers_lost"] == 0


@pytest.mark.full
def test_two_zones_share_a_slow_link(tiny_dense: Path, tmp_path: Path) -> None:
    """100 Mbit/s and 40 ms there and back. A version crosses once, though two hosts are there, and after the first one
    as a delta. A request that moves there leaves its KV behind, as its prefill is faster than the latency of a copy.
    """
    between = [(near, far) for near in (0, 1) for far in (2, 3)]
    with Hosts(4) as hosts:
        for pair in between:
            hosts.link(*pair, Link(delay_s=0.02, bytes_per_s=12.5e6))
        link = {"host__zone_link_bytes_per_s": 12.5e6, "host__zone_link_latency_s": 0.04}
        sizes = {"rollout__max_tokens": 600}
        zones, weights = ("", "far", "far"), tmp_path / "versions"
        run = Run(hosts, tiny_dense, tmp_path, agents=True, zones=zones, weights=weights, **sizes, **link)
        run.crosses("h1-w0")
        run.until("groups_trained", 8)
        found = run.end()
        between_bytes = sum(hosts.carried_bytes(*pair) for pair in between)
        within_bytes = hosts.carried_bytes(2, 3) + hosts.carried_bytes(3, 2)
        fetched_bytes = run.fetched_bytes()
    version_bytes = (weights / "1" / "model.safetensors").stat().st_size
    crossed_bytes, beside_bytes = sorted(fetched_bytes[host] for host in ("h2", "h3"))
    assert 0 < crossed_bytes < 0.8 * version_bytes, "the last version came as a delta"
    assert beside_bytes == version_bytes, "the second host takes it from the first, whole"
    assert within_bytes > version_bytes * (found["versions"] - 1)
    assert version_bytes < between_bytes < version_bytes * found["versions"], "one whole, then deltas"
    moves = [pair for history in found["arrivals"] for pair in pairwise(history)]
    crossing = {arrival for (source, _), (target, arrival) in moves if "h1-w0" in (source, target) and source != target}
    assert crossing == {"re-prefilled"}
    assert found["farthest_logprob"] == 0.0 and found["kv_use"] == 0
    counters = found["counters"]
    assert counters["groups_lost"] == counters["c1_violations"] == 0
