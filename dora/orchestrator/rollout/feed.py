"""The prompt feed: what was submitted over gRPC first, then the prompt source. Bounded."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from dora.config import Config
from dora.data.types import Prompt
from dora.errors import Conflict, DoraError, InvalidValue, told
from dora.journal import records
from dora.orchestrator.rollout.journal import Journal, Origin
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.prompts import Position, PromptSource
from dora.rpc.errors import LimitExceeded

log = logging.getLogger("dora.prompts")

DRAWN_MAX = 256  # prompts read from the source, and offered to the core, at once: the event loop stands still for them
REFUSED_MAX = 4096  # in a row: a source may have no end
QUEUED_BYTES_MAX = 512 << 20  # of what was submitted and waits
FAILURE_CHARACTERS_MAX = 400
TOKEN_BYTES = 40  # of a token id, as Python holds it in a tuple
SUBMITTED = -1  # in place of a place in the source
CANCELLED_KEPT_MAX = 65536  # ids of prompts and groups that were cancelled, the last ones: cancelling may be repeated


class PromptFeed:
    """``live`` prompt ids are queued, drawn or in an open group: an id may come again once its group is committed."""

    def __init__(
        self,
        config: Config,
        source: PromptSource | None,
        check: PromptCheck | None = None,
        journal: Journal | None = None,
    ) -> None:
        """``source`` None: only what is submitted."""
        self._config = config
        self._journal = Journal() if journal is None else journal
        self._origins: dict[str, Origin] = {}  # of prompts that were drawn, until they are admitted or let go
        self._passed: set[int] = set()  # places in the source behind ``_next`` that are not to be drawn again
        self.check = PromptCheck(config) if check is None else check
        self._source = source
        self._next = 0  # index of the source's next prompt
        self._dry = source is None
        self._waits = config.prompts.source == "none" or config.prompts.then == "wait"  # for more, after the source
        self._queue = _Queue()  # at most service.prompts_queued_max
        self._arrived = asyncio.Event()
        self._live: set[str] = set()
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self.taken_back = 0  # prompts that were cancelled while they were queued
        self.refused = 0  # prompts of the source that no engine could generate
        self._refused_in_a_row = 0
        self.failure = ""  # why the source gives no more, though it has not ended
        self.sources_failed = 0
        self._ended = False  # nothing more will be submitted
        self.closed = False  # no further prompt is taken in: the service drains, or the prompts have ended

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def position(self) -> Position:
        """Of the source's next prompt."""
        return self._source.position(self._next) if self._source is not None else Position(0, 0)

    def submit(self, prompts: Sequence[Prompt]) -> int:
        """Queues all or none; returns the free places. Raises for a full queue, a live id, an impossible prompt."""
        self.check_room(len(prompts))
        return self.queue([self.check.checked(prompt) for prompt in prompts])

    def queue(self, possible: Sequence[Prompt]) -> int:
        """Queues all or none of what has passed ``check``; returns the free places. Raises as ``submit``."""
        self.check_room(len(possible))
        names: set[str] = set()
        for prompt in possible:
            if prompt.prompt_id in self._live or prompt.prompt_id in names:
                raise Conflict(
                    "prompt_id", prompt.prompt_id, "an id that is neither queued nor being generated", why="is in use"
                )
            names.add(prompt.prompt_id)
        more_bytes = sum(map(memory_bytes, possible))
        if self._queue.bytes + more_bytes > QUEUED_BYTES_MAX:
            allowed = f"at most {QUEUED_BYTES_MAX - self._queue.bytes} now (queue of {QUEUED_BYTES_MAX})"
            raise LimitExceeded("prompts: bytes in memory", more_bytes, allowed)
        self._live.update(names)
        arrivals = []
        for prompt in possible:
            self._cancelled.pop(prompt.prompt_id, None)
            arrivals.append(self._queue.push(prompt))
        self._journal.submitted(arrivals, possible)
        self._arrived.set()
        return self._config.service.prompts_queued_max - len(self._queue)

    def check_room(self, count: int) -> None:
        """Raises Conflict where no prompts are taken in any more, LimitExceeded where ``count`` find no place."""
        limit = self._config.service.prompts_queued_max
        if self._ended:
            raise Conflict("prompts", count, "0, as it was said that no more would come", why="came too late")
        if self.closed:
            allowed = "0, as the prompts have ended (prompts.then = wait would keep the service open) or it drains"
            raise Conflict("prompts", count, allowed, why="came too late")
        if len(self._queue) + count > limit:
            raise LimitExceeded("prompts", count, f"at most {limit - len(self._queue)} now (queue of {limit})")

    async def take(self, count: int) -> tuple[list[Prompt], bool]:
        """1 to ``count`` prompts, waiting for the first; True with none left: there will be no more.

        Of what was submitted the highest priority comes first, equal ones as they came. A source that fails gives no
        more; what is submitted is waited for then.
        """
        while not self.closed:
            taken = self._from_queue(count)
            if not taken and not self._dry:
                taken = await self._from_source(count)
            if taken:
                return taken, False
            if not self._dry or self._queue:  # something was submitted while the source was read
                continue
            if self._ended or not (self._waits or self.failure):
                self.closed = True
            else:
                self._arrived.clear()
                await self._arrived.wait()
        return [], True

    def end(self) -> int:
        """Nothing more will be submitted. Returns how many are queued, which will still be taken. May be repeated."""
        if not self._ended:
            self._journal.note(records.PromptsEnded())
        self._ended = True
        self._arrived.set()
        return len(self._queue)

    def close(self) -> None:
        self.closed = True
        self._arrived.set()

    def release(self, prompt_id: str) -> None:
        """The prompt's group was committed or cancelled, or the prompt taken back."""
        self._live.discard(prompt_id)

    def origin(self, prompt_id: str) -> Origin:
        """Where a prompt came from that was drawn, and is admitted now or let go."""
        return self._origins.pop(prompt_id)

    def take_back(self, prompt_id: str) -> bool:
        """Takes a queued prompt out; False where it is not in the queue."""
        arrival = self._queue.remove(prompt_id)
        if arrival is None:
            return False
        self._journal.let_go([(SUBMITTED, arrival)], [prompt_id])
        self.release(prompt_id)
        self.taken_back += 1
        return True

    def remember_cancelled(self, name: str) -> None:
        """``name``: of a prompt, or of a group."""
        self._cancelled[name] = None
        self._cancelled.move_to_end(name)
        if len(self._cancelled) > CANCELLED_KEPT_MAX:
            self._cancelled.popitem(last=False)

    def was_cancelled(self, name: str) -> bool:
        return name in self._cancelled

    def restore(
        self, queued: Iterable[tuple[int, Prompt]], next_arrival: int, position: int, passed: Iterable[int], ended: bool
    ) -> None:
        """Goes on as the journal has it: with the source's prompt at ``place``, but for those that are ``passed``."""
        for arrival, prompt in queued:
            self._queue.push(prompt, arrival)
            self._live.add(prompt.prompt_id)
        self._queue.arrivals = next_arrival - 1
        self._next, self._passed, self._ended = position, set(passed), ended

    def restore_live(self, prompt_ids: Iterable[str], cancelled: Iterable[str]) -> None:
        """Prompts of groups that are open; and names that were cancelled."""
        self._live.update(prompt_ids)
        for name in cancelled:
            self.remember_cancelled(name)

    def _from_queue(self, count: int) -> list[Prompt]:
        taken = []
        for _ in range(min(count, len(self._queue))):
            arrival, prompt = self._queue.pop()
            self._origins[prompt.prompt_id] = (SUBMITTED, arrival)
            taken.append(prompt)
        return taken

    async def _from_source(self, count: int) -> list[Prompt]:
        """Bad prompts are refused one by one, with their reason. A source that ends or fails is not asked again."""
        drawn, failure = await asyncio.to_thread(self._read, min(count, DRAWN_MAX))
        if failure:
            self._fail(failure)
        good: list[Prompt] = []
        refused: list[Origin] = []
        for position, possible in drawn:
            try:
                if isinstance(possible, InvalidValue):
                    raise possible
                if possible.prompt_id in self._live:
                    raise Conflict(
                        "prompt_id",
                        possible.prompt_id,
                        "an id that is neither queued nor being generated",
                        why="is in use",
                    )
            except DoraError as error:
                log.error("prompt refused: %s", error)
                self.refused += 1
                refused.append((position, 0))
                self._refused_in_a_row += 1
                if self._refused_in_a_row == REFUSED_MAX:
                    self._fail(f"{REFUSED_MAX} prompts in a row were refused, the last as {error}")
                continue
            self._refused_in_a_row = 0
            self._live.add(possible.prompt_id)
            self._origins[possible.prompt_id] = (position, 0)
            good.append(possible)
        self._journal.let_go(refused)
        return good

    def _read(self, count: int) -> tuple[list[tuple[int, Prompt | InvalidValue]], str]:
        """Up to ``count`` prompts with their places, and how the source failed, if it has: it may be any program."""
        assert self._source is not None
        drawn: list[tuple[int, Prompt | InvalidValue]] = []
        while len(drawn) < count:
            if self._next in self._passed:
                self._passed.discard(self._next)
                self._next += 1
                continue
            try:
                prompt = self._source.at(self._next)
                if prompt is None:
                    self._dry = True
                    break
                drawn.append((self._next, self.check.checked(prompt)))
            except InvalidValue as error:
                drawn.append((self._next, error))
            except (Exception, SystemExit) as error:
                return drawn, " ".join(told(error).split())[:FAILURE_CHARACTERS_MAX]
            self._next += 1
        return drawn, ""

    def _fail(self, reason: str) -> None:
        """The source gives no more; what it gave, and what is submitted, goes on."""
        name = self._config.prompts.source
        log.error("the prompt source %s has failed: %s; only submitted prompts come from now on", name, reason)
        self._dry, self.failure = True, reason
        self.sources_failed += 1


