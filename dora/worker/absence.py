"""A worker or pool without its service: it lives on for a stated time, and connects again and again."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from dora.errors import Conflict, DoraError
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.session.link import OPEN_TIMEOUT_S, Link

log = logging.getLogger("dora.worker")

RETRY_S: Final = 0.2  # doubled at each attempt, up to
RETRY_MOST_S: Final = 1.0
IDLE_S: Final = 0.05  # between two looks where there is nothing to do meanwhile

Connect = Callable[[], Link]  # a new attempt, whose hello says what is held now
Meanwhile = Callable[[], bool]  # does something in the meantime; False: there was nothing to do


def await_service(
    connect: Connect,
    meanwhile: Meanwhile,
    stop: threading.Event,
    orphan_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Link, pb.Welcome] | None:
    """The link to a service that has said welcome; None: told to stop meanwhile.

    Raises ServiceUnavailable where none has within ``orphan_timeout_s``, and the refusal of one that does not take us.
    """
    ends_s, pause_s = clock() + orphan_timeout_s, RETRY_S
    last: DoraError = ServiceUnavailable("the service is gone")
    while not stop.is_set():
        link = connect()
        link.begin()
        try:
            welcome = _welcome(link, meanwhile, stop, clock)
            if welcome is not None:
                return link, welcome
        except (ServiceUnavailable, Conflict) as error:
            if isinstance(error, Conflict) and error.field not in ("worker_id", "pool_id"):
                link.close()
                raise
            last = error  # it is not there yet, or has not noticed yet that we had gone
        link.close()
        again_s = clock() + pause_s
        pause_s = min(2.0 * pause_s, RETRY_MOST_S)
        while clock() < again_s and not stop.is_set():
            if not meanwhile():
                stop.wait(IDLE_S)
        if clock() >= ends_s:
            raise ServiceUnavailable(f"no service within {orphan_timeout_s:g} s ({last})")
    return None


def _welcome(link: Link, meanwhile: Meanwhile, stop: threading.Event, clock: Callable[[], float]) -> pb.Welcome | None:
    """What it says to this attempt; None: nothing in time."""
    ends_s = clock() + OPEN_TIMEOUT_S
    while clock() < ends_s and not stop.is_set():
        command = link.take(0.0 if meanwhile() else IDLE_S)
        if command is not None:
            if not command.HasField("welcome"):
                raise ServiceUnavailable(f"it said {command.WhichOneof('kind')}, not welcome")
            log.info("the service is there again")
            return command.welcome
    return None
