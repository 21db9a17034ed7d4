"""The synchronous clients under the asynchronous ones' contract: each call runs in a thread, and is awaited."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import dora

_END = object()


class _Awaited:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._client.__enter__)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self._client.__exit__, *exception)


class AwaitedTrainer(_Awaited):
    """A ``dora.sync.Trainer``."""

    def __init__(self, trainer: "dora.sync.Trainer") -> None:
        super().__init__(trainer)

    async def attach(self, groups: int = 0) -> Any:
        return await asyncio.to_thread(self._client.attach, groups)

    async def settled(self) -> None:
        await asyncio.to_thread(self._client.settled)

    async def republish(self, *arguments: Any, **options: Any) -> None:
        await asyncio.to_thread(lambda: self._client.republish(*arguments, **options))

    @property
    def attachment(self) -> Any:
        return self._client.attachment

    async def steps(self, groups: int = 0) -> AsyncIterator["AwaitedStep"]:
        steps = self._client.steps(groups)
        while (step := await asyncio.to_thread(next, steps, _END)) is not _END:
            yield AwaitedStep(step)


class AwaitedStep:
    """A ``dora.sync.Step``."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if (group := await asyncio.to_thread(next, self._step, _END)) is _END:
            raise StopAsyncIteration
        return group

    async def commit(self, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(lambda: self._step.commit(*arguments, **options))


class AwaitedPrompts(_Awaited):
    """A ``dora.sync.Prompts``."""

    def __init__(self, prompts: "dora.sync.Prompts") -> None:
        super().__init__(prompts)

    async def submit(self, prompts: Any) -> Any:
        return await asyncio.to_thread(self._client.submit, prompts)
