"""Token ids to text, piece by piece."""

from collections.abc import Iterable
from typing import Final, Protocol

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character
_PENDING_MAX: Final = 8  # tokens that one character may take; beyond them the bytes are no character


class Decoder(Protocol):
    def decode(self, token_ids: list[int], special_tokens: bool = False) -> str: ...


class TextStream:
    """The text of one response. The pieces together are its text, in whatever pieces its tokens come.

    Source: the look-back of vLLM's ``vllm/tokenizers/detokenizer_utils.py``, ``detokenize_incrementally``.
    """

    def __init__(self, decoder: Decoder, special_tokens: bool = False) -> None:
        self._decoder = decoder
        self._special = special_tokens
        self._ids: list[int] = []  # the last decoded ones, for their effect on the next, then those not yet decoded
        self._decoded = 0
        self._before = ""  # the text of ``_ids[:_decoded]``

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that the next tokens complete."""
        return "".join(map(self._next, token_ids))

    def end(self) -> str:
        """Returns what is left: the bytes of an incomplete character, as replacement characters."""
        return self._decoder.decode(self._ids, self._special)[len(self._before) :]

    def _next(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decoder.decode(self._ids, self._special)
        pending = len(self._ids) - self._decoded
        if text.endswith(_UNFINISHED) and pending <= _PENDING_MAX:
            return ""
        new = text[len(self._before) :]
        self._ids = self._ids[-pending:]
        self._decoded = pending
        self._before = self._decoder.decode(self._ids, self._special)
        return new
