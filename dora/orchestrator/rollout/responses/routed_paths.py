"""The expert rows of a session's tokens, on any of its paths.

Rows come with the tokens that were sampled from them, turn by turn (``session_paths.first_fed``). The last token of a
turn is fed by the turn that continues it, so its row is that turn's first. If several turns continue it, their engines
report it each; all branches have the row that came first.
"""

from collections.abc import Sequence

import numpy as np

from dora.data.token_spans import Column
from dora.data.trajectory_fields import ExpertArray
from dora.orchestrator.rollout.responses.session_paths import GivenRun, first_fed, pieces, prompt_of
from dora.orchestrator.rollout.responses.state import ResponseState


class Rows:
    """The rows of one session."""

    def __init__(self, entry: ResponseState) -> None:
        self._entry = entry
        self._prompt_tokens = len(entry.prompt.token_ids)
        self._rows = entry.routed_experts()
        if self._rows is not None:
            self._places = places_of_rows(entry.given, self._prompt_tokens, entry.held_tokens)

    def on(self, turn: int, path: Column) -> ExpertArray | None:
        """The rows of the tokens on the path of a turn, its prompt first, up to the last one that was fed: of a turn
        that was broken off before it sampled anything the given tokens never were. ``path``: as
        ``session_paths.places`` returns it. None: responses have no rows.
        """
        if self._rows is None:
            return None
        run = prompt_of(self._entry.given, turn)
        prompt = np.arange(run.held_at, run.held_end) if run else np.arange(-self._prompt_tokens, 0)
        wanted = self._places[np.append(prompt, path) + self._prompt_tokens]
        fed = int(np.flatnonzero(wanted >= 0)[-1]) + 1
        assert (wanted[:fed] >= 0).all(), f"{self._entry.request_id}: a token that was fed has no row"
        found: ExpertArray = self._rows[wanted[:fed]]
        return found


def places_of_rows(given: Sequence[GivenRun], prompt_tokens: int, held_tokens: int) -> Column:
    """Returns where the row of each token is among a session's rows, the tokens of the group's prompt first, then all
    others in the order in which they came; -1: it was never fed.
    """
    found: Column = np.full(prompt_tokens + held_tokens, -1, np.int64)
    arrived = 0
    for turn in range(len(given) + 1):
        begin = given[turn - 1].held_end if turn else 0
        end = given[turn].held_at if turn < len(given) else held_tokens
        if begin == end:  # nothing was sampled
            continue
        fed = np.append(_before(given, turn, prompt_tokens), np.arange(begin, end - 1)) + prompt_tokens
        is_first = found[fed] < 0
        found[fed[is_first]] = arrived + np.flatnonzero(is_first)
        arrived += len(fed)
    return found


def _before(given: Sequence[GivenRun], turn: int, prompt_tokens: int) -> Column:
    """Returns the tokens that were fed to sample a turn's first one, as indexes among all tokens of the session; below
    0: of the group's prompt, whose last one is -1.
    """
    run = given[turn - 1] if turn else None
    if run is None:
        return np.arange(-prompt_tokens, 0)
    if run.is_prompt:
        return np.arange(run.held_at, run.held_end)
    left, parts = first_fed(given, turn, prompt_tokens), []
    for begin, end in reversed(pieces(given, turn, run.held_end)):
        parts.append(np.arange(max(begin, end - left), end))
        left -= len(parts[-1])
    if left:  # the path's given tokens follow its prompt
        prompt = prompt_of(given, turn)
        last = prompt.held_end - 1 if prompt else -1
        parts.append(np.arange(last, last + 1))
    return np.concatenate(parts[::-1])
