"""The worker's end of the stream, once the stream is over."""

import socket

import pytest

from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.types import EngineCapability
from dora.worker.link import Link


def test_a_stream_that_ended_is_a_plain_error_for_who_sends() -> None:
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        link = Link(address, "token", "w0", EngineCapability("f", 8, 4096, 32, 256, 64, "float32"))
        with pytest.raises(ServiceUnavailable):
            link.open()
        link._thread.join()
        with pytest.raises(ServiceUnavailable, match="has ended"):
            link.send(pb.WorkerMessage(report=pb.WorkerReport()))
        link.close()
