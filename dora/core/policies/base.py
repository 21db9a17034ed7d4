"""The base of most policies: it fills the newest version first, the emptiest worker first, and takes prompts in
order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.groups.queues import QueuedPrompt
from dora.core.plan import Move, Plan, Trigger
from dora.core.view import View


class BasePolicy(ABC):
    """A policy with default behaviour. A subclass must override ``plan``."""

    def __init__(self, config: BalanceConfig) -> None:
        self.config = config

    def observe(self, dispatcher: Dispatcher) -> None:  # noqa: B027 - most plans go by their view alone
        """See policy.Policy."""

    @abstractmethod
    def plan(self, view: View, trigger: Trigger) -> Plan:
        """See policy.Policy."""

    def successor(self, dispatcher: Dispatcher) -> int | None:
        return None

    def begins(self, dispatcher: Dispatcher, version: int) -> bool:
        return True

    def relieve(self, view: View) -> tuple[Move, ...]:
        return ()

    def rank(self, entry: QueuedPrompt, expected_tokens: float) -> float:
        return 0.0

    def versions(self, dispatcher: Dispatcher) -> Iterable[int]:
        """The order in which versions receive new work."""
        return dispatcher.versions()

    def room(self, dispatcher: Dispatcher, worker: Worker) -> float:
        """The worker's priority for its next request, by default its free slots. With zero or less it takes none."""
        return worker.slots - worker.assigned

    def ration(self, dispatcher: Dispatcher, version: int) -> int | None:
        """The most requests that a worker of this version may hold for now, or None if its room is the limit."""
        return None

    def even_share(self, dispatcher: Dispatcher, version: int) -> int | None:
        """A ration that applies while more workers load the version. Without it the first worker would be filled, and
        its requests would then be moved to the others.
        """
        loading = dispatcher.loading(version)
        if not loading:
            return None
        hosts, first = dispatcher.workers_of(version), dispatcher.backlog.first()
        groups = max(0, min(len(dispatcher.backlog), dispatcher.admissible(version)))
        supply = len(dispatcher.waiting_requests(version)) + groups * (first.prompt.at_once if first is not None else 0)
        assigned = sum([len(worker.rows) + worker.inbound for worker in hosts])
        return ceil((supply + assigned) / (len(hosts) + loading))

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Returns whether the request's KV fits if each has its full length. An empty worker takes any."""
        need = dispatcher.context_tokens(row)
        return worker.is_empty or worker.kv_claimed + need <= worker.kv_tokens

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        """The prompt for the next group of ``version``, or None if no group should begin."""
        return dispatcher.backlog.first()

    def dispatch(self, dispatcher: Dispatcher) -> None:
        for version in self.versions(dispatcher):
            if dispatcher.waiting_requests(version) or (dispatcher.backlog and dispatcher.admissible(version) > 0):
                self._fill(dispatcher, version)

    def _fill(self, dispatcher: Dispatcher, version: int) -> None:
        heap: list[tuple[float, int, Worker]] = []
        ration = self.ration(dispatcher, version)
        dispatcher.ration(version, ration)
        most = inf if ration is None else ration
        for worker in dispatcher.candidates(version):
            room = self.room(dispatcher, worker)
            if room > 0 and worker.assigned < most:
                heap.append((-room, worker.index, worker))
            else:
                dispatcher.full(worker)
        heapify(heap)
        # workers that had no room for a request with ``aside_tokens`` of context
        aside: list[tuple[float, int, Worker]] = []
        aside_tokens = 0
        while heap and self._supply(dispatcher, version):
            row = dispatcher.waiting_requests(version).peek()
            tokens = dispatcher.context_tokens(row)
            if aside and tokens < aside_tokens:
                while aside:
                    heappush(heap, aside.pop())
            while heap and not self.fits(dispatcher, row, heap[0][2]):
                aside.append(heappop(heap))
                aside_tokens = tokens
            if heap:
                self._place(dispatcher, row, heap, most)

    def _supply(self, dispatcher: Dispatcher, version: int) -> bool:
        """Returns whether a request of this version waits. Admits groups if none does: those without a prompt wait for
        their environment instead.
        """
        while not dispatcher.waiting_requests(version):
            if not dispatcher.backlog or dispatcher.admissible(version) < 1:
                return False
            entry = self.choose(dispatcher, version)
            if entry is None:
                return False
            dispatcher.admit(entry, version, self.rank)
        return True

    def _place(self, dispatcher: Dispatcher, row: int, heap: list[tuple[float, int, Worker]], most: float) -> None:
        """Places the request on the first worker of the heap and updates that worker's position in the heap."""
        _, index, worker = heap[0]
        dispatcher.place(row, worker)
        room = self.room(dispatcher, worker)
        if room > 0 and worker.assigned < most:
            heapreplace(heap, (-room, index, worker))
        else:
            heappop(heap)
            dispatcher.full(worker)
