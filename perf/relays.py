"""Measures the distribution of a version to many hosts: against one copy, copies in turn, and Laminar's appendix C.

Hosts are processes with a store and a relay each, over loopback. They share this machine's cores and memory, so each
has a link of its own that is emulated: its relay sends at most ``--link-mb`` megabytes a second, in parts of 128 KiB
(the cap that ``Throttle`` keeps). What is measured is the relays' own work on such links, checksums of each chunk at
each host included; at links as fast as memory the cores here would be the limit.

    fanout8_vs_1       time until the last of eight hosts has a version, through a chain, over that of one host
    serial8_vs_1       the same, one host after the other from the head
    bound8_vs_1        T*(9) of appendix C over T*(2), on the link that was measured
    decode_during_broadcast  tokens a second of an engine that decodes while a relay on its host takes a version in and
                       gives it on at the link's rate, over those without
    zone_delta_vs_whole_BF16, _F32  time until a host in another zone has a version, over 100 Mbit/s: as deltas
                       from the version before a small step of an optimiser, over whole

    .venv/bin/python -m perf.relays [--json] [--plot FILE]
"""

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity
from dora.relay.link import Link, broadcast_s, chain_s, piece_chunks
from dora.relay.orders import Arrived, FetchOrder, Upstream
from dora.relay.relay import Relay, RelaySettings
from dora.weights.files import CHUNK_BYTES, hash_file, preamble
from dora.weights.reference import TensorHeader
from dora.weights.store import WeightStore

SECRET: Final = bytes(range(32))
HOSTS: Final = 8
TENSOR_BYTES: Final = 32 << 20
WAIT_S: Final = 300.0
EPOCH: Final = 1
QUIET_S: Final = 3.0  # of decoding without a broadcast, before and after each with one
ZONE_BYTES_PER_S: Final = 12.5e6
ZONE_BODY_BYTES: Final = 32 << 20
DTYPES: Final = {"BF16": 2, "F32": 4}  # with the bytes of an element
STEP: Final = 1e-6  # by which a step moves a weight at most
START_S: Final = 1e-3  # assumed of a link, for the size of the pieces; what was measured is shown


def least_broadcast_s(link: Link, hosts: int, body_bytes: int) -> float:
    """T*(p): the least of ``broadcast_s`` where pieces may have any size: the bound that a chain is compared with."""
    whole_s, hops = body_bytes / link.bytes_per_s, hosts - 2
    if hops * whole_s <= link.start_s:  # one piece
        return broadcast_s(link, hosts, body_bytes, 1)
    return whole_s + hops * link.start_s + 2 * math.sqrt(hops * whole_s * link.start_s)


@dataclass(frozen=True)
class Broadcasts:
    """Medians over the rounds, in seconds, by how many hosts there were behind the head."""

    fanout: float  # of the most hosts over one, within a round
    chain_s: dict[int, float]
    serial_s: dict[int, float]
    bound_s: dict[int, float]  # T* on the measured link
    planned_s: dict[int, float]  # T(p, k) with the pieces that were used
    body_bytes: int
    piece_bytes: int
    link: Link


# ------------------------------------------------------------------------------------------------------------- a host


def host(told: Connection, folder: str, model: str, name: str, bytes_per_s: float) -> None:
    """A store and a relay, until the other end is gone."""
    store = WeightStore(Path(folder), Path(model))
    settings = RelaySettings(SECRET, bandwidth_bytes_per_s=bytes_per_s, timeout_s=120.0)
    relay = Relay(store, Listener("127.0.0.1"), Identity(name, EPOCH, "", name), settings, told.send)
    told.send(Upstream(name, EPOCH, relay.address))
    try:
        while True:
            match told.recv():
                case FetchOrder() as order:
                    relay.fetch(order)
                case ("drop", str() as dropped):
                    relay.drop(dropped)
                    told.send("dropped")
                case ("publish", int() as version):
                    told.send(published(store, version))
                case ("step", int() as version, str() as dtype):
                    told.send(stepped(store, version, dtype))
    except EOFError:
        relay.close()


