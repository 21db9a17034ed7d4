"""vLLM as a rollout engine: in this process, stepped by its owner, with nothing in flight between steps.

``core`` starts vLLM, ``scheduler`` holds and resumes requests, ``connector`` brings KV in, and
``vllm_weights`` replaces weights. vLLM is imported with the first engine. A process has one engine, because vLLM's KV
connector is a global of the process.
"""

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora.data.remembered import Remembered
from dora.data.types import (
    Canary,
    EngineCapability,
    EngineLoad,
    RequestSpec,
    TokenDelta,
)
from dora.engine_patches.patch import PatchFailed
from dora.kvtier.chunks import ChunkShape
from dora.kvtransfer.device import DeviceMemory
from dora.kvtransfer.snapshot import FullBlocks, KvSnapshot, SegmentId
from dora.models import context_tokens, routing
from dora.models.drafts import check_draft, draft_folder
from dora.models.ends import end_token_ids
from dora.weights.canary_bounds import bound_of
from dora.weights.load_time import READ_SHARE, load_limit_s
from dora.weights.reference import read_reference
from dora.worker.base_engine import BaseEngine
from dora.worker.drafting.drafter import Drafter, FixedDrafter
from dora.worker.reservation import Reservation
from dora.worker.stop_strings import StopStrings
from dora.worker.vllm import environment as vllm_environment
from dora.worker.vllm.device.choice import device_named
from dora.worker.vllm.device.port import Device, EngineSettings, Kind, check_verifiable
from dora.worker.vllm.views import EngineRequest, KvViews

if TYPE_CHECKING:
    from dora.kvtier.tier import Tier

log = logging.getLogger("dora.worker")

NOISE_SCORES: Final = 3  # of the same weights, before the reload proof


