"""The supervisor of one user process.

    python -m dora.rewards.supervisor KIND MODULE:FUNCTION LOG_BYTES LIMITS [FOLDER]

    service ──stdin──▶ supervisor ──calls────▶ user process
            ◀──stdout─            ◀──verdicts─      │
            ◀──stderr─ (bounded)  ◀─────prints──────┘

No user code runs here. The supervisor forks the user process, passes one call at a time, limits its time, and passes on
a bounded part of its output. It ends the user process with all that it started after a call that took too long, after
an unexpected answer, at a limit (limits.py), and when stdin ends, because the service has then ended.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

from dora.rewards import frames
from dora.rewards.frames import CALLS, ENDED, LASTED_S, START_TIMEOUT_S, TICKET
from dora.rewards.function import Kind
from dora.rewards.limits import Usage, UserLimits
from dora.rewards.process import serve_calls
from dora.rewards.running_time import RunningTime
from dora.rewards.verdict import Message
from dora.system.process_tree import adopt_orphans, die_with, end_descendants, reap

READ_BYTES: Final = 64 << 10
IDLE_LOOK_S: Final = 1.0  # between two looks at a user process that has no call
ANSWER_WAITS_S: Final = 0.02  # wait for the answers of other short calls that came with this one
LOG_WRITE_BYTES: Final = 4096  # a ready pipe takes this much without blocking (poll(2))
_OURS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # meant for the service, which drains, then ends stdin


class Ended(Exception):
    """The user process is unusable, for the reason in the end of a sentence."""


class ServiceGone(Exception):
    """The service has ended."""


class Prints:
    """The user process's output. It passes to our stderr, the service's log, up to a limit, and is counted beyond."""

    def __init__(self, spec: str, source: int, log_bytes: int) -> None:
        self.source = source
        self._spec = spec
        self._left_bytes = log_bytes
        self._dropped_bytes = 0
        os.set_blocking(source, False)

    def pass_on(self) -> int:
        """Passes on the present output. Returns its bytes, or 0 if there is none or the output has ended."""
        try:
            printed = os.read(self.source, READ_BYTES)
        except BlockingIOError:
            return 0
        shown = printed[: self._left_bytes]
        for start in range(0, len(shown), LOG_WRITE_BYTES):
            part = shown[start : start + LOG_WRITE_BYTES]
            self._dropped_bytes += 0 if _log(part) else len(part)  # if nothing reads the log
        if shown and len(shown) == self._left_bytes:
            _log(f"\n{self._spec} prints too much: what follows is dropped\n".encode())
        self._left_bytes -= len(shown)
        self._dropped_bytes += len(printed) - len(shown)
        return len(printed)

    def close(self) -> None:
        """Passes on the rest and reports the dropped bytes."""
        while self.pass_on():
            pass
        if self._dropped_bytes:
            _log(f"{self._spec} printed {self._dropped_bytes:,} bytes that were dropped\n".encode())


class UserProcess:
    """The user process as its supervisor sees it. ``service`` is the descriptor that ends with the service."""

    def __init__(
        self, process_id: int, calls: int, verdicts: int, prints: Prints, service: int, limits: UserLimits
    ) -> None:
        self.usage = Usage(process_id, limits)
        self._id = process_id
        self._calls = calls
        self._verdicts = verdicts
        self._prints = prints
        self._service = service
        self._poll = select.poll()
        self._poll.register(verdicts, select.POLLIN)
        self._poll.register(prints.source, select.POLLIN)
        self._exit_code: int | None = None
        os.set_blocking(calls, False)

    def ask(self, frame: bytes, ticket: bytes, limit_s: float, waits: Callable[[], None]) -> Message:
        """Sends ``frame`` and returns its verdict. Calls ``waits`` if that takes long. Raises Ended, ServiceGone."""
        unsent, received, time_left = memoryview(frame), bytearray(), RunningTime(limit_s)
        self.usage.begin()
        self._poll.register(self._service, 0)  # its end is reported in any case
        unsent = unsent[self._send(unsent) :]
        if unsent:
            self._poll.register(self._calls, select.POLLOUT)
        while True:
            left_s = time_left.next_slice_s()
            ready = self._ready(left_s)
            if not ready:
                waits()
            if self._calls in ready:
                unsent = unsent[self._send(unsent) :]
                if not unsent:
                    self._poll.unregister(self._calls)
            if self._verdicts in ready:
                received += self._received()
                try:
                    message = frames.first(received, frames.ANSWER_MAX_BYTES)
                    if message is not None:
                        return _checked(message, ticket)
                except ValueError as error:
                    raise Ended(f"wrote into the answers of its process ({error})") from error
            if left_s <= 0.0:  # and the last check found nothing
                raise Ended(f"took longer than {limit_s:g} s and was stopped")
            if reason := self.usage.during():
                raise Ended(reason)
            if self._service in ready:
                raise ServiceGone

    def wait_for_call(self) -> None:
        """Returns once the service has written. Raises Ended if the user process ends, writes, or uses too much."""
        self._poll.register(self._service, select.POLLIN)
        while self._service not in (ready := self._ready(IDLE_LOOK_S)):
            self._check_quiet(ready)
            if not ready and (reason := self.usage.idle()):
                raise Ended(reason)
        self._exit_codes()

    def look(self) -> None:
        """Checks the user process between calls. Raises Ended if it ends or writes."""
        self._check_quiet(self._ready(0.0))

    def _check_quiet(self, ready: set[int]) -> None:
        if self._verdicts in ready:
            self._received()
            raise Ended("answered without being asked")

    def _ready(self, timeout_s: float) -> set[int]:
        ready = {each for each, _ in self._poll.poll(1e3 * timeout_s)}
        if self._prints.source in ready and not self._prints.pass_on():
            self._poll.unregister(self._prints.source)
        return ready

    def _send(self, unsent: memoryview) -> int:
        try:
            return os.write(self._calls, unsent)
        except BlockingIOError:
            return 0
        except OSError:  # it has ended, which the missing verdict shows
            return len(unsent)

    def _received(self) -> bytes:
        received = os.read(self._verdicts, READ_BYTES)
        if not received:
            # If it is ending, a signal no longer changes its exit code; otherwise it closed its pipe and is unusable.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._id, signal.SIGKILL)
            while self._exit_code is None:
                self._exit_codes(wait=True)
            raise Ended(f"ended its process (exit code {self._exit_code})")
        return received

    def _exit_codes(self, wait: bool = False) -> None:
        self._exit_code = reap(wait).get(self._id, self._exit_code)


def main(arguments: list[str]) -> None:
    """Serves calls until the service ends or the user process is unusable."""
    kind, spec, log_bytes, limited, *folder = arguments
    limits = UserLimits.from_argument(limited)
    for number in _OURS:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    service_in, service_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    calls_out, calls_in = os.pipe()
    verdicts_out, verdicts_in = os.pipe()
    prints_out, prints_in = os.pipe()
    supervisor_id = os.getpid()
    process_id = os.fork()
    if not process_id:
        try:
            ours = (service_in, service_out, calls_in, verdicts_out, prints_out, nothing)
            _become_user_process(supervisor_id, ours, prints_in, limits)
            tokenizer_folder = Path(folder[0]) if folder else None
            serve_calls(spec, cast(Kind, kind), tokenizer_folder, calls_out, verdicts_in, limits)
        finally:
            _leave()
    for theirs in (calls_out, verdicts_in, prints_in, nothing):
        os.close(theirs)
    prints = Prints(spec, prints_out, int(log_bytes))
    try:
        user = UserProcess(process_id, calls_in, verdicts_out, prints, service_in, limits)
        _pass_calls(user, spec, service_in, service_out)
    except (ServiceGone, BrokenPipeError):
        pass
    finally:
        end_descendants()
        prints.close()


def _become_user_process(supervisor_id: int, ours: Iterable[int], prints_in: int, limits: UserLimits) -> None:
    for number in _OURS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    die_with(supervisor_id)
    for output in (1, 2):
        os.dup2(prints_in, output)
    for descriptor in (*ours, prints_in):
        os.close(descriptor)
    limits.impose()


def _pass_calls(user: UserProcess, spec: str, service_in: int, service_out: int) -> None:
    """Passes calls on, and answers calls that came together in one frame unless one of them takes long."""
    sent = 0
    with open(service_in, "rb", closefd=False) as calls, open(service_out, "wb", closefd=False) as answers:

        def exchange(frame: bytes, ticket: bytes, limit_s: float) -> bool:
            began_s = time.monotonic()
            try:
                message = user.ask(frame, ticket, limit_s, answers.flush)
                if sent and (reason := user.usage.after()):
                    _log(f"{spec} {reason}: its process is replaced\n".encode())
                    message[ENDED] = True
            except Ended as error:
                message = {"failure": str(error), TICKET: ticket, ENDED: True}
            answers.write(frames.encode({**message, LASTED_S: time.monotonic() - began_s}))
            return ENDED not in message

        usable = exchange(b"", b"", START_TIMEOUT_S)
        while usable:
            answers.flush()
            try:
                user.wait_for_call()
                batch = frames.read(calls)
                if batch is None:
                    raise ServiceGone
                flushed_s = time.monotonic()
                for ticket, frame in batch[CALLS]:
                    user.look()
                    if time.monotonic() - flushed_s > ANSWER_WAITS_S:
                        answers.flush()
                        flushed_s = time.monotonic()
                    sent += 1
                    if not exchange(frame, ticket, batch["timeout_s"]):
                        return
            except Ended:  # between two calls; the service starts another keeper for its next one
                return


def _checked(message: Message, ticket: bytes) -> Message:
    if message.get(TICKET) != ticket:
        raise ValueError("an answer to another call")
    return message


def _log(text: bytes) -> bool:
    """Writes to the service's log, unless that would have to be waited for."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    ready = any(events & select.POLLOUT for _, events in poll.poll(0))
    try:
        return ready and os.write(2, text) == len(text)
    except OSError:
        return False


def _leave() -> None:
    error = sys.exc_info()[1]
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(0 if error is None else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
