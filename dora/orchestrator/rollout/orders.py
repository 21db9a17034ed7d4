"""Turns the core's commands to workers into wire messages, with the shell's data: tokens, weights, canaries."""

from typing import Final, Protocol

from dora.core import commands as do
from dora.data.types import Canary, EngineCapability, KvEndpoint, PoolCapability
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb

GROWTH_BLOCKS: Final = 2  # growth allowed to a request while its blocks are copied ahead


class HostVersions(Protocol):
    """Describes the hosts with stores of their own, and the versions that are live on them (hosts.py)."""

    def name(self, version: int) -> str: ...
    def canary(self, version: int) -> Canary | None: ...
    def retired(self, version: int) -> None: ...
    def shares_store(self, worker_id: str) -> bool: ...
    def look_at_store(self, version: int) -> None: ...
    def missing(self, worker_id: str, version: int) -> None: ...
    async def lacks(self, worker_id: str, version: int) -> bool: ...


class Reached(Protocol):
    """Describes a connected worker or pool (streams.py) as the target or source of KV snapshots."""

    worker_id: str
    epoch: int
    kv: KvEndpoint

    @property
    def capability(self) -> EngineCapability | PoolCapability: ...


def worker_message(
    command: do.WorkerCommand,
    buffer: ResponseBuffer,
    store: HostVersions,
    source: Reached | None = None,
    target: Reached | None = None,
    measure: Reached | None = None,
    was_parked: bool = False,
    has_pool: bool = False,
) -> pb.WorkerCommand:
    """Returns the message of ``command``. Notes in the response buffer how a request will arrive at its worker.

    ``source`` and ``target`` are the connected ends of the command's handoff. Each gets the other's address, so that
    they talk without the service; a message without an address is answered with a failure. ``measure`` tells the size
    of the KV, if the source does not. With ``was_parked`` the source is, or was, a pool. With ``has_pool`` a request
    need not queue at its target.
    """
    message = pb.WorkerCommand(command_id=command.command_id)
    match command:
        case do.LoadVersion(version=version):
            canary = store.canary(version)
            wire = convert.canary_to_wire(canary) if canary else pb.Canary()
            message.load_version.CopyFrom(pb.LoadVersion(version=version, name=store.name(version), canary=wire))
        case do.StartRequest(request_id=request_id, arrival=arrival):
            response = buffer.arrives(request_id, command.worker_id, arrival)
            start = convert.request_to_wire(response.spec())
            start.row = response.row
            return pb.WorkerCommand(command_id=command.command_id, start_request=start)
        case do.ExtendRequest(request_id=request_id):
            response = buffer[request_id]
            run = response.inputs[-1]
            extend = pb.ExtendRequest(request_id=request_id, row=response.row)
            extend.sampling.CopyFrom(convert.sampling_to_wire(response.turn_sampling()))
            extend.given_token_ids = response.buffered()["token_id"][run.buffer_begin : run.buffer_end].tobytes()
            extend.first_token, extend.prompt_logprobs = run.first_token, run.prompt_logprobs
            extend.dropped_tokens = response.path_tokens(len(response.inputs) - 1) - run.first_token
            message.extend_request.CopyFrom(extend)
        case do.RemoveRequest(request_id=request_id):
            message.remove_request.request_id = request_id
        case do.ReserveSlot(request_id=request_id, version=version, kv_tokens=kv_tokens):
            reserve = pb.ReserveSlot(request_id=request_id, version=version, kv_tokens=kv_tokens, needs_slot=has_pool)
            if source is not None:
                reserve.source_epoch = source.epoch
                reserve.kv_bytes, reserve.most_bytes = _kv_bytes(measure or source, kv_tokens)
            message.reserve_slot.CopyFrom(reserve)
        case do.CancelReservation(request_id=request_id):
            message.cancel_reservation.request_id = request_id
        case do.CopyOut(request_id=request_id):
            peer = pb.KvPeer() if target is None else _peer(target)
            message.copy_out.CopyFrom(pb.CopyOut(request_id=request_id, target=peer))
        case do.CopyIn(request_id=request_id, version=version, locator=locator):
            response = buffer.arrives(request_id, command.worker_id, "parked" if was_parked else "migrated")
            copy_in = pb.CopyIn(request_id=request_id, version=version, locator=locator, row=response.row)
            message.copy_in.CopyFrom(copy_in)
        case do.Thaw(request_id=request_id):
            message.thaw.request_id = request_id
    return message


def _kv_bytes(source: Reached, kv_tokens: int) -> tuple[int, int]:
    """Returns the expected and the largest bytes of a snapshot of this source; 0 means unknown, as for a pool."""
    capability = source.capability
    if isinstance(capability, PoolCapability):
        return 0, 0
    blocks = -(-kv_tokens // capability.block_tokens) + GROWTH_BLOCKS
    most_blocks = -(-capability.max_model_len_tokens // capability.block_tokens)
    block_bytes, state_bytes = capability.kv_token_bytes * capability.block_tokens, capability.state_bytes
    return min(blocks, most_blocks) * block_bytes + state_bytes, most_blocks * block_bytes + state_bytes


def _peer(worker: Reached) -> pb.KvPeer:
    kv = worker.kv
    return pb.KvPeer(worker_id=worker.worker_id, epoch=worker.epoch, address=kv.address, transports=kv.transports)
