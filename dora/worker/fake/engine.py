"""An engine without a model: tokens, logprobs and KV are hashes, so any resume or migration can be checked.

A wrong version, a corrupted block or a lost token changes everything after it, as in a real model, at a thousand times
the speed. ``model`` has the hashes, ``turns`` samples, ``kv`` has the bytes of blocks. Imports no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from dora.data.types import (
    EngineCapability,
    EngineLoad,
    RequestSpec,
    RoutingShape,
    TokenDelta,
)
from dora.errors import Conflict, InvalidValue
from dora.kvtransfer.layout import blocks_for, rng_draws
from dora.kvtransfer.snapshot import STATE, FullBlocks, KvLayout, KvSnapshot, SegmentId
from dora.models import routing
from dora.weights.canary_bounds import CanaryBound
from dora.weights.reference import read_reference
from dora.worker.base_engine import BaseEngine
from dora.worker.fake.kv import FakeRequest, blocks_from, bring_kv, cut_kv, full_blocks_of, with_ahead
from dora.worker.fake.model import KV_BYTES, LAYERS, FakeBlocks, FakeModel, Kv
from dora.worker.fake.turns import FakeTurns
from dora.worker.reservation import Reservation
from dora.worker.stop_strings import StopStrings

ROUTING: Final = RoutingShape(layers=2, top_k=2, experts=8)  # used without a model


class FakeEngine(BaseEngine[FakeRequest]):
    """A ``RolloutEngine``. Re-prefilled tokens: prompt and outputs without the last, at each resume and preemption.

    ``mean_tokens`` is the mean length of responses, which is geometric. ``model`` is a Hugging Face folder that defines
    the tensors of every version and the vocabulary; without it any weights fit, with a vocabulary of ``vocab_size``.
    The second layer reads the last ``window_tokens`` tokens, all for 0, or keeps a state for ``STATE``. With
    ``router_replay`` tokens carry routed experts, shaped by the model's config or ``ROUTING``. With ``full_precision``
    it exchanges KV with others in full precision only, as a real engine does.
    """

    def __init__(
        self,
        *,
        slots: int = 16,
        kv_tokens: int = 32768,
        block_tokens: int = 32,
        max_model_len_tokens: int = 2048,
        vocab_size: int = 64,
        mean_tokens: int = 48,
        seed: int = 0,
        model: Path | None = None,
        window_tokens: int = 0,
        router_replay: bool = False,
        full_precision: bool = False,
    ) -> None:
        """Raises InvalidValue for a KV-cache that is too small, or ``router_replay`` with a model without experts."""
        if kv_tokens < max_model_len_tokens:
            raise InvalidValue("kv_tokens", kv_tokens, f"at least max_model_len_tokens = {max_model_len_tokens}")
        self._reference = None if model is None else read_reference(model)
        vocab_size = vocab_size if self._reference is None else self._reference.vocab_size
        self._model = FakeModel(vocab_size, mean_tokens, seed, window_tokens)
        routed = None
        if router_replay:
            routed = ROUTING if model is None else routing(model)
        identity = (
            "fake",
            vocab_size,
            seed,
            window_tokens,
            *([routed] if routed else []),
            *(["full"] if full_precision else []),
        )
        fingerprint = blake3(repr(identity).encode()).hexdigest(32)
        capability = EngineCapability(
            fingerprint=fingerprint,
            slots=slots,
            kv_tokens=kv_tokens // block_tokens * block_tokens,
            block_tokens=block_tokens,
            max_model_len_tokens=max_model_len_tokens,
            vocab_size=vocab_size,
            dtype="float32",
            full_precision=full_precision,
        )
        layout = KvLayout(
            fingerprint=fingerprint,
            backend="fake",
            dtype="float32",
            block_tokens=block_tokens,
            layers=(
                (LAYERS[0], block_tokens * KV_BYTES),
                (LAYERS[1], (1 if window_tokens == STATE else block_tokens) * KV_BYTES),
            ),
            windows=(0, window_tokens) if window_tokens else (),
            interiors=tuple((1, ((1, KV_BYTES),)) for _ in LAYERS),
        )
        super().__init__(capability, layout, CanaryBound(1e-3))
        self._turns = FakeTurns(self._model, StopStrings(model), max_model_len_tokens, routed)
        self._waiting: deque[str] = deque()
        self._running: list[str] = []
        self._held: dict[str, bool] = {}  # frozen request -> whether it has a slot
        self._kept: set[str] = set()
        self._reprefilled_tokens = 0
        self._preemptions = 0

    def _replace_weights(self, version: int, folder: Path) -> None:
        self._model.load(version, folder, self._reference)

    def _score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return self._model.score(token_ids)

    def step(self) -> list[TokenDelta]:
        self._fill_slots()
        deltas = []
        for request_id in list(self._running):
            if request_id in self._running and self._make_room(request_id):
                deltas.append(self._decode(self._live[request_id]))
        return deltas

    def freeze(self, request_id: str) -> None:
        self._find(request_id)
        if request_id not in self._held:
            has_slot = request_id in self._running
            if request_id not in self._kept:
                (self._running if has_slot else self._waiting).remove(request_id)
            self._held[request_id] = has_slot

    def thaw(self, request_id: str) -> None:
        self._find(request_id)
        if request_id in self._held:
            if self._held.pop(request_id):
                self._running.append(request_id)
            elif request_id not in self._kept:
                self._waiting.appendleft(request_id)

    def export(self, request_id: str, first: int = 0) -> KvSnapshot | None:
        live = self._find(request_id)
        if request_id not in self._held:
            raise Conflict("request_id", request_id, "a frozen request", why="is not frozen")
        request = self._so_far(live)
        draws = rng_draws(len(request.output_token_ids), request.sampling.temperature)
        if live.snapshot is not None:
            blocks = with_ahead(live.snapshot, live.reserved)
            return replace(live.snapshot, request=request, rng_draws=draws, blocks=blocks, ahead=0)
        if not live.decodes:
            return None
        state_tokens = live.kv_tokens if self._layout.state_bytes else 0
        blocks = blocks_from(self._layout, live, first)
        return KvSnapshot(self._layout, request, live.kv_tokens, draws, blocks, first, state_tokens)

    def final_blocks(self, request_id: str) -> tuple[SegmentId, int]:
        live = self._find(request_id)
        if not live.decodes:
            why = "is preempted" if live.preemptions else "waits for a slot, or is in prefill"
            raise Conflict("request_id", request_id, "a request that decodes", why)
        return (live.entry, live.preemptions), (live.kv_tokens - 1) // self._capability.block_tokens

    def full_blocks(self, request_id: str, first: int, most: int | None = None) -> FullBlocks:
        segment, end = self.final_blocks(request_id)
        end = max(first, end)
        shown = end if most is None else min(end, first + most)
        return FullBlocks(segment, end, full_blocks_of(self._layout, self._live[request_id], first, shown))

    def siblings(self, request_id: str, blocks: int) -> dict[str, tuple[SegmentId, int]]:
        """Returns nothing: requests share no KV."""
        return {}

    def remove(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is None:
            return
        is_kept = request_id in self._kept
        self._kept.discard(request_id)
        if self._held.pop(request_id, None) is None and not is_kept:
            (self._running if request_id in self._running else self._waiting).remove(request_id)

    def load(self) -> EngineLoad:
        held_running = sum(self._held.values())
        return EngineLoad(
            running=len(self._running) + held_running,
            waiting=len(self._waiting) + len(self._held.keys() - self._kept) - held_running,
            kv_used_tokens=self._blocks_used() * self._capability.block_tokens,
            reprefilled_tokens=self._reprefilled_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
        )

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def close(self) -> None:
        """Does nothing."""

    # Requests.

    def _enter(self, request: RequestSpec, snapshot: KvSnapshot | None, reservation: Reservation | None) -> None:
        live = FakeRequest(request, *self._turns.begin(request), snapshot=snapshot, reserved=reservation)
        self._live[request.request_id] = live
        if request.kept and snapshot is not None:
            self._kept.add(request.request_id)
            brought = 0 if reservation is None else len(reservation.block_ids)
            if self._blocks_for(snapshot.kv_tokens) < self._free_blocks() + brought:
                self._bring_kv(live)
        elif snapshot is None:
            self._waiting.append(request.request_id)
        else:
            self._waiting.insert(self._with_kv_waiting(), request.request_id)

    def _is_frozen(self, request_id: str) -> bool:
        return request_id in self._held

    def _extend(self, live: FakeRequest, request: RequestSpec, after: int) -> None:
        is_cut = after == len(live.outputs) or cut_kv(self._layout, live, after)
        live.request = request
        live.length, live.outputs, live.logprobs, live.watch = self._turns.begin(request)
        self._kept.discard(request.request_id)
        starts_anew = request.owes_prompt or not is_cut
        if starts_anew:
            live.kv, live.snapshot, live.reserved = Kv(), None, None
            live.preemptions += 1  # the segment of its KV ends
        place = len(self._waiting) if starts_anew else self._with_kv_waiting()
        self._waiting.insert(place, request.request_id)

    def _with_kv_waiting(self) -> int:
        """Returns how many of the first waiting requests have their KV, in blocks or as it was taken in."""
        waiting = (self._live[request_id] for request_id in self._waiting)
        have = (live.snapshot is not None or bool(live.kv) for live in waiting)
        return next((index for index, has_kv in enumerate(have) if not has_kv), len(self._waiting))

    def _slots_changed(self) -> None:
        """Does nothing: slots are counted when they are given."""

    def _slots_left(self) -> int:
        return self._capability.slots - len(self._running) - sum(self._held.values()) - self._with_kv_waiting()

    def _free_blocks(self) -> int:
        return self._blocks() - self._blocks_used() - len(self._running) - sum(self._held.values())

    def _reserve(self, count: int) -> Reservation:
        count = 0 if self._layout.windows else count
        return Reservation(self._layout, range(count), FakeBlocks(self._layout, count), self._make)

    def _so_far(self, live: FakeRequest) -> RequestSpec:
        return live.so_far

    def _make_ahead(self, request: RequestSpec) -> None:
        """Does nothing."""

    def _free(self, reservation: Reservation) -> None:
        """Does nothing: blocks are counted when they are needed."""

    def _fill_slots(self) -> None:
        while self._waiting:
            live = self._live[self._waiting[0]]
            taken = len(self._running) + sum(self._held.values()) + self.reserved
            if taken >= self._capability.slots:
                return
            kept = 0 if live.reserved is None else len(live.reserved.block_ids)
            needed = self._blocks_for(live.tokens) - self._blocks_for(live.kv_tokens)
            if self._blocks_used() - kept + needed > self._blocks():
                if self._running or self._held or not self._give_up_kv():
                    return
                continue
            self._waiting.popleft()
            self._running.append(live.request.request_id)
            if not live.kv:
                self._bring_kv(live)

    def _give_up_kv(self) -> bool:
        """Frees the KV of the last waiting request that has some, so that waiting requests cannot block each other."""
        victim = next((live for live in map(self._live.__getitem__, reversed(self._waiting)) if live.kv), None)
        if victim is None:
            return False
        victim.kv = Kv()
        victim.preemptions += 1
        self._preemptions += 1
        self._waiting.remove(victim.request.request_id)
        self._waiting.append(victim.request.request_id)
        return True

    def _bring_kv(self, live: FakeRequest) -> None:
        self._reprefilled_tokens += bring_kv(self._layout, self._model, live)

    def _make_room(self, request_id: str) -> bool:
        """Makes room for one more token's KV, if needed by preempting the latest. Returns False if that is this one."""
        live = self._live[request_id]
        needed = self._blocks_for(live.tokens) - self._blocks_for(live.kv_tokens)
        while needed and self._blocks_used() + needed > self._blocks():
            victim = self._running.pop()
            self._live[victim].kv = Kv()
            self._live[victim].preemptions += 1
            self._preemptions += 1
            self._waiting.appendleft(victim)
            if victim == request_id:
                return False
        return True

    def _decode(self, live: FakeRequest) -> TokenDelta:
        delta = self._turns.sample(live)
        self._generated_tokens += 1
        if delta.finish_reason is not None and live.request.keeps:
            self._running.remove(delta.request_id)
            self._kept.add(delta.request_id)
            live.request = replace(live.request, kept=True)
        elif delta.finish_reason is not None:
            self.remove(delta.request_id)
        return delta

    # Blocks.

    def _blocks(self) -> int:
        return self._capability.kv_tokens // self._capability.block_tokens

    def _blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self._capability.block_tokens)

    def _blocks_used(self) -> int:
        kept = [*self._reserved.values(), *(live.reserved for live in self._live.values() if live.reserved)]
        blocks = sum(len(reservation.block_ids) for reservation in kept)
        return blocks + sum(self._blocks_for(live.kv_tokens) for live in self._live.values())
