"""How long a request that moves goes without a token, by its context: copied ahead in rounds, and stopped and copied.

A blackout is given in decode steps of the same request just before and after it. Re-prefill, the alternative, computes
the same context from its tokens.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from one_engine import MOST_BYTES, Ends, a_request
from rich.table import Table

from dora.kvtransfer.transfer import Transfer

MOVES = 9
STEPS = 4  # before and after a move, to which its blackout is compared
WAIT_S = 60.0


def measured(ends: Ends, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each length of context, the shortest first."""
    return [one_context(ends, tokens) for tokens in sorted(contexts)]


def values(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst context's median; the longest context by the shortest, each in its own steps."""
    shortest, longest = rows[0], rows[-1]
    return {
        "blackout_steps_p50": max(row["blackout_steps"] for row in rows),
        "blackout_16k_vs_1k": round(longest["blackout_steps"] / shortest["blackout_steps"], 2),
        "reprefill_vs_blackout_16k": round(longest["reprefill_ms"] / longest["blackout_ms"], 1),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    crossover = crossover_tokens(rows[0], rows[-1])
    below = f"below about {crossover} tokens" if crossover else "at none of these contexts"
    found = Table(title="A request that moves, by its context", caption=f"Re-prefill takes less time {below}")
    for heading in rows[0]:
        found.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        found.add_row(*map(str, row.values()))
    return found


def one_context(ends: Ends, tokens: int) -> dict[str, Any]:
    """Medians over moves of one request with ``tokens`` tokens of context."""
    request = a_request(f"r{tokens}", tokens)
    began_s = time.perf_counter()
    ends.engine.add(request)
    ends.engine.step()
    reprefill_ms = (time.perf_counter() - began_s) * 1000
    timed_steps(ends)
    steps_ms: list[float] = []
    ahead_ms: list[float] = []
    stopped_ms: list[float] = []
    for _ in range(MOVES):
        before_ms = timed_steps(ends)
        ahead_ms.append(copy_ahead(ends, request.request_id))
        steps_ms.append(statistics.median([*before_ms, *timed_steps(ends)]))
        stopped_ms.append(stop_and_copy(ends, request.request_id))
        timed_steps(ends)
    ends.engine.remove(request.request_id)
    blackout_ms = statistics.median(ahead_ms)
    in_steps = [blackout / step for blackout, step in zip(ahead_ms, steps_ms, strict=True)]
    return {
        "tokens": tokens,
        "step_ms": round(statistics.median(steps_ms), 2),
        "blackout_ms": round(blackout_ms, 2),
        "blackout_steps": round(statistics.median(in_steps), 2),
        "stop_and_copy_ms": round(statistics.median(stopped_ms), 2),
        "reprefill_ms": round(reprefill_ms, 1),
    }


def timed_steps(ends: Ends) -> list[float]:
    """Milliseconds of each of some steps."""
    return [ends.timed_step_ms() for _ in range(STEPS)]


def crossover_tokens(shortest: dict[str, Any], longest: dict[str, Any]) -> int:
    """Where a blackout begins to take less time than a re-prefill, if both grow in proportion between two contexts.

    0: it takes less at the shortest context already.
    """
    gains = [row["reprefill_ms"] - row["blackout_ms"] for row in (shortest, longest)]
    if gains[0] >= 0 or gains[1] <= gains[0]:
        return 0
    between = -gains[0] / (gains[1] - gains[0])
    return round(shortest["tokens"] + between * (longest["tokens"] - shortest["tokens"]))


def copy_ahead(ends: Ends, request_id: str) -> float:
    """Milliseconds between the last token here and the first one there."""
    copying = ends.begin_copy(request_id)
    last_s = time.perf_counter()
    while (last := copying.advance()) is None:
        ends.engine.step()
        last_s = time.perf_counter()
    return taken_in(ends, last, last_s)


def stop_and_copy(ends: Ends, request_id: str) -> float:
    """The same where nothing is copied before the freeze."""
    ends.target.expect(request_id, 1, MOST_BYTES)
    last_s = time.perf_counter()
    ends.engine.freeze(request_id)
    snapshot = ends.engine.export(request_id)
    assert snapshot is not None
    return taken_in(ends, ends.source.send(ends.peer, request_id, snapshot), last_s)


def taken_in(ends: Ends, last: Transfer, last_s: float) -> float:
    """``remove`` does not count: two workers do it once the request decodes at its target."""
    key = last.done.result(WAIT_S).key
    removing_s = time.perf_counter()
    ends.engine.remove(last.ticket)
    removed_s = time.perf_counter()
    ends.engine.take_in(ends.target.take(key))
    ends.engine.step()
    return (time.perf_counter() - last_s - (removed_s - removing_s)) * 1000
