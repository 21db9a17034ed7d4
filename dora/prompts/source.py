"""The interface of prompt sources: a pure function from an index to a prompt."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dora.data.types import Prompt
from dora.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Position:
    """The position of the next prompt in a source. Both count from 0; an endless source stays in epoch 0."""

    epoch: int
    index: int  # in the order of the epoch


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts by index, endless or finite. The same source always gives the same prompt for the same index.

    A restarted service therefore continues at ``starting_at(n)``, and prompt ids stay unique and stable. Indexes
    continue over the epochs: ``position(n)`` is the position of the ``n``-th prompt.
    """

    name: str
    reward: str  # the built-in verifier of these prompts, as "module:function"; "" if there is none
    at: Callable[[int], Prompt | None]  # None after the last prompt; raises InvalidValue for an invalid one
    epoch_prompts: int = 0  # prompts per epoch; 0: endless

    def __iter__(self) -> Iterator[Prompt]:
        return self.starting_at(0)

    def starting_at(self, index: int) -> Iterator[Prompt]:
        while (prompt := self.at(index)) is not None:
            yield prompt
            index += 1

    def position(self, index: int) -> Position:
        return Position(*divmod(index, self.epoch_prompts)) if self.epoch_prompts else Position(0, index)


def check_length(prompt: Prompt, limit_tokens: int | None) -> Prompt:
    """Returns the prompt. Raises InvalidValue if it is empty or longer than ``limit_tokens`` (None for no limit)."""
    length_tokens = len(prompt.token_ids)
    if length_tokens == 0:
        raise InvalidValue(f"prompt {prompt.prompt_id}: length in tokens", 0, "at least 1")
    if limit_tokens is not None and length_tokens > limit_tokens:
        raise InvalidValue(f"prompt {prompt.prompt_id}: length in tokens", length_tokens, f"at most {limit_tokens}")
    return prompt
