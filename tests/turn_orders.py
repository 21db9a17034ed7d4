"""Turns that the core would accept."""

from collections.abc import Mapping, Sequence

from dora.data.types import SamplingValue
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.orchestrator.rollout.responses.turn_order import TurnOrder


def order(
    entry: ResponseState,
    token_ids: Sequence[int],
    max_tokens: int,
    name: str,
    fork: tuple[int, int] | None = None,
    sampling: Mapping[str, SamplingValue] | None = None,
    *,
    prompt_logprobs: bool = False,
) -> TurnOrder:
    """``fork``: the turn whose path the tokens continue, and their place there; None: they follow the last turn."""
    place = fork or (len(entry.inputs), entry.path_tokens(len(entry.inputs)))
    own = sampling or {}
    return TurnOrder(entry, tuple(token_ids), max_tokens, name, *place, fork is not None, own, prompt_logprobs)
