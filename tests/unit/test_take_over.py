"""Attachment of a trainer while another one lives, and the messages to the replaced one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from dora.errors import Conflict, InvalidValue
from dora.orchestrator.rollout.presence import TrainerPresence, clock_time
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused
from tests.unit.test_runtime import Shell, shell

__all__ = ["shell"]


def attaching(name: str, **options: Any) -> pb.AttachRequest:
    return pb.AttachRequest(client_name=name, groups_per_step=4, **options)


@asynccontextmanager
async def living(shell: Shell, name: str, **options: Any) -> AsyncIterator[pb.AttachReply]:
    """A trainer that holds its call open."""
    reply = await shell.trainer.Attach(attaching(name, **options), None)
    call = shell.trainer.KeepAlive(pb.KeepAliveRequest(trainer_epoch=reply.trainer_epoch), None)
    async with aclosing(call):
        await anext(call)
        yield reply


async def test_a_living_trainer_is_not_replaced_unasked(shell: Shell) -> None:
    async with living(shell, "first", client_id=b"1") as first:
        since = clock_time(shell.runtime.trainers.presence.since)
        with refused(Conflict, field="trainer", value="first", names=(since,)):
            await shell.trainer.Attach(attaching("second", client_id=b"2"), None)
        assert shell.runtime.trainers.presence.name == "first"
        assert first.trainer_epoch == shell.state.trainer_epoch


async def test_one_that_has_left_is(shell: Shell) -> None:
    async with living(shell, "first", client_id=b"1") as first:
        pass
    reply = await shell.trainer.Attach(attaching("second", client_id=b"2"), None)
    assert reply.trainer_epoch == first.trainer_epoch + 1


async def test_the_same_trainer_may_attach_again(shell: Shell) -> None:
    """For example because the reply to its first attempt was lost."""
    async with living(shell, "first", client_id=b"1") as first:
        reply = await shell.trainer.Attach(attaching("first", client_id=b"1"), None)
        assert reply.trainer_epoch == first.trainer_epoch + 1


async def test_a_trainer_of_before_a_restart_is_attached_from_its_next_call_on(shell: Shell) -> None:
    """Its stream says so, without a name; its open call brings that, and keeps others out."""
    first = await shell.trainer.Attach(attaching("mine", client_id=b"1"), None)
    trainers = shell.runtime.trainers
    trainers.presence = TrainerPresence()  # as a restart makes it
    assert trainers.shown() == ""
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=first.trainer_epoch, step=0), None)
    reading = asyncio.create_task(anext(stream))
    await shell.until(lambda: trainers.stream is not None)
    assert trainers.shown() == "trainer"
    call = shell.trainer.KeepAlive(
        pb.KeepAliveRequest(trainer_epoch=first.trainer_epoch, client_name="mine", client_id=b"1"), None
    )
    async with aclosing(call):
        await anext(call)
        assert trainers.shown() == "mine"
        with refused(Conflict, field="trainer", value="mine"):
            await shell.trainer.Attach(attaching("other", client_id=b"2"), None)
    reading.cancel()
    with refused(InvalidValue, field="client_id", value="65 bytes"):
        request = pb.KeepAliveRequest(trainer_epoch=first.trainer_epoch, client_id=bytes(65))
        await anext(shell.trainer.KeepAlive(request, None))


async def test_without_an_id_nobody_is_the_same(shell: Shell) -> None:
    async with living(shell, "first"):
        with refused(Conflict, field="trainer", value="first"):
            await shell.trainer.Attach(attaching("first"), None)


async def test_the_loser_hears_who_took_over_and_when(shell: Shell) -> None:
    async with living(shell, "first", client_id=b"1") as first:
        second = await shell.trainer.Attach(attaching("second", client_id=b"2", take_over=True), None)
        request = pb.StreamStepRequest(trainer_epoch=first.trainer_epoch, step=0)
        names = ("second", clock_time(shell.runtime.trainers.presence.since))
        with refused(Conflict, field="trainer_epoch", value=first.trainer_epoch, names=names):
            await anext(shell.trainer.StreamStep(request, None))
        assert shell.runtime.trainers.presence.name == "second" and second.trainer_epoch == first.trainer_epoch + 1


async def test_an_id_is_bounded(shell: Shell) -> None:
    with refused(InvalidValue, field="client_id", value="65 bytes"):
        await shell.trainer.Attach(attaching("first", client_id=bytes(65)), None)
