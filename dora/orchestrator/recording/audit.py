"""The audit log: the acts of operators and trainers, one JSON line each, in the state folder.

    FOLDER/audit.jsonl      the newest lines; FOLDER/audit-1.jsonl to audit-3.jsonl the earlier ones

A call is answered once its line is written. If it cannot be written, the call is answered all the same, and one line of
the service's log says so.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from dora.errors import DoraError
from dora.rpc.access import name_of
from dora.rpc.errors import ServerInterceptor, status_of, wrapped_handler
from dora.rpc.roles import CALLER, Caller

log = logging.getLogger("dora.service")

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES: Final = 8 << 20
EARLIER: Final = 3  # files kept beside the newest
TEXT_MAX: Final = 200  # characters of one argument
ITEMS_MAX: Final = 8  # of a list
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


class Audit:
    """Writes lines, and starts another file when one is full."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._file = folder / AUDIT_FILE
        self._file_bytes = file_bytes
        self._writing = asyncio.Lock()
        self._has_failed = False

    async def note(self, caller: Caller, address: str, act: str, arguments: Mapping[str, Any], result: str) -> None:
        """``result``: OK, or the status and message of a refusal."""
        line = {
            "time": round(time.time(), 3),
            "role": str(caller.role),
            "name": caller.name,
            "address": address,
            "act": act,
            "arguments": arguments,
            "result": result,
        }
        content = json.dumps(line).encode() + b"\n"
        async with self._writing:
            try:
                await asyncio.to_thread(self._append, content)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    log.error("the audit log cannot be written: %s (%s)", error.strerror, self._file)
                self._has_failed = True

    def _append(self, content: bytes) -> None:
        with suppress(FileNotFoundError):
            if self._file.stat().st_size + len(content) > self._file_bytes:
                for number in range(EARLIER, 0, -1):
                    with suppress(FileNotFoundError):
                        os.replace(self._numbered(number - 1), self._numbered(number))
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _numbered(self, number: int) -> Path:
        return self._file.with_name(f"audit-{number}.jsonl") if number else self._file


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
