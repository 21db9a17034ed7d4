"""What a host keeps while no service is there: its processes go on for a stated time, then they end."""

import asyncio
from collections.abc import Callable

from dora.host.stay import Stay
from dora.rpc import dora_pb2 as pb


class Keeping:
    """Of at most one stay. ``said`` is told when it is over."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self._stay: Stay | None = None
        self._ending: asyncio.Task[None] | None = None

    def keep(self, stay: Stay, outlives_s: float) -> None:
        """Ends it after so long, unless it is taken before."""
        assert self._stay is None
        self._stay = stay
        self._ending = asyncio.create_task(self._end_after(outlives_s))

    def kept(self) -> pb.KeptHost | None:
        """What a service is told of it; None: there is nothing."""
        return None if self._stay is None else self._stay.kept()

    @property
    def model_digest(self) -> str:
        """Of the model that it uses; empty where there is nothing."""
        return "" if self._stay is None else self._stay.model_digest

    def take(self) -> Stay | None:
        """It goes on, under a service. None: it has ended meanwhile."""
        stay, self._stay = self._stay, None
        if stay is not None and self._ending is not None:
            self._ending.cancel()
        return stay

    async def end(self) -> None:
        """Ends what is kept; returns once nothing of it is left."""
        stay = self.take()
        if stay is not None:
            await stay.close()
        elif self._ending is not None:
            await asyncio.wait([self._ending])

    async def _end_after(self, outlives_s: float) -> None:
        await asyncio.sleep(outlives_s)
        stay, self._stay = self._stay, None
        if stay is not None:
            self._said(f"no service within {outlives_s:g} s: the workers end")
            await stay.close()
