"""One trainer's session with one service: its connection, and the service's reply to the last attach."""

import asyncio
import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from dora.client.connection import COUNT_MAX, Connection, Patience
from dora.client.deltas import Uploaded
from dora.client.device_image import Images
from dora.client.modules import config_of, is_module, unwrapped
from dora.client.publication import Weights, canary_of, take_weights, upload
from dora.client.replay import ReplayBuffer
from dora.client.skeleton import Skeleton
from dora.client.taking import RECYCLED_FOLDER, Spare, Taken
from dora.data.types import Canary
from dora.errors import MISSING, Conflict, DoraError, InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import MAX_MESSAGE_BYTES
from dora.rpc.dora_pb2_grpc import TrainerStub
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.packed import split
from dora.tls import Tls
from dora.weights.files import laid_out, preamble
from dora.weights.reference import WEIGHTS_FILE, TensorHeader

if TYPE_CHECKING:
    from dora.prompts.tokenizer import ChatTokenizer

log = logging.getLogger("dora.client")

STREAM_STEP: Final = "/dora.v1.Trainer/StreamStep"
_ATTACH_TIMEOUT_S = 30.0
_SHARED_MEMORY: Final = Path("/dev/shm")
# Work beside training, one task at a time: it takes at most one core from the trainer.
_thread: Final = ThreadPoolExecutor(1, "dora.publishing")


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Attachment:
    """One trainer's lease on the service, until another trainer attaches or the connection breaks."""

    epoch: int
    next_step: int  # the first uncommitted step; also the newest version
    groups_per_step: int
    window_versions: int  # staleness is at most window_versions - 1
    model: str  # the model folder on the service's host
    reference_version: int
    max_message_bytes: int  # 0: no limit given
    tensors: tuple[TensorHeader, ...] = field(repr=False)  # tensors that published weights must contain
    store_folder: Path | None  # for writing weights directly; None without a shared host
    takes_images: bool = False  # engines of this host read weights in the trainer's memory


