"""The calls of a storm: each RPC, and what its callers send at a service as it is now."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from dora.host.launcher import LOCAL, WORKERS_MAX
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.services.trainer import TrainerService
from dora.release import __version__
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.proven import proven_channel
from dora.rpc.roles import SERVICES, Role
from dora.worker.fake.engine import FakeEngine
from tests.abuse.direct import Direct
from tests.abuse.generated import generated

PATIENCE_S: Final = 60.0  # for a reply that has to come; beyond it the service hangs
GROUPS: Final = 4
WORKERS: Final = 2  # and so many are left: a call that may start some starts none
VOCABULARY: Final = 64
CAPACITY: Final = pb.HostCapacity(cores=1, memory_bytes=1 << 40, memory_free_bytes=1 << 40, store_free_bytes=1 << 40)


@dataclass
class Rpc:
    """One method, what it takes, and whether its first reply may be long in coming."""

    name: str
    kind: Any
    waits: bool = False  # an open call is no fault: it is given up after a moment
    streams: bool = False  # messages of the caller
    ends: bool = False  # afterwards an honest trainer finds no more prompts


RPCS: Final = (
    Rpc("Trainer/Attach", pb.AttachRequest),
    Rpc("Trainer/KeepAlive", pb.KeepAliveRequest, waits=True),
    Rpc("Trainer/StreamStep", pb.StreamStepRequest, waits=True),
    Rpc("Trainer/UploadWeights", pb.WeightChunk, streams=True),
    Rpc("Trainer/CommitStep", pb.CommitStepRequest),
    Rpc("Trainer/RepublishVersion", pb.RepublishVersionRequest),
    Rpc("Prompts/Submit", pb.SubmitRequest),
    Rpc("Prompts/Cancel", pb.CancelRequest),
    Rpc("Prompts/Evaluate", pb.EvaluateRequest, waits=True),
    Rpc("Sessions/Attend", pb.AttendRequest, waits=True),
    Rpc("Sessions/Open", pb.OpenRequest, waits=True),
    Rpc("Sessions/Withdraw", pb.WithdrawRequest),
    Rpc("Sessions/Describe", pb.DescribeRequest),
    Rpc("Sessions/FindSession", pb.FindSessionRequest, waits=True),
    Rpc("Sessions/Turn", pb.TurnRequest, waits=True),
    Rpc("Sessions/EndSession", pb.EndSessionRequest),
    Rpc("Sessions/FailSession", pb.FailSessionRequest),
    Rpc("Sessions/ServeFront", pb.FrontHello, waits=True),
    Rpc("Operator/GetStatus", pb.StatusRequest),
    Rpc("Operator/WatchStatus", pb.WatchRequest, waits=True),
    Rpc("Operator/ListTrajectories", pb.TrajectoriesRequest),
    Rpc("Operator/ShowTrajectory", pb.ShowTrajectoryRequest),
    Rpc("Operator/Migrate", pb.MigrateRequest),
    Rpc("Operator/Drain", pb.DrainRequest),
    Rpc("Operator/Scale", pb.ScaleRequest),
    Rpc("Operator/Rebalance", pb.RebalanceRequest),
    Rpc("Operator/Checkpoint", pb.CheckpointRequest),
    Rpc("Operator/Examine", pb.ExamineRequest, waits=True),
    Rpc("Worker/Connect", pb.WorkerMessage, waits=True, streams=True),
    Rpc("Host/Join", pb.HostMessage, waits=True, streams=True),
    Rpc("Host/ListFiles", pb.ListFilesRequest),
    Rpc("Host/FetchFile", pb.FetchFileRequest),
    Rpc("Prompts/End", pb.EndRequest, ends=True),
)


class Service:
    """The service under the storm, as the storm sees it."""

    def __init__(self, handle: ServiceHandle, direct: Direct, model: Path) -> None:
        self.handle = handle
        self.direct = direct
        (self.trainer,) = (each for each in direct.servicers() if isinstance(each, TrainerService))
        engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=model)
        self.hello = convert.hello_to_wire("", 1, "host", engine.capability)
        self._names = 0

    def known(self, chance: random.Random) -> dict[str, Sequence[Any]]:
        """Values that get past a check now."""
        machine, window = self.trainer._core.machine, self.trainer._core.state.window
        requests = [*machine.state.request_row][:4] or ["g0.0"]
        self._names += 1
        tokens = chance.randint(1, 4)
        return {
            "trainer_epoch": (self.trainer._epoch,),
            "step": (window.newest, window.newest, window.step),
            "version": (window.newest + 1, window.newest + 1, window.newest),
            "groups_per_step": (0, GROUPS),
            "client_name": ("mine",),
            "file_name": ("model.safetensors", "a.safetensors"),
            "name": ("model.safetensors",),
            "file_bytes": (4, 1000),
            "blake3": (bytes(32),),
            "content": (b"abcd",),
            "prompt_id": (f"p{self._names}", f"p{self._names}", "p1"),
            "task_id": ("task",),
            "text": ("a", "what is 1 + 1?"),
            "token_ids": (convert._bytes([3] * tokens, convert._INT32),),
            "logprobs": (convert._bytes([-1.0] * tokens, convert._FLOAT32),),
            "sampling_json": ("{}", '{"max_tokens": 4}', '{"temperature": 1e999}', '{"seed": -1}', "[]", "[" * 5000),
            "verifier_json": ("{}", '{"answer": "2"}', "nul"),
            "messages_json": ("", "", '[{"role": "user", "content": "a"}]', '[{"role": 1}]'),
            "group_size": (0, 2),
            "address": ("127.0.0.1:1", "0.0.0.0:9"),  # of a front
            "share": (0.0, 0.25, 0.6),
            "period_ms": (50, 1000),
            "state": ("", "running"),
            "limit": (0, 4),
            "trajectory_id": requests,
            "ids": ("p1", "g1", "nobody"),
            "reason": ("mistyped",),
            "target_worker": ("w0", "w1"),
            "worker_id": (f"stranger{self._names}",),
            "request_id": requests,
            "first_token": (0, 0, 1),
            "finish_reason": ("", "", "stop", "length"),
            "kv_used_tokens": (0, 64),
            "generated_tokens": (0, 5),
            "reprefilled_tokens": (0, 5),
            "command_id": [*machine.state.pending][:8] or [1],
            "error_kind": ("", "refused", "unknown_request"),
            "locator": ("",),
            "fingerprint": (self.hello.fingerprint,),
            "slots": (8,),
            "kv_tokens": (4096,),
            "block_tokens": (32,),
            "max_model_len_tokens": (256,),
            "vocab_size": (VOCABULARY,),
            "dtype": ("float32",),
            "host": ("host",),
            "workers": (WORKERS,),
            "offset": (0, 100),
        }

    def token(self, rpc: Rpc, chance: random.Random) -> str:
        role = SERVICES[rpc.name.partition("/")[0]]
        wrong = 0.25 if rpc.streams else 0.1  # a stream carries many messages, so there are few calls
        return (
            chance.choice(["", *self.handle.tokens.values()]) if chance.random() < wrong else self.handle.tokens[role]
        )

    def messages(self, rpc: Rpc, chance: random.Random) -> list[bytes]:
        """Returns the messages of one call."""
        known: dict[str, Sequence[Any]] = self.known(chance)
        if rpc.kind is pb.CommitStepRequest:
            newest = self.trainer._core.state.window.newest
            known |= {"step": (newest,), "version": (newest + 1,)}
        if rpc.kind is pb.ScaleRequest:
            return [_as_many_workers(generated(rpc.kind, chance, known | {"host": ("", LOCAL, "nobody")}))]
        if rpc.kind is pb.HostMessage:
            known |= {"name": (f"h{self._names}",), "kind": ("report", "ready", "arrived", "failed")}
        if not rpc.streams:
            return [generated(rpc.kind, chance, known)]
        honesty = chance.choice((0.0, 0.7, 0.95))  # a stream ends with its first wrong message
        if rpc.kind is pb.WorkerMessage:
            known |= {"version": (chance.choice(self.trainer._store.versions()),), "first_token": (0,)}
            known |= {"kind": ("report", "outcome")}
        sent = [generated(rpc.kind, chance, known, honesty) for _ in range(chance.randint(1, 12))]
        if rpc.kind is pb.WorkerMessage and chance.random() < 0.8:
            self.hello.worker_id = known["worker_id"][0]
            sent[0] = pb.WorkerMessage(hello=self.hello).SerializeToString()
        elif rpc.kind is pb.HostMessage:
            hello = pb.HostHello(name=known["name"][0], dora_version=__version__, capacity=CAPACITY)
            sent[0] = pb.HostMessage(hello=hello).SerializeToString() if chance.random() < 0.8 else sent[0]
        elif chance.random() < 0.5:
            names = ("trainer_epoch", "version", "file_name", "file_bytes")
            header = pb.WeightFileHeader(**{name: known[name][0] for name in names})
            sent[0] = pb.WeightChunk(header=header).SerializeToString()
        return sent

    async def fill(self) -> None:
        """Lets a trainer take a whole step, which a commit may then end."""
        async with proven_channel(self.handle.address, self.handle.tokens[Role.TRAINER]) as channel:
            trainer = stubs.TrainerStub(channel)
            attached = await trainer.Attach(pb.AttachRequest())
            request = pb.StreamStepRequest(trainer_epoch=attached.trainer_epoch, step=attached.next_step)
            async for _ in trainer.StreamStep(request, timeout=PATIENCE_S):
                pass

    @property
    def failure(self) -> str:
        failed = self.trainer._core.failed
        return repr(failed.exception()) if failed.done() else ""


def _as_many_workers(content: bytes) -> bytes:
    """The same call, where it asks for a number of workers that the service would take."""
    try:
        request = pb.ScaleRequest.FromString(content)
    except DecodeError:
        return content
    if request.workers <= WORKERS_MAX:
        request.workers = WORKERS
    return request.SerializeToString()
