"""A host in a process of its own, which ends itself at a word of the protocol; and the service that directs several.

The service's part is the real one: ``Broadcast`` decides, this only carries its commands to the hosts' processes.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity
from dora.orchestrator.hosts.broadcast import Broadcast, Command, Drop, Fetch, GaveUp, Gone, Ready
from dora.relay.holding import Reader
from dora.relay.orders import Arrived, FetchFailed, FetchOrder, Outcome
from dora.relay.relay import Relay, RelaySettings
from dora.weights import files, manifest
from dora.weights.manifest import Manifest
from dora.weights.receiving import Receiving
from dora.weights.store import WeightStore
from tests.contract.relays import FILE, SECRET, WAIT_S, publish, publish_anew

SMALL = 4096
TIMEOUT_S = 5.0
ENDED = ("ended",)  # of a host's process
NEVER = ("", 0.0)  # a phase, and after which share of the chunks


class MortalStore(WeightStore):
    """Ends the process at a phase of a version on its way in."""

    dies: tuple[str, float] = NEVER

    def receive(self, found: Manifest) -> Receiving:
        phase, share = self.dies
        if phase == "manifest":
            die()
        receiving = super().receive(found)
        if phase == "chunk":
            most, placed = share * len(receiving.missing()), receiving.placed

            def counted(file: str, index: int) -> bool:
                done = placed(file, index)
                if sum(map(sum, receiving._there.values())) >= most:
                    die()
                return done

            receiving.placed = counted  # type: ignore[method-assign]
        return receiving

    def _sealed(self, receiving: Receiving) -> Path:
        if self.dies[0] == "seal":
            die()
        return super()._sealed(receiving)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Telling(Protocol):
    """One end of what a host and its service say to each other."""

    def send(self, words: Any) -> None: ...
    def recv(self) -> Any: ...


def run(
    told: Telling,
    folder: Path,
    model: Path,
    name: str,
    epoch: int,
    dies: tuple[str, float] = NEVER,
    address: str = "127.0.0.1",
) -> None:
    """A host, until it is told to end."""
    for module in (files, manifest):
        module.CHUNK_BYTES = SMALL  # type: ignore[misc]
    MortalStore.dies = dies
    store = MortalStore(folder, model)
    if dies[0] == "served":
        Reader.chunk = _counted(Reader.chunk, dies[1])  # type: ignore[method-assign]
    telling = threading.Lock()

    def tell(*words: Any) -> None:
        with telling:
            told.send(words)

    def outcome(found: Outcome) -> None:
        if dies[0] == "sealed" and isinstance(found, Arrived):
            die()
        tell("outcome", found)

    relay = Relay(
        store, Listener(address), Identity(name, epoch, "", name), RelaySettings(SECRET, timeout_s=TIMEOUT_S), outcome
    )
    tell("joined", relay.address, [store.name(version) for version in store.versions()])
    while (word := told.recv())[0] != "end":
        match word:
            case ("fetch", FetchOrder() as order):
                if dies[0] == "order":
                    die()
                relay.fetch(order)
            case ("drop", str() as dropped):
                relay.drop(dropped)
            case ("publish", int() as version, bool() as anew):
                made = (publish_anew if anew else publish)(store, version)
                tell("published", version, made, store.manifest(version).total_bytes, anew)
            case ("sums",):
                found = {version: (store.name(version), sum_of(store.folder(version))) for version in store.versions()}
                tell("sums", {version: each for version, each in found.items() if version})
    relay.close()


def sum_of(folder: Path) -> bytes:
    return blake3((folder / FILE).read_bytes()).digest()


def _counted(chunk: Callable[[Reader, int], memoryview], share: float) -> Callable[[Reader, int], memoryview]:
    served = 0

    def counted(reader: Reader, number: int) -> memoryview:
        nonlocal served
        served += 1
        if served > share * reader._holding.numbering.chunks:
            die()
        return chunk(reader, number)

    return counted


class Running(Protocol):
    """A process of a host."""

    def kill(self) -> None: ...
    def join(self) -> None: ...


@dataclass
class Process:
    process: Running
    link: Connection
    epoch: int


class Service:
    """Directs the hosts' processes by what ``Broadcast`` decides. In one ``with``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.broadcast = Broadcast()
        self.gone: list[str] = []
        self.ready: list[tuple[str, int]] = []
        self.gave_up: list[tuple[str, int]] = []
        self._folder, self._model = folder, model
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.contract.relay_process"])
        self._hosts: dict[str, Process] = {}
        self._epochs: dict[str, int] = {}
        self._sums: dict[str, dict[int, tuple[str, bytes]]] = {}

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *exception: object) -> None:
        for host in self._hosts.values():
            host.process.kill()
        for host in self._hosts.values():
            host.process.join()

    @property
    def hosts(self) -> list[str]:
        return sorted(self._hosts)

    def start(self, host: str, dies: tuple[str, float] = NEVER) -> None:
        """One more host, or a later epoch of one that has died."""
        self._epochs[host] = epoch = self._epochs.get(host, 0) + 1
        ours, theirs = self._context.Pipe()
        self._hosts[host] = Process(self._started(theirs, host, epoch, dies), ours, epoch)

    def _started(self, told: Connection, host: str, epoch: int, dies: tuple[str, float]) -> Running:
        arguments = (told, self._folder / host, self._model, host, epoch, dies)
        process = self._context.Process(target=run, args=arguments, daemon=True)
        process.start()
        told.close()
        return process

    def kill(self, host: str) -> None:
        self._hosts[host].process.kill()

    def publish(self, host: str, version: int, anew: bool = False) -> None:
        self._hosts[host].link.send(("publish", version, anew))

    def remind(self) -> None:
        self._carry(self.broadcast.remind())

    def until(self, condition: Callable[[], bool]) -> None:
        """Carries events and commands until it holds; it is looked at after each."""
        while not condition():
            waited = {each.link: host for host, each in self._hosts.items()}
            ready = wait(list(waited), WAIT_S)
            assert ready, f"nothing happens; {self.broadcast.versions()} of {self.hosts}"
            for link in ready:
                self._heard(waited[link])  # type: ignore[index]

    def have(self, *versions: int) -> bool:
        """Whether all hosts are known and have these versions."""
        return self.broadcast.hosts() == tuple(self.hosts) and all(
            self.broadcast.holders(version) == tuple(self.hosts) for version in versions
        )

    def sums(self) -> dict[str, dict[int, tuple[str, bytes]]]:
        """Returns, by host, the name and the sum of each version that it has."""
        self._sums.clear()
        for host in self._hosts.values():
            host.link.send(("sums",))
        self.until(lambda: len(self._sums) == len(self._hosts))
        return dict(self._sums)

    def _heard(self, host: str) -> None:
        own = self._hosts[host]
        try:
            word = own.link.recv()
        except (EOFError, ConnectionResetError):
            word = ENDED
        if word == ENDED:
            own.process.join()
            del self._hosts[host]
            self._carry(self.broadcast.lost(host, own.epoch))
            return
        match word:
            case ("joined", str() as address, list() as held):
                self._carry(self.broadcast.joined(host, own.epoch, address, "", held))
            case ("outcome", Arrived() as arrived):
                self._carry(self.broadcast.sealed(host, own.epoch, arrived))
            case ("outcome", FetchFailed() as failed):
                self._carry(self.broadcast.failed(host, own.epoch, failed))
            case ("published", int() as version, str() as name, int() as total_bytes, bool() as anew):
                self._carry(self.broadcast.published(version, name, host, total_bytes, anew))
            case ("sums", dict() as sums):
                self._sums[host] = sums

    def _carry(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Fetch(host, epoch, name, upstreams):
                    self._tell(host, epoch, ("fetch", FetchOrder(name, upstreams, SMALL)))
                case Drop(host, epoch, name):
                    self._tell(host, epoch, ("drop", name))
                case Gone(name=name):
                    self.gone.append(name)
                case Ready(host, version):
                    self.ready.append((host, version))
                case GaveUp(host, version):
                    self.gave_up.append((host, version))

    def _tell(self, host: str, epoch: int, word: tuple[object, ...]) -> None:
        own = self._hosts.get(host)
        if own is not None and own.epoch == epoch:
            try:
                own.link.send(word)
            except (BrokenPipeError, ConnectionResetError):
                return  # it has died; its end of file comes next
