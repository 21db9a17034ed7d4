"""A small frozen model that drafts tokens, with a KV-cache of its own, apart from the engine's.

Each request has a row of this cache, with the KV of at most a window of its last tokens. If the window is full, the row
is computed again for the later half of them. A row may be lost at any time, because its KV is computed again from the
request's tokens.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils.logging import disable_progress_bar

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.errors import InvalidValue, LimitExceeded
from dora.models.drafts import DRAFT_CONTEXT_MIN, FIELD, PREFIX

CHUNK_TOKENS: Final = 512  # of one request in a forward pass
TOGETHER_TOKENS: Final = 2 * DRAFT_TOKENS_MAX  # requests with fewer new tokens each share a forward pass


@dataclass(slots=True)
class _Row:
    place: int
    first: int = 0  # the request's token at which the window begins
    length: int = 0  # tokens of the window with KV
    guessed: list[int] = field(default_factory=list)  # tokens with KV after them: it holds if the request has these


class _Layer(CacheLayerMixin):
    """The KV of one layer. ``at`` has the rows and places of a forward pass's tokens, and the longest row."""

    is_sliding = False
    at: tuple[torch.Tensor, torch.Tensor, int]

    def __init__(self, rows: int, places: int, like: CacheLayerMixin) -> None:
        """The KV of a place has the shapes, dtype and device of that of ``like``."""
        super().__init__()
        self._shape = rows, places
        assert like.keys is not None and like.values is not None
        self.lazy_initialization(like.keys, like.values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, places = self._shape
        self.keys, self.values = (
            each.new_zeros(rows, each.shape[1], places, each.shape[3]) for each in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, places, longest = self.at
        assert self.keys is not None and self.values is not None
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[rows, :, places] = new.transpose(1, 2)
        return self.keys[rows[:, 0], :, :longest], self.values[rows[:, 0], :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.at[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._shape[1]


class DraftModel:
    """Drafts for at most ``rows`` requests at a time. ``size_bytes`` is its memory: weights and KV."""

    def __init__(
        self, folder: Path, dtype: str, slots: int, context_tokens: int, most_bytes: int, device: str = "cpu"
    ) -> None:
        """``folder`` has passed ``check_draft``. The KV of at most ``slots`` requests takes up to ``most_bytes``, for
        up to ``context_tokens`` of each. Allocates all its memory on ``device`` but that of a forward pass.

        Raises InvalidValue if transformers does not load it, or the KV of no request fits, and LimitExceeded if the
        device's memory is exhausted.
        """
        disable_progress_bar()
        self._device = torch.device(device)
        try:
            self._load(folder, dtype, slots, context_tokens, most_bytes)
        except (OSError, ValueError) as error:
            raise InvalidValue(FIELD, f"{PREFIX}{folder}", f"a folder to load ({error})") from error
        except torch.OutOfMemoryError as error:
            allowed = f"a smaller draft model, or less of workers.history_mb: the GPU has no room for it ({error})"
            raise LimitExceeded(FIELD, f"{PREFIX}{folder}", allowed) from error

    def _load(self, folder: Path, dtype: str, slots: int, context_tokens: int, most_bytes: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), device_map=self._device
        ).eval()
        with torch.inference_mode():
            first = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            cache = self._model(first, use_cache=True).past_key_values
        token_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        most_tokens = most_bytes // token_bytes
        self._window = max(DRAFT_CONTEXT_MIN, min(context_tokens, most_tokens))
        if most_tokens < DRAFT_CONTEXT_MIN:
            allowed = f"at least {-(-DRAFT_CONTEXT_MIN * token_bytes // 10**6)}, for KV of the draft model"
            raise InvalidValue("workers.history_mb", most_bytes // 10**6, allowed)
        self.rows = min(slots, most_tokens // self._window)
        # The last place is for padding.
        self._layers = [_Layer(self.rows, self._window + 1, each) for each in cache.layers]
        self._cache = Cache(layers=self._layers)
        self._of: dict[str, _Row] = {}
        weights_bytes = sum(each.nbytes for each in self._model.parameters())
        self.size_bytes = weights_bytes + self.rows * self._window * token_bytes

    def follow(self, requests: Sequence[tuple[str, "array[int]"]]) -> None:
        """Computes the KV of the requests' tokens so far, if many have none yet. Other requests may lose their rows."""
        wanted = {name for name, _ in requests}
        for name, token_ids in requests:
            row = self._row(name, wanted)
            while row.guessed and row.first + row.length < len(token_ids) - 1:
                if row.guessed.pop(0) != token_ids[row.first + row.length]:
                    break
                row.length += 1
            row.guessed.clear()
            row.length = min(row.length, len(token_ids) - row.first - 1)  # the last one's logits are wanted
            if len(token_ids) + DRAFT_TOKENS_MAX > row.first + self._window:
                row.first, row.length = max(0, len(token_ids) - self._window // 2), 0
            while (new := len(token_ids) - row.first - row.length) > TOGETHER_TOKENS:
                count = min(CHUNK_TOKENS, new - 1)
                begin = row.first + row.length
                self._logits([row], [token_ids[begin : begin + count].tolist()])
                row.length += count

    def draft(
        self, requests: Sequence[tuple[str, "array[int]"]], count: int, choose: Callable[[torch.Tensor, int], list[int]]
    ) -> list[list[int]]:
        """Returns ``count`` tokens for each request, which ``follow`` has seen. ``choose`` takes the logits of all, and
        the number of the tokens drafted so far.
        """
        rows = [self._of[name] for name, _ in requests]
        fed = [token_ids[row.first + row.length :].tolist() for row, (_, token_ids) in zip(rows, requests, strict=True)]
        drafts: list[list[int]] = [[] for _ in rows]
        for number in range(count):
            chosen = choose(self._logits(rows, fed), number)
            for row, tokens, draft, token_id in zip(rows, fed, drafts, chosen, strict=True):
                if number:
                    row.guessed += tokens
                else:
                    row.length += len(tokens)
                draft.append(token_id)
            fed = [[token_id] for token_id in chosen]
        return drafts

    def forget(self, name: str) -> None:
        self._of.pop(name, None)

    def _row(self, name: str, wanted: set[str]) -> _Row:
        if name not in self._of:
            if len(self._of) == self.rows:
                del self._of[next(each for each in self._of if each not in wanted)]
            free = set(range(self.rows)) - {each.place for each in self._of.values()}
            self._of[name] = _Row(min(free))
        return self._of[name]

    def _logits(self, rows: Sequence[_Row], fed: Sequence[list[int]]) -> torch.Tensor:
        """Computes the KV of fed tokens, and returns the logits after the last one of each row."""
        most = max(map(len, fed))
        starts = [row.length + len(row.guessed) for row in rows]
        places = torch.full((len(rows), most), self._window)
        token_ids = torch.zeros_like(places)
        for index, (start, tokens) in enumerate(zip(starts, fed, strict=True)):
            places[index, most - len(tokens) :] = torch.arange(start, start + len(tokens))
            token_ids[index, most - len(tokens) :] = torch.tensor(tokens)
        longest = max(start + len(tokens) for start, tokens in zip(starts, fed, strict=True))
        taken = torch.tensor([[row.place] for row in rows]).expand_as(places)
        taken, places, token_ids = (each.to(self._device) for each in (taken, places, token_ids))
        for layer in self._layers:
            layer.at = taken, places, longest
        mask = torch.arange(longest, device=self._device) <= places[:, None, :, None]
        with torch.inference_mode():
            output = self._model(
                token_ids,
                attention_mask=mask,
                position_ids=places.clamp(max=self._window - 1),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]
