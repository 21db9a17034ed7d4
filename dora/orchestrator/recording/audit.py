"""The audit log: the acts of operators and trainers, and refused calls, one JSON line each, in the state folder.

    FOLDER/audit.jsonl      acts; FOLDER/audit-1.jsonl to audit-3.jsonl the earlier ones
    FOLDER/refused.jsonl    calls that were refused, and challenges without a proof; the earlier ones likewise

A call is answered once its line is written. If it cannot be written, the call is answered all the same, and one line of
the service's log says so. Refusals, and acts of the roles that may do little, write ``LINES_MAX`` lines in ``WINDOW_S``
for each caller, method and status. Further ones are counted, and one line has their number at the end of that time.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import Message

from dora.errors import DoraError
from dora.rpc.access import name_of
from dora.rpc.challenge import FRESH_S
from dora.rpc.errors import ServerInterceptor, status_of, wrapped_handler
from dora.rpc.interceptor import Watcher
from dora.rpc.proof import CHALLENGE
from dora.rpc.roles import CALLER, Caller, Role
from dora.rpc.room import host_of_peer

log = logging.getLogger("dora.service")

AUDIT_FILE: Final = "audit.jsonl"
REFUSED_FILE: Final = "refused.jsonl"
FILE_BYTES: Final = 8 << 20
EARLIER: Final = 3  # files kept beside the newest
TEXT_MAX: Final = 200  # characters of one argument
ITEMS_MAX: Final = 8  # of a list
WINDOW_S: Final = 60.0
LINES_MAX: Final = 16
COUNTED_MAX: Final = 1024  # callers with a method and status, and peers without a proof; all others are counted as one
_TRUSTED: Final = (Role.OWNER, Role.OPERATOR, Role.TRAINER)  # each of their acts has a line
_DONE: Final = ("OK", "cancelled")  # results of acts that were not refused
ACTS: Final = frozenset(
    {
        "Trainer/Attach",
        "Trainer/UploadWeights",
        "Trainer/CommitStep",
        "Trainer/RepublishVersion",
        "Prompts/End",
        "Prompts/Cancel",
        "Sessions/Withdraw",
        "Operator/Migrate",
        "Operator/Drain",
        "Operator/Scale",
        "Operator/Rebalance",
        "Operator/Checkpoint",
    }
)  # methods that change a run


class _Kind(NamedTuple):
    """Describes calls that are counted together. ``role`` is empty if the caller proved none."""

    role: str
    name: str
    host: str
    act: str
    status: str

    def line(self, address: str, **more: Any) -> dict[str, Any]:
        head = {"time": round(time.time(), 3), "role": self.role, "name": self.name, "address": address}
        return {**head, "act": self.act, **more}


class Audit(Watcher):
    """Writes the lines of one service, on its event loop."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._writing = asyncio.Lock()
        self._has_failed = False
        self._counts = Counter[_Kind]()
        self._challenged: dict[str, float] = {}  # peers that have not proved a token since

    async def watch(self) -> None:
        """Ends each interval of counting until it is cancelled."""
        while True:
            await asyncio.sleep(WINDOW_S)
            await self.settle()

    async def note(
        self, caller: Caller | None, address: str, act: str, arguments: Mapping[str, Any], result: str
    ) -> None:
        """Writes one line. ``caller`` None has proved no token. ``result`` is OK, or a refusal's status and message."""
        role, name = ("", "") if caller is None else (str(caller.role), caller.name)
        kind = _Kind(role, name, host_of_peer(address), act, result.partition(":")[0])
        if kind.status not in _DONE or role not in _TRUSTED:
            counted = kind
            if kind not in self._counts and len(self._counts) >= COUNTED_MAX:
                counted = _Kind("", "", "", "others", kind.status)
            self._counts[counted] += 1
            if self._counts[counted] > LINES_MAX:
                return
        await self._write([(kind, kind.line(address, arguments=arguments, result=result))])

    async def refused(self, caller: Caller | None, address: str, method: str, error: DoraError) -> None:
        """Notes a call that ended before its message was read."""
        result = f"{status_of(error).name}: {str(error)[:TEXT_MAX]}"
        await asyncio.shield(self.note(caller, address, name_of(method) or "unknown", {}, result))

    def challenged(self, address: str) -> None:
        if len(self._challenged) < COUNTED_MAX:
            self._challenged.setdefault(address, time.monotonic())

    def proven(self, address: str) -> None:
        self._challenged.pop(address, None)

    async def settle(self, proof_s: float = FRESH_S) -> None:
        """Writes the numbers of calls that were counted, and of challenges that no proof followed for so long."""
        counts, self._counts = self._counts, Counter()
        until_s = time.monotonic() - proof_s
        silent = [address for address, since_s in self._challenged.items() if since_s <= until_s]
        for address in silent:
            del self._challenged[address]
        lines = [
            (kind, kind.line(kind.host, result=kind.status, repeated=count - LINES_MAX))
            for kind, count in counts.items()
            if count > LINES_MAX
        ]
        for host, count in Counter(map(host_of_peer, silent)).items():
            kind = _Kind("", "", host, CHALLENGE.rpartition(".")[2], "UNAUTHENTICATED")
            lines.append((kind, kind.line(host, result=f"{kind.status}: no proof of a token followed", repeated=count)))
        await self._write(lines)

    async def _write(self, lines: Sequence[tuple[_Kind, Mapping[str, Any]]]) -> None:
        content: dict[str, bytes] = {}
        for kind, line in lines:
            file = AUDIT_FILE if kind.status in _DONE else REFUSED_FILE
            content[file] = content.get(file, b"") + json.dumps(line).encode() + b"\n"
        async with self._writing:
            try:
                for file, added in content.items():
                    await asyncio.to_thread(self._append, self._folder / file, added)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    log.error("the audit log cannot be written: %s (%s)", error.strerror, self._folder)
                self._has_failed = True

    def _append(self, file: Path, content: bytes) -> None:
        with suppress(FileNotFoundError):
            if file.stat().st_size + len(content) > self._file_bytes:
                for number in range(EARLIER, 0, -1):
                    with suppress(FileNotFoundError):
                        os.replace(_numbered(file, number - 1), _numbered(file, number))
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(f"{file.stem}-{number}.jsonl") if number else file


