"""An in-memory service for the trainer's client: scripted groups, a real weight store, real gRPC on loopback."""

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from dora.config import validated
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import SamplingParams, Segment
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import server_options
from dora.rpc.convert import canary_from_wire
from dora.rpc.dora_pb2_grpc import (
    PromptsServicer,
    TrainerServicer,
    add_PromptsServicer_to_server,
    add_TrainerServicer_to_server,
)
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.interceptor import server_interceptors
from dora.rpc.packed import pack, packed_batches
from dora.rpc.roles import ServiceTokens
from dora.weights.files import WeightFile
from dora.weights.store import WeightStore
from tests.owner_token import owner_token

TOKEN = owner_token("correct-horse")


def make_trajectory(step: int, group: int, sample: int, group_size: int = 2, **changes: Any) -> Trajectory:
    tokens = 3 + sample
    values: dict[str, Any] = {
        "trajectory_id": f"s{step}-g{group}-{sample}",
        "group_id": f"s{step}-g{group}",
        "prompt_id": f"p{step}-{group}",
        "task_id": "toy",
        "sample_index": sample,
        "group_size": group_size,
        "behaviour_version": step,
        "reference_version": 0,
        "trained_step": step,
        "staleness": 0,
        "prompt_token_ids": [1, 2],
        "response_token_ids": list(range(10, 10 + tokens)),
        "logprobs": np.linspace(-0.1, -2.0, tokens, dtype=np.float32),
        "loss_mask": [1] * tokens,
        "sampling": SamplingParams(seed=7, stop_token_ids=(2,)),
        "reward": float(sample),
        "reward_valid": True,
        "reward_components": {"format": 0.5},
        "verifier_log": "",
        "finish_reason": "stop",
        "started_at": 1.0,
        "finished_at": 2.0,
        "worker_history": (Segment("w0", 0, tokens - 1, "new", step),),
        "length_tokens": tokens,
    }
    return Trajectory(**{**values, **changes})


def make_branch(index: int, prompt: list[int], tokens: list[int], mask: list[int], **changes: Any) -> Trajectory:
    """A branch of the session ``g0.0``, whose given tokens have logprob 0."""
    values: dict[str, Any] = {
        "trajectory_id": f"g0.0/{index}" if index else "g0.0",
        "prompt_token_ids": prompt,
        "response_token_ids": tokens,
        "logprobs": [-1.0 * each for each in mask],
        "loss_mask": mask,
        "length_tokens": len(mask),
        "branch_index": index,
    }
    return make_trajectory(0, 0, 0, **{**values, **changes})


def make_group(step: int, group: int, group_size: int = 2) -> TrajectoryGroup:
    members = tuple(make_trajectory(step, group, sample, group_size) for sample in range(group_size))
    return TrajectoryGroup(f"s{step}-g{group}", members)


@dataclass
class Faults:
    """Each is one connection broken once, at a place of the script."""

    after_groups: list[int] = field(default_factory=list)  # within a stream, after so many groups
    after_parts: list[int] = field(default_factory=list)  # within a stream, after so many messages of its first group
    before_commit: int = 0
    after_commit: int = 0  # the commit is carried out, its reply lost
    quiet_ends: int = 0  # the stream ends early without a word
    hold_after: int = 0  # the first stream gives so many groups, then nothing for as long as it lives
    other_groups: bool = False  # after attaching again the step holds other groups
    rejections: dict[int, int] = field(default_factory=dict)  # version -> how often it is rejected once it is there
    after_republish: int = 0  # a version is published anew, the reply lost


