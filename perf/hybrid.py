"""Moves of a model whose layers keep a state, by the context: the decode steps that a move costs, against a re-prefill.

    python perf/hybrid.py --tokens 2048 8192 16384 --json

The steps are counted, not timed: another request decodes in the engine while one moves, and the steps are those from
the moved request's last token at its source to its first at its target. A request that does not move takes 1.
"""

import argparse
import json
import statistics
from typing import Any

from blackout import MOVES, WAIT_S, one_context, table
from one_engine import Ends, a_request, ends
from rich.console import Console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384], help="contexts that move")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    with ends(max(options.tokens), "hybrid") as found:
        rows = [{**one_context(found, tokens), **counted(found, tokens)} for tokens in sorted(options.tokens)]
    if not options.json:
        Console(width=140).print(table(rows))
        return
    shortest, longest = rows[0]["counted_steps"], rows[-1]["counted_steps"]
    values = {
        "steps": max(row["counted_steps"] for row in rows),
        "longest_vs_shortest": round(longest / shortest, 2),
        "reprefill_over_move": round(rows[-1]["reprefill_ms"] / rows[-1]["blackout_ms"], 1),
        "reprefilled_tokens": sum(row["reprefilled"] for row in rows),
    }
    print(json.dumps(values))


def counted(ends: Ends, tokens: int) -> dict[str, Any]:
    """Counts the steps of several moves of one request. Blocks are copied ahead of its state."""
    engine, request = ends.engine, a_request(f"counted{tokens}", tokens)
    engine.add(request)
    engine.add(a_request("beside", 64))
    while len(engine.step()) < 2:
        pass
    before = engine.load().reprefilled_tokens
    steps = [steps_of_move(ends, request.request_id) for _ in range(MOVES)]
    again = engine.load().reprefilled_tokens - before
    engine.remove(request.request_id)
    engine.remove("beside")
    return {"counted_steps": statistics.mean(steps), "most_steps": max(steps), "reprefilled": again}


def steps_of_move(ends: Ends, request_id: str) -> int:
    copying = ends.begin_copy(request_id)
    while (last := copying.advance()) is None:
        ends.engine.step()
    steps = 0
    while not last.done.done():
        ends.engine.step()
        steps += 1
    key = last.done.result(WAIT_S).key
    ends.engine.remove(last.ticket)
    ends.engine.take_in(ends.target.take(key))
    while request_id not in {delta.request_id for delta in ends.engine.step()}:
        steps += 1
    return steps + 1


if __name__ == "__main__":
    main()