class AuditInterceptor(ServerInterceptor):
    """Notes each act with its result. Runs behind the interceptors that identify callers and convert errors."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, act = await continuation(handler_call_details), name_of(handler_call_details.method)
        if handler is None or act not in ACTS:
            return handler
        return wrapped_handler(handler, lambda behaviour: self._noted(act, behaviour), _unchanged)

    def _noted(self, act: str, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            caller, arguments = CALLER.get(), arguments_of(request)
            result = "cancelled"
            try:
                reply = await behaviour(request, context)
                result = "OK"
                return reply
            except DoraError as error:
                result = f"{status_of(error).name}: {str(error)[:TEXT_MAX]}"
                raise
            finally:
                await asyncio.shield(self._audit.note(caller, context.peer(), act, arguments, result))

        return call


def arguments_of(request: Any) -> dict[str, Any]:
    """Returns a request's fields, bounded: long texts are cut, of bytes and messages only the size is kept."""
    if not isinstance(request, Message):
        return {}  # a stream
    return {field.name: _bounded(value) for field, value in request.ListFields()}


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value[:TEXT_MAX]
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Message):
        return f"{value.ByteSize()} bytes"
    items = list(value)
    shown = [_bounded(each) for each in items[:ITEMS_MAX]]
    return [*shown, f"and {len(items) - ITEMS_MAX} more"] if len(items) > ITEMS_MAX else shown


def _unchanged(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    return behaviour
