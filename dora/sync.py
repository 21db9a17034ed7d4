"""Synchronous clients for training loops: the same names and meanings, without ``await``.

    with dora.sync.Trainer("127.0.0.1:7070", token=...) as trainer:
        for step in trainer.steps(groups=16):
            for group in step:              # whole prompt groups, as they finish
                ...
            step.commit(weights=model)      # acknowledges the batch and publishes the next version

They drive the asynchronous clients of :mod:`dora.client` in one event loop in a background thread, so they work beside
a running event loop (Jupyter) and under torchrun. A client belongs to the process that opened it; in a fork each call
is refused. Ctrl-C ends the wait and leaves the client usable; no group in transit is lost. A commit is not interrupted:
the first Ctrl-C takes effect after the commit, a second one at once.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from dora import client
from dora.client import Attachment, Commit, Evaluation
from dora.client.background import Background
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Canary
from dora.rpc.channel import MAX_MESSAGE_BYTES
from dora.tls import Tls

if TYPE_CHECKING:
    from dora.client.publication import Weights
    from dora.data.types import Prompt

Asynchronous = TypeVar("Asynchronous", client.Trainer, client.Prompts)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

__all__ = ["EvaluationSeries", "Prompts", "Step", "Trainer"]


class Client(Generic[Asynchronous]):
    """A synchronous client around an asynchronous one. In a notebook, ``open()`` and ``close()`` replace ``with``."""

    def __init__(self, kind: str, address: str, asynchronous: Asynchronous) -> None:
        self._client: Asynchronous = asynchronous
        self._background = Background(kind, address)

    def open(self) -> Self:
        """Opens the client, as ``with`` does. Raises Conflict if it is open, or in a fork."""
        self._background.open()
        try:
            self._background.run(self._client.__aenter__)
        except BaseException:
            self._background.close()
            raise
        return self

    def close(self) -> None:
        """Closes the client, as ``with`` does. May be repeated."""
        self._close()

    def _close(self, *exception: object) -> None:
        if self._background.opened_here:
            try:
                self._background.run(lambda: self._client.__aexit__(*exception))
            finally:
                self._background.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self._close(*exception)

    def __repr__(self) -> str:
        return f"<dora.sync of {self._client!r}>"


def _blocking(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client[Any], Parameters], Result]:
    def call(self: Client[Any], /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        return self._background.run(lambda: method(self._client, *arguments, **options))

    update_wrapper(call, method)
    return call


class Trainer(Client[client.Trainer]):
    """``dora.Trainer`` for a synchronous loop; see there. Used by one thread at a time."""

    def __init__(
        self,
        address: str,
        *,
        token: str | Path = "",
        name: str = "trainer",
        connect_s: float = 60.0,
        reconnect_s: float = 60.0,
        tokenizer: str | Path | None = None,
        take_over: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        replay: client.ReplayBuffer | None = None,
    ) -> None:
        """As in ``dora.Trainer``."""
        trainer = client.Trainer(
            address,
            token=token,
            name=name,
            connect_s=connect_s,
            reconnect_s=reconnect_s,
            tokenizer=tokenizer,
            take_over=take_over,
            max_message_bytes=max_message_bytes,
            tls=tls,
            replay=replay,
        )
        super().__init__("trainer", address, trainer)

    attach = _blocking(client.Trainer.attach)

    @property
    def attachment(self) -> Attachment:
        """The service's reply to the latest attach. Raises Conflict before."""
        return self._client.attachment

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        """As in ``dora.Trainer``."""
        return self._client.decode(token_ids, special_tokens)

    def steps(self, groups: int = 0) -> "Iterator[Step]":
        """As in ``dora.Trainer``: the steps from the first uncommitted one until the prompts are exhausted."""
        steps = self._client.steps(groups)
        while (step := self._background.run(lambda: _next(steps))) is not None:
            yield Step(step, self._background)

    settled = _blocking(client.Trainer.settled)

    def republish(self, weights: "Weights", *, version: int, canary: Canary | None = None) -> None:
        """As in ``dora.Trainer``: publishes a rejected version again."""
        self._background.run(lambda: self._client.republish(weights, version=version, canary=canary), whole=True)


