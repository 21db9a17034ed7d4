"""What a source of prompts is: a pure function from an index to a prompt."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dora.data.types import Prompt
from dora.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Position:
    """Which prompt of a source comes next. Both count from 0; an endless source is in its epoch 0 for ever."""

    epoch: int
    index: int  # within the epoch, in the epoch's own order


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts by index, endless or finite. The same source gives the same prompt for the same index, always:

    so a service that restarts goes on at ``starting_at(n)``, and prompt ids stay unique and stable. Indexes count on
    over the epochs: ``position(n)`` is where the ``n``-th prompt stands.
    """

    name: str
    reward: str  # the built-in verifier of these prompts, as "module:function"; "" where there is none
    at: Callable[[int], Prompt | None]  # None: past the last prompt. Raises InvalidValue for one that cannot be made
    epoch_prompts: int = 0  # of one epoch; 0: it has no end

    def __iter__(self) -> Iterator[Prompt]:
        return self.starting_at(0)

    def starting_at(self, index: int) -> Iterator[Prompt]:
        """The prompts from ``index`` on."""
        while (prompt := self.at(index)) is not None:
            yield prompt
            index += 1

    def position(self, index: int) -> Position:
        return Position(*divmod(index, self.epoch_prompts)) if self.epoch_prompts else Position(0, index)


def check_length(prompt: Prompt, limit_tokens: int | None) -> Prompt:
    """The prompt itself; raises InvalidValue where it is empty or longer than ``limit_tokens`` (None: no limit)."""
    length_tokens = len(prompt.token_ids)
    if length_tokens == 0:
        raise InvalidValue(f"prompt {prompt.prompt_id}: length in tokens", 0, "at least 1")
    if limit_tokens is not None and length_tokens > limit_tokens:
        raise InvalidValue(f"prompt {prompt.prompt_id}: length in tokens", length_tokens, f"at most {limit_tokens}")
    return prompt
