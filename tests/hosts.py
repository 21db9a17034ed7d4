"""Several hosts on one machine: a network namespace each, joined by links that delay, lose, slow down and part.

Each host is one process, and those it starts, in a user and a network namespace of its own: no root is needed, and
nothing outside is reached. Its one device is a TUN, whose packets this process carries to the others. So the kernel's
own TCP runs at both ends, over links as bad as a test wants them, on kernels without ``tc netem`` as well.
"""

import array
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000
_MTU_BYTES: Final = 1500
_QUEUED_BYTES: Final = 256 << 10  # of one direction of a slow link; what comes when it is full is lost
_DEVICE: Final = "dora0"


def address_of(host: int) -> str:
    """The host's IPv4 address, in the network that only the hosts share."""
    return f"10.77.0.{host + 1}"


@dataclass(frozen=True, slots=True)
class Link:
    """The quality of the link between two hosts, in each direction."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of packets
    bytes_per_s: float = 0.0  # 0: as fast as they can be carried
    is_up: bool = True


GOOD: Final = Link()


class Hosts:
    """``count`` hosts, in one ``with``: at its end their processes are ended and the namespaces are gone."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count = count
        self._links: dict[frozenset[int], Link] = {}
        self._cut: set[tuple[int, int]] = set()
        self._switch = _Switch(self._links, self._cut, seed)
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Hosts":
        self._switch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._switch.stop()

    def link(self, one: int, other: int, link: Link) -> None:
        """From now on; what is under way arrives as it was to."""
        self._links[frozenset((one, other))] = link

    def cut(self, source: int, target: int) -> None:
        """From now on nothing of ``source`` gets to ``target``; what ``target`` sends still arrives."""
        self._cut.add((source, target))

    def mend(self, source: int, target: int) -> None:
        self._cut.discard((source, target))

    @property
    def packets_cut(self) -> int:
        """That were sent where it was cut."""
        return self._switch.packets_cut

    def carried_bytes(self, source: int, target: int) -> int:
        """That ``source`` has sent to ``target``, and that were not lost."""
        return self._switch.carried_bytes[source, target]

    def be(self, host: int) -> None:
        """This process is that host, in namespaces that nothing else is in: it was started as ``apart`` says."""
        self._switch.add(host, _up(host))

    def start(
        self,
        host: int,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stderr: IO[Any] | None = None,
    ) -> "subprocess.Popen[str]":
        """The one process of a host, started in its namespaces; its stdin and stdout are pipes of text.

        When it ends, whatever it has started and left behind is without a network, and so is the host.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            enter = [sys.executable, "-m", "tests.hosts", str(host), str(theirs.fileno()), *argv]
            process = subprocess.Popen(
                apart(enter),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
            )
            self._processes.append(process)
            theirs.close()
            _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
            assert ancillary, f"host {host} has not come up: {process.wait()}"
            (device,) = array.array("i", ancillary[0][2])
        self._switch.add(host, device)
        return process


def apart(argv: Sequence[str]) -> list[str]:
    """A command line that runs ``argv`` in a user and a network namespace of its own, as the root of both."""
    return ["unshare", "--user", "--map-root-user", "--net", *argv]


def has_hosts() -> bool:
    """Whether this user may make network namespaces and TUN devices here."""
    make = [sys.executable, "-c", "import tests.hosts; tests.hosts._device()"]
    try:
        return subprocess.run(apart(make), capture_output=True, check=False, cwd=_ROOT).returncode == 0
    except OSError:
        return False


_ROOT: Final = Path(__file__).parent.parent


class _Switch:
    """A thread that carries packets between the hosts' devices."""

    def __init__(self, links: Mapping[frozenset[int], Link], cut: Set[tuple[int, int]], seed: int) -> None:
        self._links, self._cut = links, cut
        self._chance = random.Random(seed)
        self._devices: dict[int, int] = {}
        self._queue: list[tuple[float, int, int, bytes]] = []  # (due, number, target, packet)
        self._count = self.packets_cut = 0
        self.carried_bytes: Counter[tuple[int, int]] = Counter()
        self._free_s: dict[tuple[int, int], float] = {}  # when a slow link's direction has sent all that waits
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._lock = threading.Lock()

    def start(self) -> None:
        self._thread.start()

    def add(self, host: int, device: int) -> None:
        os.set_blocking(device, False)
        with self._lock:
            self._devices[host] = device
        self._selector.register(device, selectors.EVENT_READ, host)
        os.write(self._wake, b"+")

    def stop(self) -> None:
        os.write(self._wake, b".")
        self._thread.join()
        self._selector.close()
        for each in (*self._devices.values(), self._woken, self._wake):
            os.close(each)

    def _run(self) -> None:
        while True:
            wait_s = None if not self._queue else max(0.0, self._queue[0][0] - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    if os.read(self._woken, 1) == b".":
                        return
                else:
                    self._take(key.data, key.fd)
            self._deliver()

    def _take(self, source: int, device: int) -> None:
        """All packets that a host has sent, each lost or to be delivered in its time."""
        while True:
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                return
            except OSError:  # its host is gone
                self._selector.unregister(device)
                return
            if len(packet) < 20 or packet[0] >> 4 != 4:  # IPv6 looks for its neighbours
                continue
            target = packet[19] - 1
            link = self._links.get(frozenset((source, target)), GOOD)
            is_cut = (source, target) in self._cut
            self.packets_cut += is_cut
            if target not in self._devices or is_cut or not link.is_up or self._chance.random() < link.loss:
                continue
            sent_s = self._sent_s(source, target, link, len(packet))
            if sent_s is not None:
                self._count += 1
                self.carried_bytes[source, target] += len(packet)
                heapq.heappush(self._queue, (sent_s + link.delay_s, self._count, target, packet))

    def _sent_s(self, source: int, target: int, link: Link, size_bytes: int) -> float | None:
        """When the link has sent the packet; None: its queue is full."""
        now_s = time.monotonic()
        if not link.bytes_per_s:
            return now_s
        free_s = max(now_s, self._free_s.get((source, target), 0.0))
        if (free_s - now_s) * link.bytes_per_s > _QUEUED_BYTES:
            return None
        self._free_s[source, target] = sent_s = free_s + size_bytes / link.bytes_per_s
        return sent_s

    def _deliver(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._queue)
            try:
                os.write(self._devices[target], packet)
            except OSError:  # full, or gone: lost
                continue


# --------------------------------------------------------------------------------------------- inside the namespaces


def _device() -> int:
    """A TUN device of this network namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN_NO_PI))
    return device


def _up(host: int) -> int:
    """Brings up the host's network; its device."""
    device = _device()
    up = ["link", "set", "dev", _DEVICE, "mtu", str(_MTU_BYTES), "up"]
    for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address_of(host)}/24", "dev", _DEVICE], up):
        subprocess.run(["ip", *words], check=True)
    return device


def _enter(host: int, channel: int, argv: Sequence[str]) -> None:
    """Brings up the host's network, hands its device over, becomes ``argv``."""
    device = _up(host)
    with socket.socket(fileno=channel) as told:
        told.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    os.execvp(argv[0], list(argv))


if __name__ == "__main__":
    _enter(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