def published(store: WeightStore, version: int) -> tuple[str, int]:
    """Weights that differ in each chunk from the version before. Returns name and bytes."""
    generator = np.random.default_rng(version)
    tensors = {tensor.name: generator.random(tensor.shape, np.float32) for tensor in store.reference.tensors}
    file = store.begin(1, version) / "model.safetensors"
    save_file(tensors, file)
    store.publish(1, version, [hash_file(file)], None)
    return store.name(version), store.manifest(version).total_bytes


def stepped(store: WeightStore, version: int, dtype: str) -> tuple[str, int]:
    """Weights after ``version`` small steps. Returns name and bytes."""
    tensors = {}
    for at, tensor in enumerate(store.reference.tensors):
        tensors[tensor.name] = np.random.default_rng(at).standard_normal(tensor.shape, np.float32) * np.float32(0.02)
        for step in range(version):
            moved = np.random.default_rng([at, step]).uniform(-STEP, STEP, tensor.shape)
            tensors[tensor.name] += moved.astype(np.float32)
    file = store.begin(1, version) / "model.safetensors"
    save(file, tensors, dtype)
    store.publish(1, version, [hash_file(file)], None)
    return store.name(version), store.manifest(version).total_bytes


def save(file: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """``tensors`` in float32, rounded to ``dtype``."""
    content = bytearray(preamble(TensorHeader(name, dtype, tensor.shape) for name, tensor in tensors.items()))
    for tensor in tensors.values():
        bits = tensor.view(np.uint32)
        if dtype == "BF16":
            bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        content += bits.tobytes()
    file.write_bytes(content)


def make_model(folder: Path, body_bytes: int, dtype: str = "F32") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 256}))
    count = max(1, body_bytes // TENSOR_BYTES)
    shape = (min(body_bytes, TENSOR_BYTES) // DTYPES[dtype],)
    zeros = np.zeros(shape, np.float32)
    save(folder / "model.safetensors", {f"layer.{at}": zeros for at in range(count)}, dtype)
    return folder


# ------------------------------------------------------------------------------------------------------ what directs


class Cluster:
    """A head and ``hosts`` more, in one ``with``."""

    def __init__(self, folder: Path, body_bytes: int, hosts: int, bytes_per_s: float, dtype: str = "F32") -> None:
        self._stack = ExitStack()
        self._version = 0
        context = multiprocessing.get_context("spawn")
        model = make_model(folder / "model", body_bytes, dtype)
        self._links: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        for at in range(hosts + 1):
            ours, theirs = context.Pipe()
            arguments = (theirs, str(folder / f"h{at}"), str(model), f"h{at}", bytes_per_s)
            process = context.Process(target=host, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self.processes.append(process)
        self._peers: list[Upstream] = [self._hear(at) for at in range(hosts + 1)]

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self.processes:
            process.join()

    def publish(self) -> tuple[str, int]:
        self._version += 1
        self._links[0].send(("publish", self._version))
        return self._hear(0)

    def step(self, dtype: str) -> str:
        """Publishes the weights after one more step. Returns the version's name."""
        self._version += 1
        self._links[0].send(("step", self._version, dtype))
        name, _ = self._hear(0)
        return str(name)

    def drop(self, name: str, hosts: Sequence[int] = ()) -> None:
        """``hosts``: by number; all without it."""
        for at in hosts or range(len(self._links)):
            link = self._links[at]
            link.send(("drop", name))
            while self._hear(at) != "dropped":
                continue

    def order(self, at: int, name: str, upstream: int, piece_bytes: int, base: str = "") -> None:
        self._links[at].send(FetchOrder(name, (replace(self._peers[upstream], base=base),), piece_bytes))

    def arrived(self, hosts: list[int]) -> list[Arrived]:
        """Once all of these have what they were to get."""
        due, found = {self._links[at]: at for at in hosts}, []
        while due:
            ready = wait(list(due), WAIT_S)
            assert ready, "nothing arrives any more"
            for link in ready:
                outcome = self._hear(due.pop(link))  # type: ignore[call-overload]
                assert isinstance(outcome, Arrived), outcome
                found.append(outcome)
        return found

    def says(self, at: int) -> bool:
        """Whether a host has said something that was not heard yet."""
        return self._links[at].poll(0)

    def _hear(self, at: int) -> Any:
        assert self._links[at].poll(WAIT_S), f"host {at} says nothing"
        return self._links[at].recv()


@contextmanager
def a_cluster(body_bytes: int, hosts: int, bytes_per_s: float, dtype: str = "F32") -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="dora-relays-", dir="/dev/shm"))
    try:
        cluster = Cluster(folder, body_bytes, hosts, bytes_per_s, dtype)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def through_chain(cluster: Cluster, hosts: int, piece_bytes: int) -> tuple[float, list[Arrived]]:
    """One version to so many hosts, each behind the one before."""
    name, _ = cluster.publish()
    began_s = time.perf_counter()
    for at in range(1, hosts + 1):
        cluster.order(at, name, at - 1, piece_bytes)
    arrived = cluster.arrived(list(range(1, hosts + 1)))
    took_s = time.perf_counter() - began_s
    cluster.drop(name)
    return took_s, arrived


def one_by_one(cluster: Cluster, hosts: int, piece_bytes: int) -> float:
    """The same from the head alone, to one host after the other."""
    name, _ = cluster.publish()
    began_s = time.perf_counter()
    for at in range(1, hosts + 1):
        cluster.order(at, name, 0, piece_bytes)
        cluster.arrived([at])
    took_s = time.perf_counter() - began_s
    cluster.drop(name)
    return took_s


def measured(
    body_bytes: int, bytes_per_s: float, rounds: int, counts: tuple[int, ...] = (1, 2, 4, HOSTS)
) -> Broadcasts:
    """Every round measures each count of hosts once; a round before them touches all memory."""
    chunks = piece_chunks(Link(bytes_per_s, START_S), max(counts) + 1, body_bytes, CHUNK_BYTES)
    piece_bytes = chunks * CHUNK_BYTES
    took: dict[int, list[float]] = {count: [] for count in counts}
    fan: list[float] = []
    links: list[Link] = []
    with a_cluster(body_bytes, max(counts), bytes_per_s) as cluster:
        through_chain(cluster, max(counts), piece_bytes)
        for _ in range(rounds):
            for count in counts:
                took_s, arrived = through_chain(cluster, count, piece_bytes)
                took[count].append(took_s)
                links += [each.link for each in arrived if each.link is not None]
            fan.append(took[max(counts)][-1] / took[1][-1])
        serial = {count: one_by_one(cluster, count, piece_bytes) for count in (1, max(counts))}
    middle = statistics.median
    link = Link(middle(each.bytes_per_s for each in links), middle(each.start_s for each in links))
    return Broadcasts(
        middle(fan),
        {count: middle(times) for count, times in took.items()},
        serial,
        {count: least_broadcast_s(link, count + 1, body_bytes) for count in counts},
        {count: chain_s(link, count + 1, body_bytes, piece_bytes) for count in counts},
        body_bytes,
        piece_bytes,
        link,
    )


def ratios(found: Broadcasts) -> dict[str, float]:
    most = max(found.chain_s)
    return {
        f"fanout{most}_vs_1": found.fanout,
        f"serial{most}_vs_1": found.serial_s[most] / found.serial_s[1],
        f"bound{most}_vs_1": found.bound_s[most] / found.bound_s[1],
        f"chain{most}_vs_planned": found.chain_s[most] / found.planned_s[most],
    }


def numbers(found: Broadcasts) -> dict[str, float]:
    """The quantities of the ratios, in seconds, megabytes and megabytes a second."""
    chain = {f"chain{count}_s": took_s for count, took_s in found.chain_s.items()}
    serial = {f"serial{count}_s": took_s for count, took_s in found.serial_s.items()}
    sizes = {"broadcast_mb": found.body_bytes / 1e6, "piece_mb": found.piece_bytes / 1e6}
    return {**chain, **serial, **sizes, "link_mb_per_s": found.link.bytes_per_s / 1e6}


# ------------------------------------------------------------------------------------------------------ between zones


def zone_delta_vs_whole(dtype: str, rounds: int) -> float:
    """The median of the rounds; in each, the same version comes as deltas, then whole."""
    found = []
    with a_cluster(ZONE_BODY_BYTES, 1, ZONE_BYTES_PER_S, dtype) as cluster:
        base = cluster.step(dtype)
        crossed_s(cluster, base)
        for _ in range(rounds):
            name = cluster.step(dtype)
            delta_s = crossed_s(cluster, name, base)
            cluster.drop(name, [1])
            found.append(delta_s / crossed_s(cluster, name))
            cluster.drop(base)
            base = name
    return statistics.median(found)


def crossed_s(cluster: Cluster, name: str, base: str = "") -> float:
    began_s = time.perf_counter()
    cluster.order(1, name, 0, CHUNK_BYTES, base)
    cluster.arrived([1])
    return time.perf_counter() - began_s


# ----------------------------------------------------------------------------------------------- decoding meanwhile


def decode_during_broadcast(body_bytes: int, bytes_per_s: float, rounds: int) -> float:
    """An engine decodes on this host, in this process, while a relay beside it takes a version in and gives it on.

    Tokens a second with the broadcast over those without, the median of the rounds, each measured in turn. The hosts at
    both ends of the relay run on this machine as well, at the same low priority: their work is a load that another
    machine would carry.
    """
    from perf.decoding import Decoding  # vLLM takes some seconds

    found = []
    with a_cluster(body_bytes, 2, bytes_per_s) as cluster, Decoding() as engine:
        engine.decode(2.0)
        for _ in range(rounds):
            name, _ = cluster.publish()
            before = engine.decode(QUIET_S)
            for at in (1, 2):
                cluster.order(at, name, at - 1, CHUNK_BYTES)
            during = engine.decode_until(lambda: cluster.says(1) and cluster.says(2))
            cluster.arrived([1, 2])
            cluster.drop(name)
            found.append(during / statistics.mean((before, engine.decode(QUIET_S))))
    return statistics.median(found)


# ------------------------------------------------------------------------------------------------------------ showing


def plot(found: Broadcasts, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    counts = list(found.chain_s)
    axes.plot(counts, [found.serial_s[1] * count for count in counts], "o--", label="one by one")
    axes.plot(counts, list(found.chain_s.values()), "o-", label="chain, measured")
    axes.plot(counts, list(found.planned_s.values()), ":", label="T(p, k), these pieces")
    axes.plot(counts, list(found.bound_s.values()), "-", label="T*(p), appendix C")
    axes.set(xlabel="hosts behind the head", ylabel="seconds until the last has it", xticks=counts, ylim=(0, None))
    axes.set_title(f"{found.body_bytes / 1e6:.0f} MB over links of {found.link.bytes_per_s / 1e6:.0f} MB/s")
    axes.legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def show(found: Broadcasts, all_ratios: dict[str, float]) -> None:
    table = Table("hosts", "chain s", "T(p, k) s", "T*(p) s", "one by one s")
    for count, took_s in found.chain_s.items():
        serial = f"{found.serial_s[count]:.2f}" if count in found.serial_s else ""
        table.add_row(
            str(count), f"{took_s:.2f}", f"{found.planned_s[count]:.2f}", f"{found.bound_s[count]:.2f}", serial
        )
    console = Console()
    console.print(table)
    link = found.link
    console.print(
        f"link: {link.bytes_per_s / 1e6:.1f} MB/s, {link.start_s * 1e3:.2f} ms; pieces of {found.piece_bytes >> 20} MiB"
    )
    for name, ratio in all_ratios.items():
        console.print(f"{name:26} {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body-mb", type=int, default=384, help="of a version, in MiB; a multiple of 32")
    parser.add_argument("--link-mb", type=float, default=64.0, help="of a host's link, in 10^6 bytes a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-decode", action="store_true", help="leave decode_during_broadcast out")
    parser.add_argument("--plot", type=Path, help="e.g. out/relays.png")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    body_bytes, bytes_per_s = options.body_mb << 20, options.link_mb * 1e6
    found = measured(body_bytes, bytes_per_s, options.rounds)
    all_ratios = ratios(found)
    for dtype in DTYPES:
        all_ratios[f"zone_delta_vs_whole_{dtype}"] = zone_delta_vs_whole(dtype, options.rounds)
    if not options.no_decode:
        all_ratios["decode_during_broadcast"] = decode_during_broadcast(body_bytes, bytes_per_s, options.rounds)
    if options.plot:
        plot(found, options.plot)
    if options.json:
        print(json.dumps({**all_ratios, **numbers(found)}))
    else:
        show(found, all_ratios)


if __name__ == "__main__":
    main()
