"""Programs that open and close clients in ways that gRPC, forks and the interpreter's end make hard: ``main(NAME)``.

Each is run as a process of its own, which must end with 0 and say nothing on stderr (test_sync_reopening.py).
"""

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import dora
import dora.sync
from dora.data.types import Prompt
from dora.errors import Conflict, DoraError

ADDRESS, TOKEN, WEIGHTS = sys.argv[2:5] if __name__ == "__main__" else ("", "", "")
CYCLES: Final = 12
KEPT: Final[list[Any]] = []
NUMBERS: Final = itertools.count()


def trainer(address: str = ADDRESS, **options: Any) -> "dora.sync.Trainer":
    return dora.sync.Trainer(address, token=TOKEN, take_over=True, **options)


def train(steps: int = 1) -> None:
    with trainer() as opened:
        for step in itertools.islice(opened.steps(groups=2), steps):
            for _ in step:
                pass
            step.commit(weights=WEIGHTS, wait=True)


def submit(address: str = ADDRESS) -> None:
    with dora.sync.Prompts(address, TOKEN) as prompts, contextlib.suppress(DoraError):
        prompts.submit([Prompt(f"p{os.getpid()}-{next(NUMBERS)}", "toy", (1,))])


def opened_again() -> None:
    for _ in range(CYCLES):
        train()
        submit()


def left_within_a_step() -> None:
    for _ in range(CYCLES):
        with trainer() as opened:
            next(next(opened.steps(groups=2)))


def ended_by_an_error() -> None:
    for _ in range(CYCLES):
        with contextlib.suppress(ZeroDivisionError), trainer() as opened:
            step = next(opened.steps(groups=2))
            for _ in step:
                pass
            step.commit(weights=WEIGHTS)
            raise ZeroDivisionError


def beside_loops_of_the_user() -> None:
    async def once() -> None:
        async with dora.Trainer(ADDRESS, token=TOKEN, take_over=True) as opened:
            async for step in opened.steps(2):
                await anext(step)
                break

    for _ in range(CYCLES):
        asyncio.run(once())
        left_once()
        submit()


def left_once() -> None:
    with trainer() as opened:
        next(opened.steps(groups=2))


def in_threads() -> None:
    def run(address: str) -> None:
        for _ in range(CYCLES):
            submit(address)

    threads = [threading.Thread(target=run, args=(address,)) for address in (ADDRESS, "127.0.0.1:1") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train()


def never_closed() -> None:
    for _ in range(3):
        opened = trainer().open()
        steps = opened.steps(groups=2)
        KEPT[:] = [opened, steps, next(steps)]


def closed_at_exit() -> None:
    never_closed()
    atexit.register(KEPT[0].close)


def at_work_at_exit() -> None:
    """A daemon thread is within a call, or between two, when the interpreter ends."""
    threading.Thread(target=lambda: [submit() for _ in itertools.count()], daemon=True).start()
    threading.Thread(target=lambda: train(1 << 30), daemon=True).start()
    time.sleep(0.5)


def at_work_while_executors_end() -> None:
    """As before; the interpreter has closed its executors, and waits for a user's."""
    at_work_at_exit()
    ThreadPoolExecutor(1).submit(time.sleep, 0.5)


def interrupted() -> None:
    main, within = threading.main_thread().ident or 0, threading.Event()

    def interrupt() -> None:
        within.wait()
        signal.pthread_kill(main, signal.SIGINT)

    for _ in range(3):
        within.clear()
        threading.Thread(target=interrupt).start()
        with contextlib.suppress(KeyboardInterrupt), trainer() as opened:
            within.set()
            for step in opened.steps(groups=2):
                next(step)
                signal.pause()
    train()


def forked_while_open() -> None:
    with trainer() as opened:
        next(opened.steps(groups=2))
        assert forked(lambda: None) == 0
    opened_again()


def forked_while_closed() -> None:
    """gRPC does not survive a fork: a client of the fork would wait for ever."""

    def refused() -> None:
        try:
            dora.sync.Prompts(ADDRESS, TOKEN).open()
        except Conflict:
            return
        raise AssertionError

    train()
    assert forked(refused) == 0
    opened_again()


def forked(work: Callable[[], None]) -> int:
    process_id = os.fork()
    if not process_id:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def of_a_service_that_dies() -> None:
    """It is ended while a stream is open, when this is said."""
    with contextlib.suppress(DoraError), trainer(connect_s=0.2, reconnect_s=0.2) as opened:
        next(opened.steps(groups=2))
        print("end it", flush=True)
        sys.stdin.readline()
    for _ in range(CYCLES):
        submit()


PROGRAMS: Final = (
    opened_again,
    beside_loops_of_the_user,
    at_work_while_executors_end,
    forked_while_closed,
    at_work_at_exit,
    left_within_a_step,
    ended_by_an_error,
    in_threads,
    never_closed,
    closed_at_exit,
    interrupted,
    forked_while_open,
    of_a_service_that_dies,
)

if __name__ == "__main__":
    globals()[sys.argv[1]]()
