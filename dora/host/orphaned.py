"""Keeps a host's processes for a stated time without a service, then ends them."""

import asyncio
from collections.abc import Callable

from dora.host.runtime import HostRuntime
from dora.rpc import dora_pb2 as pb


class Orphaned:
    """Keeps at most one runtime. ``said`` is called when the time is over."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self._runtime: HostRuntime | None = None
        self._ending: asyncio.Task[None] | None = None

    def keep(self, runtime: HostRuntime, orphan_timeout_s: float) -> None:
        """Keeps a runtime and ends it after the timeout unless it is taken before."""
        assert self._runtime is None
        self._runtime = runtime
        self._ending = asyncio.create_task(self._end_after(orphan_timeout_s))

    def kept(self) -> pb.KeptHost | None:
        return None if self._runtime is None else self._runtime.kept()

    @property
    def model_digest(self) -> str:
        return "" if self._runtime is None else self._runtime.model_digest

    def take(self) -> HostRuntime | None:
        """Hands the runtime to a service. Returns None if it has ended."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self._ending is not None:
            self._ending.cancel()
        return runtime

    async def end(self) -> None:
        runtime = self.take()
        if runtime is not None:
            await runtime.close()
        elif self._ending is not None:
            await asyncio.wait([self._ending])

    async def _end_after(self, orphan_timeout_s: float) -> None:
        await asyncio.sleep(orphan_timeout_s)
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            self._said(f"no service within {orphan_timeout_s:g} s: the workers end")
            await runtime.close()