class _Queue:
    """Prompts that were submitted: the highest priority first, then who came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # -priority, arrival, id; stale where ``_prompts`` says otherwise
        self._prompts: dict[str, tuple[int, Prompt]] = {}  # by id, each with its arrival
        self.arrivals = 0
        self.bytes = 0  # at most QUEUED_BYTES_MAX

    def __len__(self) -> int:
        return len(self._prompts)

    def push(self, prompt: Prompt, arrival: int = 0) -> int:
        """Returns its place in the order of arrivals. ``arrival``: which it had before; 0: it is new."""
        if not arrival:
            self.arrivals += 1
        arrival = arrival or self.arrivals
        self._prompts[prompt.prompt_id] = arrival, prompt
        heappush(self._heap, (-prompt.priority, arrival, prompt.prompt_id))
        self.bytes += memory_bytes(prompt)
        return arrival

    def pop(self) -> tuple[int, Prompt]:
        """The next, with its arrival. The queue must not be empty."""
        while True:
            _, arrival, name = heappop(self._heap)
            if name in self._prompts and self._prompts[name][0] == arrival:
                return self._take(name)

    def remove(self, name: str) -> int | None:
        """Returns its arrival; None where it is not in the queue."""
        if name not in self._prompts:
            return None
        arrival, _ = self._take(name)
        if len(self._heap) > 2 * len(self._prompts) + 64:  # what was taken back must not pile up
            self._heap = [(-prompt.priority, arrival, name) for name, (arrival, prompt) in self._prompts.items()]
            heapify(self._heap)
        return arrival

    def _take(self, name: str) -> tuple[int, Prompt]:
        arrival, prompt = self._prompts.pop(name)
        self.bytes -= memory_bytes(prompt)
        return arrival, prompt


def memory_bytes(prompt: Prompt) -> int:
    """About what a prompt that waits takes."""
    return TOKEN_BYTES * len(prompt.token_ids) + 4 * len(prompt.text) + len(prompt.verifier_json)
