"""What most policies share: fill the newest version first, the emptiest DP group first, prompts as they come."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

from dora.config import BalanceConfig
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.plan import Move, Plan, Trigger
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker


class BasePolicy(ABC):
    """Override what differs; ``plan`` is the least."""

    def __init__(self, config: BalanceConfig) -> None:
        self.config = config

    def observe(self, floor: Floor) -> None:  # noqa: B027 - most plans go by their snapshot alone
        """See policy.Policy."""

    @abstractmethod
    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        """See policy.Policy."""

    def successor(self, floor: Floor) -> int | None:
        return None

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        return ()

    def rank(self, entry: Entry, expected_tokens: float) -> float:
        return 0.0

    def versions(self, floor: Floor) -> Iterable[int]:
        """In which order versions get new work."""
        return floor.versions()

    def room(self, floor: Floor, worker: Worker) -> float:
        """How eagerly this DP group takes one more request; none where not positive. Free slots here."""
        return worker.slots - worker.held

    def ration(self, floor: Floor, version: int) -> int | None:
        """How many requests a DP group of this version is to hold at most for now; None: as many as it has room for."""
        return None

    def even_share(self, floor: Floor, version: int) -> int | None:
        """A ration while more DP groups load the version: else the first would be filled, and levelled again."""
        loading = floor.loading(version)
        if not loading:
            return None
        hosts, first = floor.hosts(version), floor.backlog.first()
        groups = max(0, min(len(floor.backlog), floor.window.admissible(version)))
        supply = len(floor.line(version)) + groups * (first.prompt.group_size if first is not None else 0)
        held = sum([len(worker.rows) + worker.inbound for worker in hosts])
        return ceil((supply + held) / (len(hosts) + loading))

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        """Whether the request's KV fits, as it will be at its end. An empty DP group takes anything."""
        need = floor.context_tokens(row)
        return not worker.held or worker.kv_claimed + need <= worker.kv_tokens

    def choose(self, floor: Floor, version: int) -> Entry | None:
        """The prompt to make the next group of ``version`` from; None: none that should."""
        return floor.backlog.first()

    def dispatch(self, floor: Floor) -> None:
        for version in self.versions(floor):
            if floor.line(version) or (floor.backlog and floor.window.admissible(version) > 0):
                self._fill(floor, version)

    def _fill(self, floor: Floor, version: int) -> None:
        heap: list[tuple[float, int, Worker]] = []
        ration = self.ration(floor, version)
        floor.ration(version, ration)
        most = inf if ration is None else ration
        for worker in floor.candidates(version):
            room = self.room(floor, worker)
            if room > 0 and worker.held < most:
                heap.append((-room, worker.seat, worker))
            else:
                floor.full(worker)
        heapify(heap)
        aside: list[tuple[float, int, Worker]] = []  # what did not fit a request of ``aside_tokens`` of context
        aside_tokens = 0
        while heap and self._supply(floor, version):
            row = floor.line(version).peek()
            tokens = floor.context_tokens(row)
            if aside and tokens < aside_tokens:
                while aside:
                    heappush(heap, aside.pop())
            while heap and not self.fits(floor, row, heap[0][2]):
                aside.append(heappop(heap))
                aside_tokens = tokens
            if heap:
                self._place(floor, row, heap, most)

    def _supply(self, floor: Floor, version: int) -> bool:
        """Whether a request of this version waits, if need be one of a new group."""
        if floor.line(version):
            return True
        if not floor.backlog or floor.window.admissible(version) < 1:
            return False
        entry = self.choose(floor, version)
        if entry is None:
            return False
        floor.admit(entry, version, self.rank)
        return True

    def _place(self, floor: Floor, row: int, heap: list[tuple[float, int, Worker]], most: float) -> None:
        """Puts the request on the first worker of the heap, and that one where it then belongs."""
        _, seat, worker = heap[0]
        floor.place(row, worker)
        room = self.room(floor, worker)
        if room > 0 and worker.held < most:
            heapreplace(heap, (-room, seat, worker))
        else:
            heappop(heap)
            floor.full(worker)
