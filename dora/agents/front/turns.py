"""A turn under way. It is sampled to its end whoever reads it, so a client that comes back finds all of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal

from dora.agents.chat.reply import ChatReply, Piece, ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.front.source import Sampled
from dora.data.stops import first_stop
from dora.data.types import FinishReason
from dora.errors import DoraError

NO_LOGPROB: Final = -9999.0  # vLLM's sign for one that is missing or not finite


@dataclass(frozen=True, slots=True)
class Chunk:
    """More of a turn, from its token ``first`` on."""

    first: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    piece: Piece
    is_last: bool


class Texts:
    """The text of one turn as it comes, without the token or the stop string that ended it."""

    def __init__(self, stream: TextStream, parser: ReplyParser, ends: Collection[int], stops: tuple[str, ...]) -> None:
        self._stream = stream
        self._parser = parser
        self._ends = ends
        self._stops = stops
        self._held = max(map(len, stops), default=1) - 1  # characters that may be the beginning of a stop string
        self._text = ""  # decoded, and held back

    def push(self, sampled: Sampled) -> tuple[Piece, ChatReply | None]:
        """Returns new text, and at the end the whole reply."""
        token_ids = sampled.token_ids
        is_last = sampled.finish_reason is not None
        if is_last and not sampled.stop and token_ids and token_ids[-1] in self._ends:
            token_ids = token_ids[:-1]
        before = self._stream.push(token_ids[:-1])
        searched = len(self._text) + len(before)  # a stop string ends within the text of the last token
        self._text += before + self._stream.push(token_ids[-1:])
        if not is_last:
            ready, self._text = self._cut(len(self._text) - self._held)
            return self._parser.push(ready), None
        self._text += self._stream.end()
        found = first_stop(self._text, self._stops, searched) if sampled.stop else None
        ready, _ = self._cut(len(self._text) if found is None else found[0])
        first = self._parser.push(ready)
        last, reply = self._parser.end()
        return Piece(first.content + last.content, first.reasoning + last.reasoning), reply

    def _cut(self, at: int) -> tuple[str, str]:
        at = max(at, 0)
        return self._text[:at], self._text[at:]


@dataclass(slots=True, eq=False)
class RunningTurn:
    """A turn of one branch. ``prompt_token_ids`` is everything before it. ``texts`` is None if only tokens count."""

    version: int
    prompt_token_ids: tuple[int, ...]
    texts: Texts | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | Literal["abort"] | None = None
    stop: str = ""
    prompt_logprobs: Sequence[float] = ()  # of the prompt's tokens but the first, if they were asked for
    reply: ChatReply | None = None
    error: DoraError | None = None
    prefix_break: str = ""  # why its history was given anew: a key of BREAKS
    came: Callable[[], None] | None = None  # is called with the first token
    _chunks: list[Chunk] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    async def run(self, pieces: AsyncGenerator[Sampled]) -> None:
        """Reads the turn to its end. A failure of the service is kept for the readers."""
        try:
            async with aclosing(pieces):
                async for sampled in pieces:
                    if self.has_ended:  # it was aborted
                        return
                    self.add(sampled)
                    if sampled.finish_reason is not None:
                        return
        except DoraError as error:
            self.error = error
        finally:
            if not self.has_ended:
                self.error = DoraError("the turn was broken off")
            self._announce()

    def abort(self) -> None:
        """Ends the turn for its readers with what it has."""
        if not self.has_ended:
            _, self.reply = (Piece(), None) if self.texts is None else self.texts.push(Sampled((), (), "length"))
            self.finish_reason = "abort"
            self._chunks.append(Chunk(len(self.token_ids), (), (), Piece(), True))
            self._announce()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yields the turn from its beginning on. Raises what it failed with."""
        seen = 0
        while True:
            changed = self._changed
            while seen < len(self._chunks):
                seen += 1
                yield self._chunks[seen - 1]
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                return
            await changed.wait()

    async def ended(self) -> None:
        """Waits for the end. Raises what the turn failed with."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    def add(self, sampled: Sampled) -> None:
        piece, reply = (Piece(), None) if self.texts is None else self.texts.push(sampled)
        is_last = sampled.finish_reason is not None
        if self.came is not None and sampled.token_ids and not self.token_ids:
            self.came()
        self._chunks.append(Chunk(len(self.token_ids), sampled.token_ids, sampled.logprobs, piece, is_last))
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.prompt_logprobs = self.prompt_logprobs or sampled.prompt_logprobs
        if is_last:
            self.finish_reason, self.stop, self.reply = sampled.finish_reason, sampled.stop, reply
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.has_ended:
            self._ended.set()