class TrainerSession:
    """A trainer's session. Attaching fences other trainers; after a broken connection the trainer attaches again."""

    def __init__(
        self,
        address: str,
        *,
        token: str | Path = "",
        name: str = "trainer",
        connect_s: float = 60.0,
        reconnect_s: float = 60.0,
        tokenizer: str | Path | None = None,
        take_over: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        replay: ReplayBuffer | None = None,
    ) -> None:
        """Does not connect yet.

        With ``take_over``, the first attach replaces another living trainer, which is fenced; otherwise it raises
        Conflict.

        ``name`` is shown to operators. ``connect_s`` and ``reconnect_s`` limit the retries of the first contact and
        after a broken connection. ``tokenizer`` is the model folder whose tokenizer decodes texts; the default is the
        service's, which requires a shared host. ``token`` may be the Path of a private file that has it, which is read
        again for each session; it may be empty for a client whose certificate has a role. If ``tls`` is None, it is
        that of DORA_TLS and the like. ``replay`` is the source of ``Step.replays``. Raises InvalidValue for a token
        that is not printable ASCII, and for TLS files that cannot be used.
        """
        self.connection = Connection(address, token, max_message_bytes, tls)
        self.patience = Patience(reconnect_s, "reconnect_s")
        self.replay = replay
        self._name = name
        self._take_over = take_over
        self._client_id = os.urandom(16)
        self._connect_s = connect_s
        self._tokenizer_folder = tokenizer
        self._tokenizer: ChatTokenizer | None = None
        self._groups_per_step = 0
        self._attachment: Attachment | None = None
        self._begun = False  # steps were requested since attaching, so next_step may be outdated
        self._stub: TrainerStub | None = None
        self._staying: asyncio.Task[None] | None = None
        self.publishing: Any = None  # the Publication in progress, at most one
        self._sent: Uploaded | None = None  # the version uploaded last
        self._uploaded: Uploaded | None = None  # the version committed last
        self._spare: Future[Spare | None] | None = None
        self._skeleton: Skeleton | None = None
        self._images = Images()

    def __repr__(self) -> str:
        epoch = f"epoch {self._attachment.epoch}" if self._attachment is not None else "not attached"
        return f"<{type(self).__name__} {self._name} at {self.connection.address}, {epoch}>"

    async def __aenter__(self) -> Self:
        self._stub = self.connection.stub(TrainerStub)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._staying is not None:
            self._staying.cancel()
        self._attachment = self._stub = self._staying = None
        self._images.close()
        if self._uploaded is not None:
            self._uploaded.taken.close()
            self._uploaded = None
        await self.connection.close()

    @property
    def stub(self) -> TrainerStub:
        """The generated stub. Raises Conflict outside ``async with``."""
        if self._stub is None:
            used = "used within: async with dora.Trainer(...) as trainer"
            raise Conflict("trainer", self._name, used, why="is not open")
        return self._stub

    @property
    def attachment(self) -> Attachment:
        """The service's reply to the last attach. Raises Conflict before the first one."""
        if self._attachment is None:
            raise Conflict("trainer", self._name, "attached first, by attach() or steps()", why="is not attached")
        return self._attachment

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        """Decodes token ids to text, with or without special tokens; ``trajectory.text`` uses it.

        The first call reads the tokenizer, which may take some seconds; transformers runs outside this process. Raises
        Conflict if the service's folder is not on this host and none was given, InvalidValue for a folder without a
        tokenizer.
        """
        if self._tokenizer is None:
            from dora.prompts.tokenizer import ChatTokenizer  # needed only for texts

            self._tokenizer = ChatTokenizer(self._model_folder())
        return self._tokenizer.decode(token_ids, special_tokens)

    def _model_folder(self) -> Path:
        if self._tokenizer_folder is not None:
            return Path(self._tokenizer_folder)
        if self.attachment.store_folder is None:
            allowed = "given as the model's folder on this host: dora.Trainer(..., tokenizer=FOLDER)"
            raise Conflict("tokenizer", MISSING, allowed)
        return Path(self.attachment.model)

    def stream_step(self, step: int) -> Any:
        """Opens the stream of a step's groups, whose messages are those of :func:`dora.rpc.packed.split`."""
        request = pb.StreamStepRequest(trainer_epoch=self.attachment.epoch, step=step, packed=True)
        stream = self.connection.channel.unary_stream(
            STREAM_STEP, request_serializer=pb.StreamStepRequest.SerializeToString, response_deserializer=split
        )
        return stream(request)

    async def attach(self, groups: int = 0) -> Attachment:
        """Becomes the service's only active trainer. ``groups`` per step; 0 keeps the service's.

        :meth:`Trainer.steps` calls it if needed; call it before to get the model's folder. Raises Conflict if another
        trainer lives and ``take_over`` is False, InvalidValue if the service refuses ``groups``, Unauthenticated, and
        ServiceUnavailable after ``connect_s``.
        """
        if isinstance(groups, bool) or not isinstance(groups, Integral) or not 0 <= groups <= COUNT_MAX:
            raise InvalidValue("groups", groups, f"a number from 1 to {COUNT_MAX}, or 0 to keep the service's")
        self._groups_per_step, self._begun = int(groups), False
        patience, tried = Patience(self._connect_s), False
        while True:
            try:
                return await self._attach()
            except ServiceUnavailable as error:
                if not tried:
                    log.warning("cannot reach %s: trying again for %g s", self.connection.address, self._connect_s)
                tried = True
                await patience.wait(error)

    async def attached(self, groups: int = 0) -> Attachment:
        """Returns the attachment. Attaches unless just done with this ``groups``. Raises as :meth:`attach`."""
        if self._attachment is None or self._begun or groups not in (0, self._groups_per_step):
            await self.attach(groups or self._groups_per_step)
        self._begun = True
        return self.attachment

    async def attach_again(self, error: ServiceUnavailable) -> Attachment:
        """Attaches after the connection broke with ``error``. Raises it after ``reconnect_s`` without progress."""
        while True:
            await self.patience.wait(error)
            try:
                return await self._attach()
            except ServiceUnavailable as repeated:
                error = repeated

    def take(self, weights: Weights, version: int, canary: Canary | None) -> tuple[Taken, Callable[[], Canary | None]]:
        """Copies ``weights`` to the service's folder for ``version``, or into this host's memory. Blocks.

        The caller may change them once it returns. Also returns a function that computes the copy's canary. Raises
        InvalidValue for weights that do not match the model, LimitExceeded if there is no room.
        """
        attachment = self.attachment
        making, self._spare = self._spare, None
        spare = making.result() if making is not None else None
        incoming = self._incoming(version)
        if incoming is not None:
            images = self._images if attachment.takes_images else None
            taken = take_weights(weights, attachment.tensors, incoming, spare, images)
        else:
            with tempfile.TemporaryDirectory(prefix="dora-weights-", dir=self._scratch_parent()) as scratch:
                taken = take_weights(weights, attachment.tensors, Path(scratch))
        if canary is None:
            skeleton = self._skeleton_of(weights)
            if skeleton is not None:
                return taken, lambda: skeleton.canary(taken)
            canary = canary_of(weights, attachment.tensors)
        return taken, lambda: canary

    def _skeleton_of(self, weights: Weights) -> Skeleton | None:
        module = unwrapped(weights) if is_module(weights) else None
        if self._skeleton is None or self._skeleton.module is not module:
            self._skeleton = Skeleton.of(weights, config_of(module)) if module is not None else None
        return self._skeleton

    async def bring(self, taken: Taken, version: int) -> None:
        """Transfers the copied weights to the service. Raises the service's errors."""
        incoming = self._incoming(version)
        if incoming is not None:
            await asyncio.to_thread(taken.bring, incoming)
            return
        epoch = self.attachment.epoch
        base = self._uploaded
        self._sent = await upload(self.connection, self.stub.UploadWeights, epoch, version, taken, base)

    def release(self, taken: Taken) -> None:
        """Releases weights that the service has. Uploaded ones are retained as the base of the next delta."""
        if self._sent is None or self._sent.taken is not taken:
            taken.close()
            return
        if self._uploaded is not None:
            self._uploaded.taken.close()
        self._uploaded, self._sent = self._sent, None

    def make_ready(self, version: int) -> None:
        """Starts allocating space for a future version, so that taking its weights costs only a copy."""
        incoming = self._incoming(version)
        if incoming is not None and self._spare is None:
            self._spare = _thread.submit(_spare, incoming, self._attachment_bytes())

    def beside(self, function: Callable[[], Result]) -> "Future[Result]":
        """Runs a publication's work in a thread, beside training."""
        return _thread.submit(function)

    def _scratch_parent(self) -> Path | None:
        try:
            room = os.statvfs(_SHARED_MEMORY)
        except OSError:
            return None
        fits = 2 * self._attachment_bytes() < room.f_bavail * room.f_frsize
        return _SHARED_MEMORY if fits and os.access(_SHARED_MEMORY, os.W_OK) else None

    def _incoming(self, version: int) -> Path | None:
        attachment = self.attachment
        if attachment.store_folder is None:
            return None
        return attachment.store_folder / "incoming" / f"{attachment.epoch}-{version}"

    def _attachment_bytes(self) -> int:
        ordered = laid_out(self.attachment.tensors)
        return len(preamble(ordered)) + sum(tensor.content_bytes for tensor in ordered)

    async def _attach(self) -> Attachment:
        request = pb.AttachRequest(
            groups_per_step=self._groups_per_step,
            client_name=self._name,
            take_over=self._take_over,
            client_id=self._client_id,
        )
        reply = await self.connection.call(self.stub.Attach, request, _ATTACH_TIMEOUT_S)
        self._take_over = False  # a trainer that was replaced does not take over in its turn
        self._attachment = await asyncio.to_thread(attachment_of, reply)
        if self._attachment.max_message_bytes:
            limit_bytes = min(self.connection.max_message_bytes, self._attachment.max_message_bytes)
            self.connection.max_message_bytes = limit_bytes
        if self._staying is not None:
            self._staying.cancel()
        self._staying = asyncio.create_task(self._stay(self.stub, reply.trainer_epoch))
        return self._attachment

    async def _stay(self, stub: TrainerStub, epoch: int) -> None:
        """Holds a call open, whose end notifies the service that this trainer has left, and opens it again after the
        connection has broken, until another trainer has attached. Nothing else depends on it.
        """
        request = pb.KeepAliveRequest(trainer_epoch=epoch, client_name=self._name, client_id=self._client_id)
        patience = Patience(math.inf)
        with contextlib.suppress(DoraError):
            while True:
                try:
                    call = stub.KeepAlive(request)
                    while await self.connection.read(call) is not None:
                        patience.progress()
                    return
                except ServiceUnavailable as error:
                    await patience.wait(error)