class ScriptedService(TrainerServicer, PromptsServicer):
    """Serves ``total_groups`` groups, ``groups_per_step`` a step; what was committed stays across attachments."""

    def __init__(self, store: WeightStore, total_groups: int = 1 << 20, shared: bool = True) -> None:
        self.store = store
        self.faults = Faults()
        self.shared = shared
        self.takes_images = False
        self.epoch = 0
        self.next_step = 0
        self.groups_per_step = 0
        self.rejected = 0  # version; 0: none
        self.commits: list[pb.CommitStepRequest] = []
        self.republished: list[pb.RepublishVersionRequest] = []
        self.uploads: list[str] = []
        self.upload_bytes: list[int] = []  # that travelled for each
        self.prompts: set[str] = set()
        self.max_message_bytes = 1 << 20
        self.cut_bytes = self.max_message_bytes  # larger groups come in parts
        self.group_size = 2
        self.group_of: Callable[[int, int, int], TrajectoryGroup] = make_group  # of step, number and size
        self._total_groups = total_groups

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachReply:
        if request.groups_per_step and self.groups_per_step not in (0, request.groups_per_step):
            raise Conflict("groups_per_step", request.groups_per_step, f"{self.groups_per_step}, as it was set")
        self.groups_per_step = request.groups_per_step or self.groups_per_step or 2
        self.store.discard(self.epoch)
        self.epoch += 1
        tensors = [
            pb.TensorHeader(name=each.name, dtype=each.dtype, shape=each.shape, optional=each.optional)
            for each in self.store.reference.tensors
        ]
        return pb.AttachReply(
            trainer_epoch=self.epoch,
            next_step=self.next_step,
            groups_per_step=self.groups_per_step,
            window_versions=2,
            model=str(self.store.reference.folder),
            store_folder=str(self.store.root),
            store_proof=str(self.store.proof),
            store_proof_bytes=self.store.proof_bytes if self.shared else b"of another host",
            max_message_bytes=self.max_message_bytes,
            tensors=tensors,
            takes_images=self.takes_images,
        )

    async def StreamStep(
        self, request: pb.StreamStepRequest, context: Any
    ) -> AsyncIterator[pb.TrajectoryBatch | bytes]:
        self._check(request.trainer_epoch, request.step)
        first = request.step * self.groups_per_step
        left = max(0, min(self.groups_per_step, self._total_groups - first))
        break_after = self.faults.after_groups.pop(0) if self.faults.after_groups else None
        for index in range(left):
            if break_after == index:
                if self.faults.quiet_ends:
                    self.faults.quiet_ends -= 1
                    return
                raise ServiceUnavailable("broken by the script")
            break_within = self.faults.after_parts.pop(0) if self.faults.after_parts and not index else None
            if index and index == self.faults.hold_after:
                self.faults.hold_after = 0
                await asyncio.Event().wait()
            number = index + (100 * self.epoch if self.faults.other_groups else 0)
            groups = [self.group_of(request.step, number, self.group_size)]
            if request.packed and number % 2:  # a trainer has to take both
                groups = [pack(group) or group for group in groups]
            batches = packed_batches(request.step, groups, max_message_bytes=self.cut_bytes)
            for part, batch in enumerate(batches):
                if part == break_within:
                    raise ServiceUnavailable("broken by the script within a group")
                yield batch
        if left < self.groups_per_step:
            yield pb.TrajectoryBatch(step=request.step, end_of_prompts=True)

    async def UploadWeights(self, messages: AsyncIterator[pb.WeightChunk], context: Any) -> pb.UploadReply:
        header = (await anext(aiter(messages))).header
        base = (header.base_version, header.base_blake3) if header.base_blake3 else None
        named = (header.trainer_epoch, header.version, header.file_name, header.file_bytes)
        with self.store.upload(*named, base, header.piece_bytes) as upload:
            content_bytes = 0
            async for message in messages:
                content_bytes += len(message.content)
                upload.append(message.content)
            file_bytes = upload.finish()
        self.uploads.append(header.file_name)
        self.upload_bytes.append(content_bytes)
        return pb.UploadReply(file_bytes=file_bytes)

    async def CommitStep(self, request: pb.CommitStepRequest, context: Any) -> pb.CommitStepReply:
        self._check(request.trainer_epoch, request.step)
        if request.version != request.step + 1:
            raise Conflict("version", request.version, f"step + 1, that is {request.step + 1}")
        if self.faults.before_commit:
            self.faults.before_commit -= 1
            raise ServiceUnavailable("broken by the script before the commit")
        files = [WeightFile(file.name, file.file_bytes, file.blake3) for file in request.files]
        canary = canary_from_wire(request.canary)
        await asyncio.to_thread(self.store.publish, request.trainer_epoch, request.version, files, canary)
        self.rejected = request.version if self.faults.rejections.get(request.version) else 0
        self.commits.append(request)
        self.next_step += 1
        if self.faults.after_commit:
            self.faults.after_commit -= 1
            raise ServiceUnavailable("broken by the script after the commit")
        return pb.CommitStepReply(next_step=self.next_step, groups_trained=self.next_step * self.groups_per_step)

    async def RepublishVersion(self, request: pb.RepublishVersionRequest, context: Any) -> pb.RepublishVersionReply:
        if not self.rejected and self.republished and self.republished[-1].files == request.files:
            return pb.RepublishVersionReply(next_step=self.next_step)
        if request.trainer_epoch != self.epoch or request.version != self.rejected:
            raise Conflict("version", request.version, f"{self.rejected}")
        files = [WeightFile(file.name, file.file_bytes, file.blake3) for file in request.files]
        canary = canary_from_wire(request.canary)
        publish = functools.partial(self.store.publish, request.trainer_epoch, request.version, files, canary)
        await asyncio.to_thread(publish, anew=True)
        self.republished.append(request)
        self.faults.rejections[request.version] -= 1
        self.rejected = request.version if self.faults.rejections[request.version] else 0
        if self.faults.after_republish:
            self.faults.after_republish -= 1
            raise ServiceUnavailable("broken by the script after a version was published anew")
        return pb.RepublishVersionReply(next_step=self.next_step)

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        prompts = [PromptCheck(validated({})).from_wire(prompt) for prompt in request.prompts]
        for prompt in prompts:
            if prompt.prompt_id in self.prompts:
                raise Conflict("prompt_id", prompt.prompt_id, "an id that was not submitted before")
            if not prompt.token_ids:
                raise InvalidValue("token_ids", [], "at least one token")
        self.prompts |= {prompt.prompt_id for prompt in prompts}
        return pb.SubmitReply(accepted=len(prompts), queue_free=100 - len(self.prompts))

    def _check(self, epoch: int, step: int) -> None:
        if epoch != self.epoch:
            raise Conflict("trainer_epoch", epoch, f"{self.epoch}: another trainer has attached since")
        if self.rejected:
            raise VersionRejected(self.rejected, "it differs, by far", ("w0", "w1"), math.inf)
        if step != self.next_step:
            raise Conflict("step", step, f"the next one, {self.next_step}")


