"""What a core has learnt from events, as a text that outlives it: times of steps, pace of tokens, lengths, the window's
trials. None of it is promised; without it strategies begin anew.

Of lengths it is what holds for all prompts and for tasks; each prompt's own history is learnt again.
"""

import json
from typing import Any, Final

from dora.core.state import State

VERSION: Final = 1


def learnt(state: State) -> str:
    """A JSON text of some kilobytes."""
    parts: dict[str, Any] = {
        "version": VERSION,
        "need": state.freshness.learnt(state.now_s),
        "rhythm": state.rates.learnt(state.now_s),
        "lengths": state.predictor.learnt(),
    }
    if state.adaptive is not None:
        parts["adaptive"] = state.adaptive.learnt()
    return json.dumps(parts, separators=(",", ":"))


def learn_again(state: State, text: str) -> None:
    """Goes on from what was learnt before; a text of another version says nothing."""
    parts = json.loads(text)
    if parts["version"] != VERSION:
        return
    state.freshness.learn_again(parts["need"], state.now_s)
    state.rates.learn_again(parts["rhythm"], state.now_s)
    state.predictor.learn_again(parts["lengths"])
    if state.adaptive is not None and "adaptive" in parts:
        state.adaptive.learn_again(parts["adaptive"])
