"""The protocol of inference engines in a rollout worker. One object, one thread, one process, one policy version.

The worker calls :meth:`RolloutEngine.step` in a loop and all other methods *between* steps. An engine therefore needs
no locks, and nothing is in flight when a request is frozen, exported or imported. Implementations:
``vllm.engine.VllmEngine`` and ``fake.engine.FakeEngine``; both pass ``tests/contract/test_engine.py`` and
``test_engine_turns.py``.

A request with ``keeps`` may have several turns. When a turn ends (stop token, stop string, ``max_tokens``, context),
its delta has the finish reason and the request is *kept*: it has no slot, causes no work, and its KV blocks stay and
count as used. ``extend`` continues it; environment tokens are computed once, after the last sampled token, which has no
KV until then.
The engine does not give up a kept request's KV: to make room, its owner removes it and later adds it with all its
tokens.

A kept request may also continue after an earlier output. Its KV is then cut there, and only the environment tokens are
computed. If other requests hold the block of the cut, the block's tokens before the cut are computed again. If the KV
waits for blocks, if a sliding window has left some of it behind, or if the model's state is more than lists of blocks,
all tokens are. Both are counted. A request that was cut does not move before its next token.

A request with ``prompt_logprobs`` brings the logprobs of all tokens before its turn with the turn's first token. Its
prefill reads no cache, and until then its KV does not move. A request that is resumed after its turn's first token
brings none.

Each turn is sampled as a request whose prompt is everything before it: ``max_tokens``, ``min_tokens``, stop strings and
the presence and frequency penalties count the turn's own sampled tokens, and the repetition penalty counts all tokens.
The random stream spans the session: its position is the number of outputs, given ones included. A session that is
added with all its tokens therefore continues as the kept one does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dora.data.remembered import Remembered
from dora.data.types import Canary, EngineCapability, EngineLoad, RequestSpec, SamplingParams, TokenDelta
from dora.kvtransfer.device import DeviceMemory
from dora.kvtransfer.snapshot import FullBlocks, KvLayout, KvSnapshot, SegmentId
from dora.worker.reservation import Reservation


class RolloutEngine(Protocol):
    @property
    def capability(self) -> EngineCapability: ...

    @property
    def layout(self) -> KvLayout:
        """The layout of its KV blocks."""

    @property
    def device_memory(self) -> DeviceMemory | None:
        """Memory on its device for KV straight from another device, or None if KV passes through host memory."""

    @property
    def version(self) -> int | None:
        """The loaded policy version; None before the first load and after a failed one."""

    def load_weights(self, version: int, folder: Path, canary: Canary | None) -> Canary:
        """Replaces the weights in place by ``folder/*.safetensors`` (Hugging Face names) and separates caches by
        version.

        Returns the canary as this engine computes it (of a built-in prompt if ``canary`` is None). Raises Conflict
        while requests are held or expected, without a change; InvalidValue for missing, unknown or misshapen tensors,
        before any weight is changed; CanaryMismatch if logprobs differ from ``canary`` by more than the tolerance or
        are not finite. After the latter two ``version`` is None until a load succeeds.
        """

    def add(self, request: RequestSpec) -> None:
        """Starts a request, or resumes it exactly by re-prefilling its outputs (counted).

        Its deltas start at ``len(output_token_ids)``, so delivered tokens are not reported again. Raises InvalidValue
        if prompt and outputs do not fit the context, or the request is kept; Conflict for a known id or a version that
        is not loaded. A session resumes in the turn after its last environment tokens.
        """

    def extend(
        self,
        request_id: str,
        given_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        after: int | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        """Continues a kept request: appends environment tokens, then samples a turn as ``sampling`` says.

        It precedes waiting requests without KV. With ``prompt_logprobs`` it gives its KV up and is prefilled whole. The
        environment tokens follow ``after`` outputs, by default all, and later ones are dropped. Raises NotFound as
        ``freeze`` does; Conflict for a request that is not kept, or is frozen; InvalidValue for no tokens, tokens
        outside the vocabulary, more than the context has room for with one to sample, more outputs than there are, or
        sampling that ``add`` would refuse. A refusal changes nothing.
        """

    def step(self) -> list[TokenDelta]:
        """Runs one engine step and returns its tokens; [] at once if there is no work."""

    def freeze(self, request_id: str) -> None:
        """Stops scheduling the request and keeps its slot and blocks. No effect on a frozen request. A kept request
        is kept again after ``thaw``.

        Raises NotFound for an unknown or finished request.
        """

    def thaw(self, request_id: str) -> None:
        """Undoes ``freeze``; the request continues unchanged. Raises NotFound as ``freeze`` does."""

    def request(self, request_id: str) -> RequestSpec:
        """Returns the request with its present outputs. Raises NotFound as ``freeze`` does."""

    def export(self, request_id: str, first: int = 0) -> KvSnapshot | None:
        """Returns a frozen request's state and its KV from block ``first`` on, the partial last block included.

        Nothing is copied: the snapshot refers to the engine's blocks, which do not change until the request is removed
        or thawed. ``first`` is the number of blocks that ``full_blocks`` has shown in this segment.

        Returns None if the KV cannot move exactly (no token sampled yet, preempted, or a model whose state is more than
        one list of blocks): it must then be re-prefilled. The request stays frozen until it is removed or thawed.
        Raises NotFound, and Conflict for a request that is not frozen.
        """

    def final_blocks(self, request_id: str) -> tuple[SegmentId, int]:
        """Returns the segment and the end of the final blocks, as ``full_blocks`` does, without the blocks."""

    def full_blocks(self, request_id: str, first: int, most: int | None = None) -> FullBlocks:
        """Returns the final blocks of a decoding request from block ``first`` on, to be copied while it decodes: all,
        or ``most`` of them.

        The partial last block is excluded, and the block before it if that is the only one. Blocks shared with other
        requests of the prompt are included. Another thread may read them until the segment ends, which a later call
        reports; bytes read in an ended segment are void. Raises NotFound as ``freeze`` does, and Conflict with a reason
        for a request that does not decode: it waits for a slot, is preempted or in prefill, or its model's state is
        more than one list of blocks.
        """

    def siblings(self, request_id: str, blocks: int) -> dict[str, tuple[SegmentId, int]]:
        """Returns other requests that share some of this one's first ``blocks`` blocks: their segment, and the count.

        The blocks are identical, not equal, and full. Raises NotFound as ``freeze`` does.
        """

    @property
    def reserved(self) -> int:
        """The number of reserved slots."""

    def reserve(self, request_id: str, kv_tokens: int, *, kept: bool = False) -> Reservation:
        """Reserves a slot for an arriving request; waiting requests do not get it. A ``kept`` one gets blocks alone.

        If a slot is free, blocks for ``kv_tokens`` tokens and a margin come with it, and count as used. The request's
        KV is written there before the request is taken in. A request that has to wait for a slot gets no blocks. The
        reservation prepares the request in the thread that writes to it. A request that was kept when its reservation
        began and arrives in its next turn waits for a slot with its KV. Raises Conflict if a slot is free or not needed
        but those blocks are not free, or if the id is already reserved.
        """

    def release(self, request_id: str) -> None:
        """Undoes ``reserve``. Unknown ids are ignored."""

    def take_in(self, snapshot: KvSnapshot) -> None:
        """Resumes a request from its snapshot without re-prefill, in its reservation if it has one.

        A kept request is kept here; its KV gets blocks at once, or without room when the request continues.

        Blocks that arrived before the snapshot are used in place. Without a free slot or room the request waits with
        its snapshot, before all requests without one; the snapshot's arrays are kept until then. Raises SnapshotRefused
        if layout or version do not match, its parts contradict each other, or its earlier blocks are missing; Conflict
        for a known id, InvalidValue as ``add`` does.
        """

    def remove(self, request_id: str) -> None:
        """Removes a running, frozen or kept request and frees its blocks. Unknown ids are ignored."""

    def remember(self, response: Remembered) -> None:
        """Enters what another engine sampled, for drafts. No sample depends on it."""

    def draft_always(self, tokens: int) -> bool:
        """Drafts so many arbitrary tokens for each request in each step, to time their verification; 0 ends it. Returns
        False, and does nothing, for an engine that verifies no drafts.
        """

    def load(self) -> EngineLoad: ...

    def has_work(self) -> bool:
        """Returns whether ``step`` would do anything."""

    def close(self) -> None: ...
