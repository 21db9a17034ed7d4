"""The common half of all engines: holds requests by name, refuses unfit ones, and verifies loaded weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from dora.data.remembered import Remembered
from dora.data.types import Canary, EngineCapability, RequestSpec, SamplingParams
from dora.errors import Conflict, InvalidValue, NotFound, SnapshotRefused
from dora.kvtransfer.codec import Opening
from dora.kvtransfer.device import DeviceMemory
from dora.kvtransfer.layout import blocks_for, check_snapshot
from dora.kvtransfer.layout import check_version as check_loaded
from dora.kvtransfer.reblock import reblocked
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot
from dora.weights.canary import CANARY_TOKENS, canary_token_ids, check_canary
from dora.weights.canary_bounds import CanaryBound, check_reproduced
from dora.worker.engine_checks import (
    check_extension,
    check_finite,
    check_request,
    check_version,
)
from dora.worker.reservation import MARGIN_BLOCKS, Reservation

Live = TypeVar("Live")


class BaseEngine(Generic[Live], ABC):
    """The common half of a ``RolloutEngine``; ``Live`` is the engine's state of one request.

    Each kind of engine adds the abstract methods to those of the protocol.
    """

    def __init__(self, capability: EngineCapability, layout: KvLayout, canary_bound: CanaryBound) -> None:
        token_bytes = -(-layout.block_bytes // layout.block_tokens)
        self._capability = replace(capability, kv_token_bytes=token_bytes, state_bytes=layout.state_bytes)
        self._layout = layout
        self._canary_bound = canary_bound
        self._version: int | None = None
        self._live: dict[str, Live] = {}
        self._reserved: dict[str, Reservation] = {}
        self._generated_tokens = 0

    @property
    def capability(self) -> EngineCapability:
        return self._capability

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def device_memory(self) -> DeviceMemory | None:
        return None

    @property
    def version(self) -> int | None:
        return self._version

    def load_weights(self, version: int, folder: Path, canary: Canary | None) -> Canary:
        held = len(self._live) + len(self._reserved)
        if held:
            raise Conflict("requests held", held, "0 while weights are replaced", why="is too much")
        self._version = None
        if canary is not None:
            self._check_canary(canary)
        self._replace_weights(version, folder)
        token_ids = self._own_canary_tokens() if canary is None else canary.token_ids
        found = Canary(tuple(token_ids), tuple(self._score(token_ids)))
        check_finite(version, found)
        if canary is not None:
            check_reproduced(version, found, canary, self._canary_bound)
        self._version = version
        return found

    def add(self, request: RequestSpec) -> None:
        if request.kept:
            raise InvalidValue("kept", True, "false: only a snapshot brings a kept request")
        self._check_new(request)
        check_version(request.version, self._version)
        self._enter(request, None, None)

    def extend(
        self,
        request_id: str,
        given_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        after: int | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        live = self._find(request_id)
        request = self._so_far(live)
        if not request.kept or self._is_frozen(request_id):
            why = "is frozen" if request.kept else "is not kept"
            raise Conflict("request_id", request_id, "a kept request that is not frozen", why)
        after = len(request.output_token_ids) if after is None else after
        check_extension(request, given_token_ids, sampling, self._capability, after)
        inputs = tuple(given_token_ids)
        self._extend(live, request.extended(inputs, sampling, after=after, prompt_logprobs=prompt_logprobs), after)

    def request(self, request_id: str) -> RequestSpec:
        return self._so_far(self._find(request_id))

    def take_in(self, snapshot: KvSnapshot) -> None:
        reservation = self._reserved.get(snapshot.request.request_id)
        begun = None if reservation is None else reservation.begun_with(snapshot.request)
        self._check_new(snapshot.request, None if begun is None else begun.opening.request)
        check_snapshot(snapshot, self._layout, self._version)
        fitting = reblocked(snapshot, self._layout)
        written = 0 if reservation is None else reservation.written
        if snapshot.ahead > written:
            said = f"ahead = {snapshot.ahead}, {written} blocks have come ahead"
            raise SnapshotRefused(said, "ahead", snapshot.ahead)
        if reservation is not None:
            reservation.close()
            del self._reserved[snapshot.request.request_id]
            self._slots_changed()
        self._enter(snapshot.request, fitting, reservation)

    @property
    def reserved(self) -> int:
        return sum(reservation.takes_slot for reservation in self._reserved.values())

    def reserve(self, request_id: str, kv_tokens: int, *, kept: bool = False) -> Reservation:
        if request_id in self._reserved:
            raise Conflict("request_id", request_id, "an id that is not reserved here", why="is reserved")
        count = 0
        if kept or self._slots_left() > self.reserved:
            needed = blocks_for(kv_tokens, self._layout.block_tokens)
            free = self._free_blocks()
            if needed >= free:
                raise Conflict("kv blocks", needed, f"below the {free} that are free here", why="is too much")
            count = min(needed + MARGIN_BLOCKS, free)
        reservation = self._reserved[request_id] = self._reserve(count)
        reservation.takes_slot = not kept
        self._slots_changed()
        return reservation

    def release(self, request_id: str) -> None:
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            reservation.close()
            self._free(reservation)
            self._slots_changed()

    def remember(self, response: Remembered) -> None:
        """Does nothing: this kind of engine drafts no tokens."""

    def draft_always(self, tokens: int) -> bool:
        return False

    @abstractmethod
    def _replace_weights(self, version: int, folder: Path) -> None:
        """Loads ``folder``. Raises InvalidValue for tensors that do not fit, before any weight is changed."""

    @abstractmethod
    def _score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the logprobs of a token sequence from its second token on. Only while no request is held."""

    @abstractmethod
    def _slots_left(self) -> int:
        """Returns the slots that no request has or waits for with its KV; reserved slots count."""

    @abstractmethod
    def _free_blocks(self) -> int:
        """Returns the free blocks, less one that each request with a slot may need next."""

    @abstractmethod
    def _reserve(self, count: int) -> Reservation:
        """Takes ``count`` free blocks. ``_make`` later makes their request."""

    @abstractmethod
    def _free(self, reservation: Reservation) -> None:
        """Returns the blocks of a closed reservation."""

    @abstractmethod
    def _slots_changed(self) -> None:
        """Called when the number of reserved slots changes."""

    @abstractmethod
    def _is_frozen(self, request_id: str) -> bool: ...

    @abstractmethod
    def _extend(self, live: Live, request: RequestSpec, after: int) -> None:
        """Continues a kept request after this many outputs; ``request`` has the environment tokens. If it owes prompt
        logprobs, or its KV cannot be cut, that is freed and computed again.
        """

    @abstractmethod
    def _so_far(self, live: Live) -> RequestSpec:
        """Returns the request with its present outputs."""

    @abstractmethod
    def _make_ahead(self, request: RequestSpec) -> Any:
        """Prepares a request for ``_enter``; it may get more outputs before. Raises InvalidValue.

        Called in a thread other than the engine's.
        """

    @abstractmethod
    def _enter(self, request: RequestSpec, snapshot: KvSnapshot | None, reservation: Reservation | None) -> Any:
        """Takes over a checked request, with its KV if a snapshot has it, and with its reservation."""

    def _find(self, request_id: str) -> Live:
        live = self._live.get(request_id)
        if live is None:
            raise NotFound("request_id", request_id, "a request that this engine holds", why="is not here")
        return live

    def _check_new(self, request: RequestSpec, known: RequestSpec | None = None) -> None:
        if request.request_id in self._live:
            raise Conflict("request_id", request.request_id, "an id that this engine does not hold", why="is here")
        check_request(request, self._capability, known)

    def _make(self, opening: Opening) -> Any:
        """Prepares a reservation's request in another thread; the version does not change while a reservation exists.

        A layout that does not fit is reported when the snapshot arrives: it then cannot move exactly.
        """
        check_loaded(opening.request.version, self._version)
        try:
            check_request(opening.request, self._capability)
            return self._make_ahead(opening.request)
        except InvalidValue as error:
            raise SnapshotRefused(str(error), error.field, error.value) from error

    def _check_canary(self, canary: Canary) -> None:
        check_canary(canary, self._capability.vocab_size)
        limit = self._capability.max_model_len_tokens
        if not 2 <= len(canary.token_ids) < limit:
            raise InvalidValue("canary.token_ids", f"{len(canary.token_ids)} tokens", f"2 to {limit - 1}")

    def _own_canary_tokens(self) -> tuple[int, ...]:
        most = self._capability.max_model_len_tokens - 1
        return canary_token_ids(self._capability.vocab_size, min(CANARY_TOKENS, most))
