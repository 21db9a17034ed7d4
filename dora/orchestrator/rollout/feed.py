"""The prompt feed: submitted prompts first, then the prompt source. Bounded."""

import asyncio
import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from dora.config import Config
from dora.data.types import Prompt
from dora.errors import Conflict, DoraError, InvalidValue, described
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.prompts.source import Position, PromptSource

log = logging.getLogger("dora.prompts")

DRAWN_MAX = 256  # prompts per read of the source and per offer to the core: the event loop stops for them
REFUSED_MAX = 4096  # consecutive refusals: a source may have no end
FAILURE_CHARACTERS_MAX = 400


@dataclass(frozen=True, slots=True)
class _Reading:
    """Holds prompts from the source, or the reasons of their refusal, with their positions."""

    found: list[tuple[int, Prompt | InvalidValue]]
    next_position: int
    is_dry: bool = False  # the source has ended
    failure: str = ""  # the source's error; user code may raise anything


class PromptFeed:
    """Fills the ledger from clients and from the source, and draws from it."""

    def __init__(
        self,
        config: Config,
        source: PromptSource | None,
        check: PromptCheck | None = None,
        journal: Journal | None = None,
    ) -> None:
        """If ``source`` is None, there are only submitted prompts."""
        self._config = config
        self.ledger = PromptLedger(Journal() if journal is None else journal, config.service.prompts_queued_max)
        self.check = PromptCheck(config) if check is None else check
        self._source = source
        self._dry = source is None
        # waits for submitted prompts after the source's end
        self._waits = config.prompts.source == "none" or config.prompts.then == "wait"
        self._arrived = asyncio.Event()
        self.refused = 0  # prompts of the source that no engine could generate
        self._refused_in_a_row = 0
        self.failure = ""  # the error that ended the source early
        self.sources_failed = 0
        self.closed = False  # accepts no further prompts: the service drains, or the prompts have ended

    def __len__(self) -> int:
        return self.ledger.queued

    @property
    def position(self) -> Position:
        return self._source.position(self.ledger.next_position) if self._source is not None else Position(0, 0)

    @property
    def total(self) -> int | None:
        """Returns the prompts of the source in all epochs, or None if it is endless or clients submit them."""
        epochs = self._config.prompts.epochs
        return self._source.epoch_prompts * epochs or None if self._source is not None else None

    def submit(self, prompts: Sequence[Prompt]) -> int:
        """Checks and queues all prompts or none; returns the free places. Raises for a full queue, an id in use, and an
        impossible prompt.
        """
        self.check_room(len(prompts))
        return self.queue([self.check.checked(prompt) for prompt in prompts])

    def queue(self, possible: Sequence[Prompt]) -> int:
        """Queues all or none of the checked prompts; returns the free places. Raises like ``submit``."""
        self.check_room(len(possible))
        free = self.ledger.submit(possible)
        self._arrived.set()
        return free

    def check_room(self, count: int) -> None:
        """Raises Conflict if the feed is closed, LimitExceeded if the queue has no room for ``count`` prompts."""
        if self.closed and not self.ledger.ended:
            allowed = "0, because the prompts have ended (prompts.then = wait would keep the service open) or it drains"
            raise Conflict("prompts", count, allowed, why="came too late")
        self.ledger.check_room(count)

    async def take(self, count: int) -> tuple[list[Prompt], bool]:
        """Returns 1 to ``count`` prompts, waiting for the first. At the end, returns no prompts and True.

        Submitted prompts come first, the highest priority before others, equal ones in order of arrival. After the
        source has failed, only submitted prompts come.
        """
        while not self.closed:
            drawn = self.ledger.draw(count)
            if not drawn and not self._dry:
                drawn = await self._from_source(count)
            if drawn:
                return drawn, False
            if not self._dry or self.ledger.queued:  # something was submitted while the source was read
                continue
            if self.ledger.ended or not (self._waits or self.failure):
                self.closed = True
            else:
                self._arrived.clear()
                await self._arrived.wait()
        return [], True

    def end(self) -> int:
        """Ends submissions. Returns the number of queued prompts, which are still generated. May be repeated."""
        queued = self.ledger.end()
        self._arrived.set()
        return queued

    def close(self) -> None:
        self.closed = True
        self._arrived.set()

    async def _from_source(self, count: int) -> list[Prompt]:
        """Reads from the source and refuses bad prompts one by one. An ended or failed source is not read again."""
        ledger = self.ledger
        reading = await asyncio.to_thread(self._read, min(count, DRAWN_MAX), ledger.next_position, ledger.passed)
        ledger.read_up_to(reading.next_position)
        self._dry = self._dry or reading.is_dry
        if reading.failure:
            self._fail(reading.failure)
        good: list[Prompt] = []
        refused: list[int] = []
        for position, possible in reading.found:
            try:
                if isinstance(possible, InvalidValue):
                    raise possible
                ledger.read(position, possible)
            except InvalidValue as error:
                self._refuse(error)
                refused.append(position)
            else:
                self._refused_in_a_row = 0
                good.append(possible)
        ledger.refuse(refused)
        return good

    def _refuse(self, error: DoraError) -> None:
        log.error("prompt refused: %s", error)
        self.refused += 1
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSED_MAX:
            self._fail(f"{REFUSED_MAX} prompts in a row were refused; the last: {error}")

    def _read(self, count: int, position: int, passed: Set[int]) -> _Reading:
        """Reads up to ``count`` prompts from ``position`` on, without those ``passed``. Runs in a thread."""
        assert self._source is not None
        found: list[tuple[int, Prompt | InvalidValue]] = []
        while len(found) < count:
            if position not in passed:
                try:
                    prompt = self._source.at(position)
                    if prompt is None:
                        return _Reading(found, position, is_dry=True)
                    found.append((position, self.check.checked(driven(prompt, self._config))))
                except InvalidValue as error:
                    found.append((position, error))
                except (Exception, SystemExit) as error:
                    return _Reading(
                        found, position, failure=" ".join(described(error).split())[:FAILURE_CHARACTERS_MAX]
                    )
            position += 1
        return _Reading(found, position)

    def _fail(self, reason: str) -> None:
        """Ends reading from the source. Prompts that it gave, and submitted ones, continue."""
        name = self._config.prompts.source
        log.error("the prompt source %s has failed: %s; from now on only submitted prompts are generated", name, reason)
        self._dry, self.failure = True, reason
        self.sources_failed += 1


def driven(prompt: Prompt, config: Config) -> Prompt:
    """Returns a prompt for the service's environment, which gives its tokens, unless it names another one."""
    spec = config.environment.spec
    return replace(prompt, environment=spec, token_ids=()) if spec and prompt.environment in ("", spec) else prompt
