"""Processes that survive their service, seen from two of its incarnations."""

from dataclasses import dataclass, field
from typing import Any

from dora.kvtransfer.transfer import Transfer
from dora.rpc import dora_pb2 as pb


@dataclass
class Incarnation:
    """One life of a service, as its worker sees it."""

    commands: list[pb.WorkerCommand] = field(default_factory=list)
    heard: list[pb.WorkerMessage] = field(default_factory=list)

    def take(self, _timeout_s: float) -> pb.WorkerCommand | None:
        return self.commands.pop(0) if self.commands else None

    def send(self, message: pb.WorkerMessage) -> None:
        self.heard.append(message)

    @property
    def outcomes(self) -> list[pb.WorkerOutcome]:
        return [message.outcome for message in self.heard if message.HasField("outcome")]


class Unhurried:
    """A data plane whose transfers end when a test ends them."""

    arena = None
    part_bytes = 1 << 20

    def __init__(self) -> None:
        self.sent: list[Transfer] = []

    def use(self, _device: object) -> None:
        """Its bodies are in host memory."""

    def send_parts(self, _peer: object, *transfer: Any, **options: Any) -> Transfer:
        self.sent.append(Transfer(*transfer, **options))
        return self.sent[-1]
