"""The core's learned estimates as a text that outlives it: step times, pace of tokens, lengths, trials of window sizes.
No promise depends on these; without them strategies start from their defaults. It also has the first version of full
precision, if there is one: all workers of a version must have the same (C1).

Stores global and per-task length statistics, not per-prompt history.
"""

import json
from typing import Any, Final

from dora.core.state import State

VERSION: Final = 3


def snapshot(state: State) -> str:
    """Returns a JSON text of some kilobytes."""
    parts: dict[str, Any] = {
        "version": VERSION,
        "need": state.freshness.snapshot(state.now_s),
        "rhythm": state.rates.snapshot(state.now_s),
        "lengths": state.predictor.snapshot(),
        "pauses": state.pauses.snapshot(),
    }
    if state.adaptive is not None:
        parts["adaptive"] = state.adaptive.snapshot()
    if state.full_precision_from >= 0:
        parts["full_precision_from"] = state.full_precision_from
    return json.dumps(parts, separators=(",", ":"))


def without_window(text: str) -> str:
    """Returns the text without the trials of window sizes, which are of a size that is not in force."""
    parts = json.loads(text) if text else {}
    return json.dumps({name: part for name, part in parts.items() if name != "adaptive"}) if parts else ""


def restore(state: State, text: str) -> None:
    """Restores estimates; a text of another version is ignored."""
    parts = json.loads(text)
    state.full_precision_from = parts.get("full_precision_from", -1)
    if parts["version"] != VERSION:
        return
    state.freshness.restore(parts["need"], state.now_s)
    state.rates.restore(parts["rhythm"], state.now_s)
    state.predictor.restore(parts["lengths"])
    state.pauses.restore(parts["pauses"])
    if state.adaptive is not None and "adaptive" in parts:
        state.adaptive.restore(parts["adaptive"])
        state.freshness.price = state.adaptive.price
