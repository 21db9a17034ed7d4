"""Requests to LMCache's server over ZeroMQ, one at a time, each with a timeout.

The protocol is LMCache's own (lmcache/v1/multiprocess: transport/zmq_impl/wire.py, custom_types.py). It has no version
number: ``server.VERSION`` names the release that it belongs to. A request that fails at the server gets no answer.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import zmq

from dora.errors import TransferFailed

_OPERATIONS: Final = {
    "lookup": 8,
    "wait_prefetch_status": 10,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register_kv_cache_engine_driven_context": 14,
    "unregister_kv_cache_engine_driven_context": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "get_chunk_size": 21,
    "ping": 22,
}


class TierConnection:
    """A connection to a server that may not be running. For one thread."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._serial = itertools.count(1)

    def call(self, operation: str, *values: Any) -> Any:
        """Returns the server's answer. Raises TransferFailed, and resets the connection, if that is late or invalid."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(self._endpoint)
        uid = msgpack.packb(next(self._serial))
        try:
            frames = [uid, msgpack.packb(_OPERATIONS[operation]), *(msgpack.packb(value) for value in values)]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            if not self._socket.poll(int(1000 * self._timeout_s)):
                raise TransferFailed(f"LMCache's server did not answer {operation} in {self._timeout_s:g} s")
            answer = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(answer) < 2 or answer[0] != uid:
                raise TransferFailed(f"LMCache's server sent an invalid answer to {operation}")
            return msgpack.unpackb(answer[2]) if len(answer) > 2 else None
        except (zmq.ZMQError, ValueError, msgpack.UnpackException) as error:
            self.reset()
            raise TransferFailed(f"LMCache's server, {operation}: {error}") from error
        except TransferFailed:
            self.reset()
            raise

    def reset(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self.reset()
        self._context.term()


def key_of(
    model: str, salt: str, token_ids: Sequence[int], first: int, end: int, session: str, *, is_lookup: bool = False
) -> Mapping[str, Any]:
    """Returns ``IPCCacheServerKey``: tokens ``first`` to ``end`` (whole chunks) of a session's one prefix."""
    return {
        "model_name": model,
        "world_size": 1,
        "worker_id": None if is_lookup else 0,
        "token_ids": list(token_ids),
        "start": first,
        "end": end,
        "request_id": session,
        "cache_salt": salt,
        "request_configs": None,
        "num_kv_readers": 1,
    }


def registration(instance: int, model: str, block_tokens: int, chunk_bytes: int) -> Mapping[str, Any]:
    """Returns ``RegisterEngineDrivenContextPayload`` for chunks as plain bytes: one layer of one slot."""
    return {
        "instance_id": instance,
        "model_name": model,
        "world_size": 1,
        "block_size": block_tokens,
        "num_layers": 1,
        "hidden_dim_size": chunk_bytes,
        "dtype_str": "uint8",
        "use_mla": True,
        "num_physical_slots": 1,
    }
