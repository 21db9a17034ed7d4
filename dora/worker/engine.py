"""What a rollout worker asks of an inference engine. One object, one thread, one process, one policy version.

The worker calls :meth:`RolloutEngine.step` in a loop and everything else *between* steps, so an engine needs no locks
and nothing is in flight when a request is frozen, exported or imported. Implementations: ``vllm_engine.VllmEngine``
and ``fake_engine.FakeEngine``; both pass ``tests/contract/test_engine.py``.
"""

from pathlib import Path
from typing import Protocol

from dora.data.types import Canary, EngineCapability, EngineLoad, RequestSpec, TokenDelta
from dora.kvtransfer.snapshot import FullBlocks, KvLayout, KvSnapshot, Stay
from dora.worker.reservation import Reservation


class RolloutEngine(Protocol):
    """One worker's engine."""

    @property
    def capability(self) -> EngineCapability: ...

    @property
    def layout(self) -> KvLayout:
        """Of its KV blocks."""

    @property
    def version(self) -> int | None:
        """The policy version loaded, None before the first load and while a failed load is being repeated."""

    def load_weights(self, version: int, folder: Path, canary: Canary | None) -> Canary:
        """Replaces the weights in place by ``folder/*.safetensors`` (Hugging Face names) and fences caches by version.

        Returns the canary as this engine reproduces it (for ``canary=None``: of a built-in prompt).
        Raises Conflict while requests are still held or expected, which changes nothing; InvalidValue for missing,
        unknown or misshapen tensors, before any weight is touched; CanaryMismatch where logprobs differ from ``canary``
        by more than the tolerance, or are not finite. After the latter two ``version`` is None until a load succeeds.
        """

    def add(self, request: RequestSpec) -> None:
        """Starts a request, or resumes it exactly from its outputs by re-prefilling them (counted).

        Its deltas continue at ``len(output_token_ids)``: what was delivered is not reported again.
        Raises InvalidValue where prompt plus outputs do not fit the context, Conflict for a known id or when
        ``request.version`` is not the version loaded.
        """

    def step(self) -> list[TokenDelta]:
        """Runs one engine step; the tokens it produced. Returns at once with [] when there is nothing to run."""

    def freeze(self, request_id: str) -> None:
        """Stops scheduling the request and keeps its slot and blocks; nothing to do if it is frozen already.

        Raises NotFound for an unknown or finished request.
        """

    def thaw(self, request_id: str) -> None:
        """Undoes ``freeze``: the request goes on as if nothing had happened. Raises NotFound as ``freeze`` does."""

    def request(self, request_id: str) -> RequestSpec:
        """The request with the outputs that it has now. Raises NotFound as ``freeze`` does."""

    def export(self, request_id: str, first: int = 0) -> KvSnapshot | None:
        """A frozen request's state, and its KV from its block ``first`` on, the partial tail block included.

        Nothing is copied: the snapshot shows the engine's own blocks, which stay as they are until the request is
        removed or thawed. ``first``: so many blocks ``full_blocks`` has shown in this stay.

        None where this request's KV cannot move exactly (no token sampled yet, preempted, a model whose state is more
        than one list of blocks): it must then be re-prefilled. The request stays frozen, and held, until it is removed
        or thawed. Raises NotFound, and Conflict for a request that is not frozen.
        """

    def final_blocks(self, request_id: str) -> tuple[Stay, int]:
        """What ``full_blocks`` says of its stay and of where its final blocks end, without them. Raises as it does."""

    def full_blocks(self, request_id: str, first: int) -> FullBlocks:
        """The final blocks of a request that decodes, from its block ``first`` on, to be copied while it goes on.

        The partial block at the end is never among them, nor the one before it where that is all there is. Blocks that
        it shares with others of the same prompt are. They may be read from another thread until the stay is over, which
        a later call tells; what was read in a stay that is over is void.
        Raises NotFound as ``freeze`` does, and Conflict with the reason for a request that does not decode: it waits
        for a slot, is preempted or in prefill, or its model's state is more than one list of blocks.
        """

    def siblings(self, request_id: str, blocks: int) -> dict[str, tuple[Stay, int]]:
        """Other requests that have some of the first ``blocks`` blocks of this one: in which stay, and how many.

        They are the same blocks, not equal ones; all of them are full. Raises NotFound as ``freeze`` does.
        """

    @property
    def reserved(self) -> int:
        """Slots that are kept."""

    def reserve(self, request_id: str, kv_tokens: int) -> Reservation:
        """Keeps a slot for a request that is to be taken in: no request that waits gets the last ones.

        Where a slot is free it comes with blocks for ``kv_tokens`` tokens and a margin, into which the request's KV is
        written before it is taken in; they count as used. A request that has to wait for a slot gets no blocks.
        What the reservation learns of the request is made ready there, in the thread by which it comes.
        Raises Conflict where a slot is free and those blocks are not, or where the id is reserved already.
        """

    def release(self, request_id: str) -> None:
        """Undoes ``reserve``. Unknown ids are ignored."""

    def take_in(self, snapshot: KvSnapshot) -> None:
        """Resumes a request from its snapshot with no token re-prefilled, in what is reserved for it if anything is.

        The blocks that went ahead of the snapshot are taken over where they lie. Where no slot or no room is free the
        request waits, its snapshot held, before all requests that have none; the snapshot's arrays are kept until then.
        Raises SnapshotRefused where layout or version do not match, its parts contradict each other, or what went ahead
        of it is not here; Conflict for a known id, InvalidValue as ``add`` does.
        """

    def remove(self, request_id: str) -> None:
        """Forgets a request, running or frozen, and frees its blocks. Unknown ids are ignored."""

    def load(self) -> EngineLoad: ...

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""

    def close(self) -> None: ...
