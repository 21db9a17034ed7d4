"""The prompt feed: what was submitted over gRPC first, then the prompt source. Bounded."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from dora.config import Config
from dora.errors import Conflict, DoraError, InvalidValue, told
from dora.orchestrator.prompt_check import PromptCheck
from dora.rpc.errors import LimitExceeded
from dora.types import Prompt

log = logging.getLogger("dora.prompts")

DRAWN_MOST = 4096  # prompts read from the source at once
REFUSED_MOST = 4096  # in a row: a source may have no end
QUEUED_BYTES_MOST = 512 << 20  # of what was submitted and waits
FAILURE_CHARACTERS_MOST = 400
TOKEN_BYTES = 40  # of a token id, as Python holds it in a tuple


class PromptFeed:
    """``live`` prompt ids are queued, drawn or in an open group: an id may come again once its group is committed."""

    def __init__(self, config: Config, source: Iterator[Prompt] | None, check: PromptCheck | None = None) -> None:
        self._config = config
        self.check = PromptCheck(config) if check is None else check
        self._source = source
        self._queue: deque[Prompt] = deque()  # at most service.prompts_queued_max
        self._queued_bytes = 0  # at most QUEUED_BYTES_MOST
        self._arrived = asyncio.Event()
        self._live: set[str] = set()
        self.refused = 0  # prompts of the source that no engine could generate
        self._refused_in_a_row = 0
        self.failure = ""  # why the source gives no more, though it has not ended
        self.sources_failed = 0
        self.closed = False  # no further prompt is taken in: the service drains

    def __len__(self) -> int:
        return len(self._queue)

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
        more_bytes = sum(map(_bytes, possible))
        if self._queued_bytes + more_bytes > QUEUED_BYTES_MOST:
            allowed = f"at most {QUEUED_BYTES_MOST - self._queued_bytes} now (queue of {QUEUED_BYTES_MOST})"
            raise LimitExceeded("prompts: bytes in memory", more_bytes, allowed)
        self._live.update(names)
        self._queued_bytes += more_bytes
        self._queue.extend(possible)
        self._arrived.set()
        return self._config.service.prompts_queued_max - len(self._queue)

    def check_room(self, count: int) -> None:
        """Raises Conflict where no prompts are taken in any more, LimitExceeded where ``count`` find no place."""
        limit = self._config.service.prompts_queued_max
        if self.closed:
            raise Conflict("prompts", count, "0, as the prompts have ended or the service drains", why="came too late")
        if len(self._queue) + count > limit:
            raise LimitExceeded("prompts", count, f"at most {limit - len(self._queue)} now (queue of {limit})")

    async def take(self, count: int) -> tuple[list[Prompt], bool]:
        """1 to ``count`` prompts, waiting for the first; True with none left: there will be no more.

        A source that fails gives no more; what is submitted is waited for then.
        """
        while not self.closed:
            taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
            self._queued_bytes -= sum(map(_bytes, taken))
            if not taken and self._source is not None:
                taken = await self._from_source(count)
            if taken:
                return taken, False
            if self._source is not None or self._queue:  # something was submitted while the source was read
                continue
            if self._config.prompts != "none" and not self.failure:
                self.closed = True
            else:
                self._arrived.clear()
                await self._arrived.wait()
        return [], True

    def close(self) -> None:
        self.closed = True
        self._arrived.set()

    def release(self, prompt_id: str) -> None:
        """The prompt's group was committed or cancelled."""
        self._live.discard(prompt_id)

    async def _from_source(self, count: int) -> list[Prompt]:
        """Bad prompts are refused one by one, with their reason. A source that ends or fails is not asked again."""
        count = min(count, DRAWN_MOST)
        drawn, failure = await asyncio.to_thread(self._read, count)
        if failure:
            self._fail(failure)
        elif len(drawn) < count:
            self._source = None
        good: list[Prompt] = []
        for possible in drawn:
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
                self._refused_in_a_row += 1
                if self._refused_in_a_row == REFUSED_MOST:
                    self._fail(f"{REFUSED_MOST} prompts in a row were refused, the last as {error}")
                continue
            self._refused_in_a_row = 0
            self._live.add(possible.prompt_id)
            good.append(possible)
        return good

    def _read(self, count: int) -> tuple[list[Prompt | InvalidValue], str]:
        """Up to ``count`` prompts, and how the source has failed, if it has: it may be anybody's program."""
        drawn: list[Prompt | InvalidValue] = []
        assert self._source is not None
        try:
            for prompt in islice(self._source, count):
                drawn.append(self._attempted(prompt))
        except (Exception, SystemExit) as error:
            return drawn, " ".join(told(error).split())[:FAILURE_CHARACTERS_MOST]
        return drawn, ""

    def _fail(self, reason: str) -> None:
        """The source gives no more; what it gave, and what is submitted, goes on."""
        name = self._config.prompts
        log.error("the prompt source %s has failed: %s; only submitted prompts come from now on", name, reason)
        self._source, self.failure = None, reason
        self.sources_failed += 1

    def _attempted(self, prompt: Prompt) -> Prompt | InvalidValue:
        """The prompt, checked, or why it is refused."""
        try:
            return self.check.checked(prompt)
        except InvalidValue as error:
            return error


def _bytes(prompt: Prompt) -> int:
    """About what a queued prompt takes."""
    return TOKEN_BYTES * len(prompt.token_ids) + 4 * len(prompt.text) + len(prompt.verifier_json)