class VllmEngine(BaseEngine[EngineRequest]):
    """A ``RolloutEngine``. It starts with random weights: ``version`` is None until ``load_weights``.

    Re-prefilled tokens are those whose KV was computed before, here or elsewhere: prompt and outputs without the last
    token and without the prefix cache's hits.
    """

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        *,
        device: Kind | Device = "cpu",
        lost: Callable[[str], None] | None = None,
        tier_endpoint: str = "",
        router_replay: bool = False,
        load_timeout_s: float = 60.0,
    ) -> None:
        """``tier_endpoint`` is the address of the shared KV tier, if any. With ``router_replay`` deltas carry the
        experts of each token. A load may take ``load_timeout_s``, or more if it is large (``load_limit_s``).

        ``lost`` is called in a separate thread if a rank ends unexpectedly; without it this process ends too. Raises
        InvalidValue for a folder without a model or settings that vLLM refuses, PatchFailed.
        """
        self._device = device_named(device) if isinstance(device, str) else device
        settings = replace(settings, dtype=settings.dtype or self._device.default_dtype)
        if folder := draft_folder(settings.speculation):
            check_draft(folder, model)
        bound = bound_of(settings.numerics)
        self._reference = read_reference(model)
        self._load_s = READ_SHARE * load_limit_s(self._reference.content_bytes, load_timeout_s)
        vllm_environment.prepare(self._device.environment, batch_invariant=settings.batch_invariant)
        from dora.worker.vllm import checkpoints as vllm_checkpoints
        from dora.worker.vllm import core as vllm_core
        from dora.worker.vllm import groups as vllm_groups
        from dora.worker.vllm import ranks as vllm_ranks
        from dora.worker.vllm import requests as vllm_requests
        from dora.worker.vllm import turns as vllm_turns
        from dora.worker.vllm import weights as vllm_weights

        self._requests, self._weights = vllm_requests, vllm_weights
        self._core: Any = vllm_core.start(model, settings, self._device, lambda: _drafter_of(settings, self._device))
        self._ranks = vllm_ranks.EngineRanks(
            self._core, self._device, lost or vllm_ranks.end_process, routing(model) if router_replay else None
        )
        self._scheduler.routing = self._ranks.routing
        self._store = self._scheduler.connector.store = self._ranks.store
        self._groups = vllm_groups.groups_of(self._core.scheduler.kv_cache_config)
        self._takes_ahead = vllm_core.takes_ahead(self._core)
        self._why_unmovable = vllm_core.why_unmovable(self._core)
        if self._scheduler.has_mamba_layers and not self._why_unmovable:
            self._scheduler.checkpoints = vllm_checkpoints.Checkpoints(self._store, self._groups, settings.state_bytes)
        layout = vllm_core.layout_of(self._core, self._ranks, self._reference, settings)
        capability = EngineCapability(
            fingerprint=layout.fingerprint,
            slots=settings.slots,
            kv_tokens=vllm_core.kv_tokens_of(self._core, settings.kv_tokens),
            block_tokens=layout.block_tokens,
            max_model_len_tokens=settings.max_model_len_tokens,
            vocab_size=self._reference.vocab_size,
            dtype=settings.dtype,
            tensor_parallel=settings.tensor_parallel,
            pipeline_parallel=settings.pipeline_parallel,
            full_precision=settings.full_precision,
        )
        super().__init__(capability, layout, bound)
        self._drafter: Drafter | None = self._core.drafter
        if settings.speculation:
            check_verifiable(settings, has_state=bool(layout.state_bytes))
            self._scheduler.drafter = self._drafter
        self._is_reload_proven = False
        self._turns = vllm_turns.Turns(self._core, self._device, end_token_ids(model), StopStrings(model))
        self._views = KvViews(
            self._scheduler,
            self._store,
            self._layout,
            self._groups,
            self._why_unmovable,
            self._takes_ahead,
        )
        self._tier: Any = None
        if tier_endpoint:
            self._tier = self._open_tier(tier_endpoint)

    @property
    def device_memory(self) -> DeviceMemory | None:
        return self._store.device_memory

    def load_weights(self, version: int, folder: Path, canary: Canary | None) -> Canary:
        found = super().load_weights(version, folder, canary)
        if self._device.proves_reloads and not self._is_reload_proven:
            self._version = None
            self._prove_reloads(folder, found)
            self._version, self._is_reload_proven = version, True
        return found

    def _replace_weights(self, version: int, folder: Path) -> None:
        files = self._weights.check_files(folder, self._reference)
        self._ranks.replace_weights([str(file) for file in files], self._load_s)
        self._reset_prefix_cache()

    def _prove_reloads(self, folder: Path, found: Canary) -> None:
        """Raises PatchFailed if reloads in place do not reach every kind of tensor (``reload_proof``).

        ``found`` is the canary of the loaded version. Loads it as often as its tensors have kinds, and once more.
        Kernels may sum in no fixed order, so what counts as equal follows from repeated scores.
        """
        from dora.engine_patches import reload_proof

        files = [str(file) for file in self._weights.check_files(folder, self._reference)]
        noise = 2 * max(self._distance(found) for _ in range(NOISE_SCORES))
        for kind in reload_proof.kinds(tensor.name for tensor in self._reference.tensors):
            self._ranks.replace_weights(files, self._load_s, kind, found.token_ids)
            self._reset_prefix_cache()
            if self._distance(found) <= noise:
                raise PatchFailed("reload_proof", f"changed weights ({kind}) do not change the model's logprobs")
        self._ranks.replace_weights(files, self._load_s)
        self._reset_prefix_cache()
        if (distance := self._distance(found)) > noise:
            said = f"the same weights give logprobs {distance:g} apart after others were loaded, {noise:g} is noise"
            raise PatchFailed("reload_proof", said)

    def _distance(self, canary: Canary) -> float:
        return max(map(abs, map(operator.sub, self._score(canary.token_ids), canary.logprobs)))

    def step(self) -> list[TokenDelta]:
        if not self.has_work():
            return []
        outputs, _ = self._step()
        if self._scheduler.drafter is not None:
            self._scheduler.drafter.stepped()
        deltas = [self._delta(output) for batch in outputs.values() for output in batch.outputs]
        if self._tier is not None:
            self._tier.keep_new()
        return deltas

    def freeze(self, request_id: str) -> None:
        live = self._find(request_id)
        if live.engine_id not in self._scheduler.held:
            self._scheduler.hold(live.engine_id)

    def thaw(self, request_id: str) -> None:
        live = self._find(request_id)
        if live.engine_id in self._scheduler.held:
            self._scheduler.take_up(live.engine_id)

    def export(self, request_id: str, first: int = 0) -> KvSnapshot | None:
        return self._views.export(self._find(request_id), first)

    def final_blocks(self, request_id: str) -> tuple[SegmentId, int]:
        return self._views.final_blocks(self._find(request_id))

    def full_blocks(self, request_id: str, first: int, most: int | None = None) -> FullBlocks:
        return self._views.full_blocks(self._find(request_id), first, most)

    def siblings(self, request_id: str, blocks: int) -> dict[str, tuple[SegmentId, int]]:
        return self._views.siblings(self._find(request_id), self._live, blocks)

    def remove(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._turns.forget(live)
            self._core.abort_requests([live.engine_id])

    def remember(self, response: Remembered) -> None:
        if self._scheduler.drafter is not None:
            self._scheduler.drafter.remember(response)

    def draft_always(self, tokens: int) -> bool:
        if self._layout.state_bytes:
            return False
        self._scheduler.drafter = FixedDrafter(tokens) if tokens else self._drafter
        return True

    def load(self) -> EngineLoad:
        self._scheduler.prefixes.sweep()
        pool = self._scheduler.kv_cache_manager.block_pool
        blocks, drafter, states = pool.num_gpu_blocks - 1, self._scheduler.drafter, self._scheduler.checkpoints
        blocks_used, kv_tokens = blocks - pool.get_num_free_blocks(), self._capability.kv_tokens
        return EngineLoad(
            running=self._scheduler.running_count(),
            waiting=self._scheduler.waiting_count(),
            kv_used_tokens=-(-blocks_used * kv_tokens // blocks),
            reprefilled_tokens=self._scheduler.reprefilled_tokens,
            generated_tokens=self._generated_tokens,
            tier=None if self._tier is None else self._tier.load,
            preemptions=self._scheduler.preemptions,
            state_bytes=0 if states is None else states.held_bytes,
            states_dropped=0 if states is None else states.dropped,
            drafted_tokens=0 if drafter is None else drafter.drafted_tokens,
            accepted_tokens=0 if drafter is None else drafter.accepted_tokens,
        )

    def has_work(self) -> bool:
        return self._scheduler.get_num_unfinished_requests() > 0

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
        self._ranks.close()
        self._core.shutdown()

    @property
    def core(self) -> Any:
        """vLLM's EngineCore, for inspection; only this object steps it."""
        return self._core

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of its ranks, or none if the only rank is in this process."""
        return self._ranks.pids

    @property
    def tier(self) -> "Tier | None":
        """This worker's part of the shared KV tier."""
        return None if self._tier is None else self._tier.tier

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    def _enter(self, request: RequestSpec, snapshot: KvSnapshot | None, reservation: Reservation | None) -> None:
        begun = None if reservation is None else reservation.begun_with(request)
        self._start(request, self._make_ahead(request) if begun is None else begun.made, snapshot, reservation)

    def _start(
        self, request: RequestSpec, made: Any, snapshot: KvSnapshot | None, reservation: Reservation | None
    ) -> None:
        live = self._live[request.request_id] = self._turns.live_of(request, made)
        if self._tier is not None:
            self._tier.begin(live.engine_id, request.version)
        self._turns.start(request, made, snapshot, reservation)

    def _make_ahead(self, request: RequestSpec) -> Any:
        return self._turns.make(request)

    def _is_frozen(self, request_id: str) -> bool:
        return self._live[request_id].engine_id in self._scheduler.held

    def _extend(self, live: EngineRequest, request: RequestSpec, after: int) -> None:
        is_cut = after < len(live.outputs)
        if not (request.owes_prompt or (is_cut and self._why_unmovable)) and self._turns.extend(live, request, after):
            if is_cut and self._tier is not None:
                self._tier.cut(live.engine_id)
            return
        made = self._make_ahead(request)  # before anything changes: it may refuse the sampling
        self.remove(request.request_id)
        self._start(request, made, None, None)

    def _so_far(self, live: EngineRequest) -> RequestSpec:
        return live.so_far

    def _open_tier(self, endpoint: str) -> Any:
        """Opens its part of the shared tier. Returns None if a request's state is more than one list of blocks."""
        from dora.kvtier.tier import Tier
        from dora.worker.vllm.tier import TIER_BYTES, TierPrefixes

        if not self._takes_ahead:
            log.warning("no KV tier: a request of this model has more state than one list of blocks of all its tokens")
            return None
        shape = ChunkShape.of(self._layout)
        tier = Tier(endpoint, shape, TIER_BYTES)
        self._scheduler.connector.tier = TierPrefixes(tier, shape, self._store, self._scheduler)
        return self._scheduler.connector.tier

    def _slots_left(self) -> int:
        return self._capability.slots - self._scheduler.running_count() - self._scheduler.waiting_with_kv_count()

    def _free_blocks(self) -> int:
        return int(self._scheduler.free_blocks())

    def _reserve(self, count: int) -> Reservation:
        block_ids = self._scheduler.take_blocks(count if self._takes_ahead else 0)
        return Reservation(self._layout, block_ids, self._store, self._make, self._scheduler.prefixes)

    def _free(self, reservation: Reservation) -> None:
        self._scheduler.give_back(reservation)

    def _slots_changed(self) -> None:
        self._scheduler.reserve_slots(self.reserved)

    def _delta(self, output: Any) -> TokenDelta:
        live, delta = self._turns.delta(output)
        self._generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and not live.request.keeps:
            if delta.stop:
                self.remove(delta.request_id)
            else:  # vLLM has removed it
                del self._live[delta.request_id]
                self._turns.forget(live)
        return delta

    def _step(self) -> Any:
        """Runs a step of the core. Its forward pass sees all KV written before it, and within it by the scheduler."""
        self._store.join()
        return self._core.step()

    def _reset_prefix_cache(self) -> None:
        self._scheduler.prefixes.sweep()
        if not self._core.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: blocks are in use although no request is held")

    def _score(self, token_ids: Sequence[int]) -> Sequence[float]:
        core_request = self._requests.scoring(tuple(token_ids), self._turns.next_engine_id("canary"))
        self._core.add_request(self._core.preprocess_add_request(core_request)[0])
        while self.has_work():
            outputs, _ = self._step()
        (scored,) = (output for batch in outputs.values() for output in batch.outputs)
        logprobs = scored.new_prompt_logprobs_tensors.logprobs[:, 0]
        self._reset_prefix_cache()
        return logprobs.tolist()


def _drafter_of(settings: EngineSettings, device: Device) -> Drafter | None:
    if not settings.speculation:
        return None
    if (folder := draft_folder(settings.speculation)) is None:
        return Drafter(settings.history_bytes, is_shared=settings.speculation == "history")
    choose = device.draft_sampler(settings)
    from dora.worker.drafting.draft_model import DraftModel
    from dora.worker.drafting.model_drafter import ModelDrafter

    tokens = min(settings.max_model_len_tokens, context_tokens(folder) or settings.max_model_len_tokens)
    model = DraftModel(folder, settings.dtype, settings.slots, tokens, settings.history_bytes, device.kind)
    log.info(
        "drafts by %s: %.3g MB of weights and KV, %d requests at a time", folder, model.size_bytes / 1e6, model.rows
    )
    return ModelDrafter(model, choose)