@dataclass
class Running:
    """A service that answers on ``address``; ``service`` is its inside, for looking and for faults."""

    address: str
    service: ScriptedService
    server: grpc.aio.Server
    client: str = "asynchronous"  # whose contract is tried
    end: Callable[[], None] = lambda: None  # ends it from another thread than its own, if it has one

    async def restart(self) -> None:
        """Stops the server as if its process were gone and starts another one at the same address."""
        await self.server.stop(None)
        self.server, _ = await _start(self.service, self.address)


class StartService(Protocol):
    """As :func:`start_service`; the fixture of that name stops the server at the test's end."""

    async def __call__(self, store_folder: Path, reference: Path, **options: Any) -> Running: ...


async def start_service(store_folder: Path, reference: Path, **options: Any) -> Running:
    service = ScriptedService(WeightStore(store_folder, reference), **options)
    server, port = await _start(service, "127.0.0.1:0")
    return Running(f"127.0.0.1:{port}", service, server)


async def _start(service: ScriptedService, address: str) -> tuple[grpc.aio.Server, int]:
    limit_bytes = service.max_message_bytes
    server = grpc.aio.server(
        interceptors=server_interceptors(ServiceTokens(TOKEN), limit_bytes), options=server_options(limit_bytes)
    )
    add_TrainerServicer_to_server(service, server)
    add_PromptsServicer_to_server(service, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