async def _next(steps: Any) -> client.Step | None:
    return await anext(steps, None)


class Step:
    """``dora.client.Step`` for a synchronous loop; see there."""

    def __init__(self, step: client.Step, background: Background) -> None:
        self._step, self._background = step, background

    @property
    def number(self) -> int:
        return self._step.number

    @property
    def version(self) -> int:
        """The newest policy version, which this step improves."""
        return self._step.version

    @property
    def end_of_prompts(self) -> bool:
        """Known after iterating: the step ended short, and no other follows."""
        return self._step.end_of_prompts

    @property
    def groups_taken(self) -> int:
        return self._step.groups_taken

    @property
    def committed(self) -> bool:
        return self._step.committed

    @property
    def waited_s(self) -> float:
        """The time spent waiting for its groups so far, including the first one before the step existed."""
        return self._step.waited_s

    def __repr__(self) -> str:
        return repr(self._step)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TrajectoryGroup:
        """Raises as the asynchronous one does."""
        if not self.has_groups():
            raise StopIteration
        return self._step.take()  # taken here, so that an interrupted wait loses none

    def has_groups(self) -> bool:
        """Waits until there is a group to take; False when there are no more."""
        return self._step.has_come or self._background.run(self._step.has_groups)

    def replays(self) -> tuple[TrajectoryGroup, ...]:
        """As in ``dora.client.Step``: groups of earlier steps to train on once more in this one."""
        return self._step.replays()

    def commit(
        self,
        weights: "Weights",
        *,
        metrics: Mapping[str, float] | None = None,
        canary: Canary | None = None,
        waited_s: float | None = None,
        wait: bool = False,
    ) -> Commit:
        """As in ``dora.client.Step``: acknowledges the step's groups and publishes ``weights`` as the next version."""
        return self._background.run(
            lambda: self._step.commit(weights, metrics=metrics, canary=canary, waited_s=waited_s, wait=wait),
            whole=True,
        )


class EvaluationSeries:
    """``dora.client.EvaluationSeries`` for a synchronous loop; see there."""

    def __init__(self, series: client.EvaluationSeries, background: Background) -> None:
        self._series = series
        self._background = background

    @property
    def done(self) -> dict[int, Evaluation]:
        """The evaluations that have ended, by version."""
        return self._series.done

    def at(self, step: int) -> None:
        """Starts the evaluation of version ``step``, if it is the turn of that version."""
        self._background.run(lambda: self._series.at(step))

    def finish(self) -> dict[int, Evaluation]:
        """Waits for all evaluations that have begun. Returns them by version."""
        return self._background.run(self._series.finish)


class Prompts(Client[client.Prompts]):
    """``dora.Prompts`` for synchronous code; see there."""

    def __init__(
        self,
        address: str,
        token: str | Path = "",
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
    ) -> None:
        """As in ``dora.Prompts``."""
        own = client.Prompts(address, token, max_message_bytes=max_message_bytes, tls=tls)
        super().__init__("prompts", address, own)

    submit = _blocking(client.Prompts.submit)
    end = _blocking(client.Prompts.end)

    def evaluate(
        self,
        prompts: "Iterable[Prompt | str | Mapping[str, Any]]",
        *,
        version: int | None = None,
        share: float = 0.0,
        name: str = "",
    ) -> Evaluation:
        """As in ``dora.Prompts``, but waits for its end; the result is its ``whole()``."""
        return self._background.run(lambda: self._whole(prompts, version, share, name))

    def every(
        self,
        steps: int,
        prompts: "Iterable[Prompt | str | Mapping[str, Any]]",
        *,
        share: float = 0.0,
        name: str = "",
    ) -> EvaluationSeries:
        """As of ``dora.Prompts``."""
        return EvaluationSeries(self._client.every(steps, prompts, share=share, name=name), self._background)

    async def _whole(self, prompts: Iterable[Any], version: int | None, share: float, name: str) -> Evaluation:
        evaluation = self._client.evaluate(prompts, version=version, share=share, name=name)
        try:
            return await evaluation.whole()
        finally:
            evaluation.cancel()

    cancel = _blocking(client.Prompts.cancel)
