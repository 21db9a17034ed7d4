"""Finds the sampled token that completes a stop string. Both engines use it, token by token.

Everything follows from the sampled tokens, so a request that moves or resumes gives the same result; a stop string may
begin before a move and end after it. The text is the response's alone, special tokens included, decoded token by token
with the model's tokenizer.json. (A token may end within a character: vLLM's ``vllm/v1/engine/detokenizer.py`` and
transformers' ``TextStreamer`` decode with the same look-back.)
"""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from dora.data.stops import first_stop
from dora.data.types import RequestSpec
from dora.errors import InvalidValue

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character
_PENDING_MAX: Final = 8  # tokens that one character may take; beyond them the bytes are no character


class StopStrings:
    """The stop strings of one model folder. The tokenizer is read for the first request with a stop string."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def watch(self, request: RequestSpec) -> "StopWatch | None":
        """Returns None for a request without stop strings. Raises InvalidValue if there is no tokenizer for them."""
        if not request.sampling.stop:
            return None
        if self._tokenizer is None:
            file = None if self._folder is None else self._folder / "tokenizer.json"
            if file is None or not file.is_file():
                allowed = "left out: this engine's model folder has no tokenizer.json"
                raise InvalidValue("sampling.stop", request.sampling.stop, allowed)
            self._tokenizer = Tokenizer.from_file(str(file))
        return StopWatch(self._tokenizer, request)


class StopWatch:
    """The end of one response's text, as far back as a stop string may begin."""

    def __init__(self, tokenizer: Tokenizer, request: RequestSpec) -> None:
        self._tokenizer = tokenizer
        self._stops = request.sampling.stop
        self._min_tokens = request.sampling.min_tokens
        self._reach = max(map(len, self._stops)) - 1  # characters before the new ones in which a stop may begin
        self._tokens = 0
        self._ids: list[int] = []  # the last decoded ones, for their effect on the next, then those not yet decoded
        self._decoded = 0
        self._before = ""  # the text of ``_ids[:_decoded]``
        self._tail = ""  # text up to there
        self._looked_at = 0  # characters of what follows that have been searched
        for token_id in request.output_token_ids:
            self.completed_by(token_id)

    def completed_by(self, token_id: int) -> str:
        """Returns the stop string that the next token completes, the first of several in the text, or an empty one.

        None counts before ``min_tokens`` tokens.
        """
        self._tokens += 1
        self._ids.append(token_id)
        text = self._decode(self._ids)
        fresh = text[len(self._before) :]
        known = fresh.rstrip(_UNFINISHED)
        found = self._found(known)
        if (fresh and known == fresh) or len(self._ids) - self._decoded >= _PENDING_MAX:
            self._tail = (self._tail + fresh)[-self._reach :] if self._reach else ""
            self._ids = self._ids[self._decoded :]
            self._decoded, self._before, self._looked_at = len(self._ids), self._decode(self._ids), 0
        else:
            self._looked_at = len(known)
        return found if self._tokens >= self._min_tokens else ""

    def _found(self, known: str) -> str:
        """Returns the stop string that ends first within the unsearched characters of ``known``."""
        found = first_stop(self._tail + known, self._stops, len(self._tail) + self._looked_at)
        return "" if found is None else found[1]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
