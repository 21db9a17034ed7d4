"""The expert rows of a session's tokens, on any of its paths.

Rows come with the tokens that were sampled from them, turn by turn (``session_paths.first_fed``). The last token of a
turn is fed by the turn that continues it, so its row is that turn's first. If several turns continue it, their engines
report it each; all branches have the row that came first.
"""

from collections.abc import Sequence

import numpy as np

from dora.data.token_spans import Column
from dora.data.trajectory_fields import ExpertArray
from dora.orchestrator.rollout.responses.session_paths import InputRun, first_fed, pieces, prompt_of
from dora.orchestrator.rollout.responses.state import ResponseState


class Rows:
    def __init__(self, response: ResponseState) -> None:
        self._response = response
        self._prompt_tokens = len(response.prompt.token_ids)
        self._rows = response.routed_experts()
        if self._rows is not None:
            self._places = places_of_rows(response.inputs, self._prompt_tokens, response.buffered_tokens)

    def on(self, turn: int, path: Column) -> ExpertArray | None:
        """Returns the rows of the tokens on a turn's path, its prompt first, up to the last one that was fed, or None
        if responses have no rows. The last environment tokens were not fed if the turn ended before it sampled
        anything. ``session_paths.places`` makes ``path``.
        """
        if self._rows is None:
            return None
        run = prompt_of(self._response.inputs, turn)
        prompt = np.arange(run.buffer_begin, run.buffer_end) if run else np.arange(-self._prompt_tokens, 0)
        chosen = self._places[np.append(prompt, path) + self._prompt_tokens]
        fed = int(np.flatnonzero(chosen >= 0)[-1]) + 1
        assert (chosen[:fed] >= 0).all(), f"{self._response.request_id}: a token that was fed has no row"
        found: ExpertArray = self._rows[chosen[:fed]]
        return found


def places_of_rows(inputs: Sequence[InputRun], prompt_tokens: int, buffered_tokens: int) -> Column:
    """Returns where the row of each token is among a session's rows, the tokens of the group's prompt first, then all
    others in the order in which they came, or -1 if it was never fed.
    """
    found: Column = np.full(prompt_tokens + buffered_tokens, -1, np.int64)
    arrived = 0
    for turn in range(len(inputs) + 1):
        begin = inputs[turn - 1].buffer_end if turn else 0
        end = inputs[turn].buffer_begin if turn < len(inputs) else buffered_tokens
        if begin == end:  # nothing was sampled
            continue
        fed = np.append(_before(inputs, turn, prompt_tokens), np.arange(begin, end - 1)) + prompt_tokens
        is_first = found[fed] < 0
        found[fed[is_first]] = arrived + np.flatnonzero(is_first)
        arrived += len(fed)
    return found


def _before(inputs: Sequence[InputRun], turn: int, prompt_tokens: int) -> Column:
    """Returns the tokens that were fed to sample a turn's first one, as indexes among all tokens of the session.
    Indexes below 0 belong to the group's prompt, whose last one is -1.
    """
    run = inputs[turn - 1] if turn else None
    if run is None:
        return np.arange(-prompt_tokens, 0)
    if run.is_prompt:
        return np.arange(run.buffer_begin, run.buffer_end)
    left, parts = first_fed(inputs, turn, prompt_tokens), []
    for begin, end in reversed(pieces(inputs, turn, run.buffer_end)):
        parts.append(np.arange(max(begin, end - left), end))
        left -= len(parts[-1])
    if left:  # the path's environment tokens follow its prompt
        prompt = prompt_of(inputs, turn)
        last = prompt.buffer_end - 1 if prompt else -1
        parts.append(np.arange(last, last + 1))
    return np.concatenate(parts[::-1])