def _spare(incoming: Path, file_bytes: int) -> Spare | None:
    """Allocates space. Returns None without room; taking the weights then reports the error."""
    try:
        return Spare.made(incoming, file_bytes, incoming.parent.parent / RECYCLED_FOLDER / WEIGHTS_FILE)
    except OSError:
        return None


def attachment_of(reply: pb.AttachReply) -> Attachment:
    """Converts the reply. Reads the service's proof file to detect a shared host, which blocks."""
    tensors = tuple(
        TensorHeader(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.optional) for tensor in reply.tensors
    )
    return Attachment(
        epoch=reply.trainer_epoch,
        next_step=reply.next_step,
        groups_per_step=reply.groups_per_step,
        window_versions=reply.window_versions,
        model=reply.model,
        reference_version=reply.reference_version,
        max_message_bytes=reply.max_message_bytes,
        tensors=tensors,
        store_folder=Path(reply.store_folder) if _shares_host(reply) else None,
        takes_images=reply.takes_images,
    )


def _shares_host(reply: pb.AttachReply) -> bool:
    if not (reply.store_folder and reply.store_proof and reply.store_proof_bytes):
        return False
    try:
        with Path(reply.store_proof).open("rb") as proof:
            same = proof.read(len(reply.store_proof_bytes) + 1) == reply.store_proof_bytes
    except OSError:  # another host, or another user's folder
        return False
    return same and os.access(Path(reply.store_folder) / "incoming", os.W_OK)
