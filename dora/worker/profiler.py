"""``python -m dora.worker.profiler``: times one engine beside others, each in its own process.

The protocol is line-based: it writes ``ready`` once its engine has weights, starts timing at the next input line, and
writes the measurement as JSON. Until its input ends it keeps the engine busy, so that no other engine is timed alone.
"""

import argparse
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from dora.worker.profiling import USUAL, keep_busy
from dora.worker.side_by_side import READY
from dora.worker.timing import CLOCKS, Timing


def main(argv: list[str] | None = None) -> int:
    options = vars(_parser().parse_args(argv))
    place = options.pop("place")
    timing = Timing(**options)
    grid, engine = timing.grid(USUAL), timing.start()
    try:
        print(READY, flush=True)
        if not sys.stdin.readline():
            return 1  # the starting process has ended
        print(json.dumps(asdict(timing.measure(engine, grid, place))), flush=True)
        ended = threading.Event()
        threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
        keep_busy(engine, grid, seed=timing.seed, until=ended.is_set)
    finally:
        engine.close()
    return 0


def _await_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dora.worker.profiler", description=__doc__)
    parser.add_argument("--place", type=int, required=True, help="which of the engines this is, from 0")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--clock", choices=tuple(CLOCKS), required=True)
    for name in ("slots", "kv-tokens", "max-model-len-tokens", "threads", "seed", "rounds", "batches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
