"""What a migration costs: the request that moves, and the others of its engine.

    python perf/blackout.py --json

One engine on a tiny model plays both ends, over two data planes of this process; so what both ends of a migration cost
falls on one engine. Each ratio is of things measured in turn in one run:

    blackout_steps_p50         how long a request that moves goes without a token, by the decode steps of the same
                               request before and after: the median of the moves, of the context where it is largest
    blackout_16k_vs_1k         the longest context's blackout in its steps, by the shortest's in its own
    reprefill_vs_blackout_16k  computing the longest context from its tokens, the alternative, by its blackout
    decode_while_migrating     tokens a second of a full batch of which one request after the other moves, by those of
                               the same batch left alone

The rows show beside them what is stopped and copied whole, and at which context a migration begins to take less time
than a re-prefill.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dora.kvtransfer.door import Door
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transfer import Transfer
from dora.models.tiny import make_tiny
from dora.types import RequestSpec, SamplingParams
from dora.worker.copying import Copying
from dora.worker.vllm_engine import VllmEngine

CONTEXTS = (1024, 4096, 16384)
MOVES = 9
STEPS = 4  # before and after a move, to which its blackout is compared
BATCH = 16
BATCH_TOKENS = 1024
DECODE_STEPS = 64
DECODE_ROUNDS = 9
MOVE_EVERY_STEPS = 16
WAIT_S = 60.0
MOST_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=CONTEXTS, help="context lengths")
    parser.add_argument("--json", action="store_true", help="one line")
    options = parser.parse_args()
    print(json.dumps(measured(options.tokens), indent=None if options.json else 2))


def measured(contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """The ratios by name, and ``rows`` by context in rising order. vLLM must not have been started in this process."""
    with ends(max(contexts)) as found:
        rows = [one_context(found, tokens) for tokens in sorted(contexts)]
        decoding = decode_while_migrating(found)
    shortest, longest = rows[0], rows[-1]
    return {
        "blackout_steps_p50": max(row["blackout_steps"] for row in rows),
        "blackout_16k_vs_1k": round(longest["blackout_steps"] / shortest["blackout_steps"], 2),
        "reprefill_vs_blackout_16k": round(longest["reprefill_ms"] / longest["blackout_ms"], 1),
        "decode_while_migrating": round(decoding, 3),
        "crossover_tokens": crossover_tokens(shortest, longest),
        "rows": rows,
    }


@dataclass(frozen=True)
class Ends:
    """One engine, and the data planes by which a request leaves it and comes back."""

    engine: VllmEngine
    source: DataPlane
    target: DataPlane
    peer: Peer


@contextmanager
def ends(tokens: int) -> Iterator[Ends]:
    """For contexts of up to ``tokens`` tokens."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        longest = tokens + 4096
        folder = long_model(Path(shared) / "model", longest)
        kv_tokens = max(2 * longest, BATCH * 2 * BATCH_TOKENS)
        engine = VllmEngine(folder, slots=BATCH, kv_tokens=kv_tokens, max_model_len_tokens=longest)
        engine.load_weights(0, folder, None)
        settings = PlaneSettings(os.urandom(32), Path(shared), ("shm",))
        door, target_door = Door("127.0.0.1"), Door("127.0.0.1")
        source = DataPlane(door, Identity("w1", 1, "f", this_host()), settings)
        target = DataPlane(target_door, Identity("w2", 2, "f", this_host()), settings)
        try:
            yield Ends(engine, source, target, Peer("w2", 2, target_door.address, ("shm",)))
        finally:
            source.close()
            target.close()
            engine.close()


def long_model(folder: Path, positions: int) -> Path:
    """A tiny model whose context is long; its weights do not depend on that."""
    make_tiny("dense", folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder


def a_request(name: str, tokens: int) -> RequestSpec:
    prompt = tuple(3 + index % 61 for index in range(tokens))
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=4000, ignore_eos=True)
    return RequestSpec(name, 0, prompt, sampling)


# One request that moves.


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
    found = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        ends.engine.step()
        found.append((time.perf_counter() - began_s) * 1000)
    return found


def crossover_tokens(shortest: dict[str, Any], longest: dict[str, Any]) -> int:
    """Where a blackout begins to take less time than a re-prefill, if both grow in proportion between two contexts.

    0: it takes less at the shortest context already.
    """
    gains = [row["reprefill_ms"] - row["blackout_ms"] for row in (shortest, longest)]
    if gains[0] >= 0 or gains[1] <= gains[0]:
        return 0
    between = -gains[0] / (gains[1] - gains[0])
    return round(shortest["tokens"] + between * (longest["tokens"] - shortest["tokens"]))


def begin_copy(ends: Ends, request_id: str) -> Copying:
    """With blocks that are reserved for the request's context, as the orchestrator asks for them."""
    request = ends.engine.request(request_id)
    kv_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    ends.target.expect(request_id, 1, MOST_BYTES, ends.engine.reserve(request_id, kv_tokens))
    return Copying(ends.engine, ends.source, ends.peer, request_id)


def copy_ahead(ends: Ends, request_id: str) -> float:
    """Milliseconds between the last token here and the first one there."""
    copying = begin_copy(ends, request_id)
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


# A full batch, of which requests move.


def decode_while_migrating(ends: Ends) -> float:
    """Tokens a second with one request after the other on its way, by those of the same batch left alone."""
    names = [f"b{index}" for index in range(BATCH)]
    for name in names:
        ends.engine.add(a_request(name, BATCH_TOKENS))
    for _ in range(2 * BATCH):
        ends.engine.step()
    moving, alone = Moving(ends, names), Moving(ends, ())
    ratios = []
    for _ in range(DECODE_ROUNDS + 1):
        rate = tokens_per_s(ends, moving)
        moving.settle()
        ratios.append(rate / tokens_per_s(ends, alone))
    for name in names:
        ends.engine.remove(name)
    return statistics.median(ratios[1:])


def tokens_per_s(ends: Ends, moving: "Moving") -> float:
    began_s, tokens = time.perf_counter(), 0
    for step in range(DECODE_STEPS):
        moving.between_steps(step)
        tokens += len(ends.engine.step())
    return tokens / (time.perf_counter() - began_s)


class Moving:
    """Of these requests one begins to move every ``MOVE_EVERY_STEPS`` steps; as in a worker nobody waits for a copy."""

    def __init__(self, ends: Ends, names: Sequence[str]) -> None:
        self._ends = ends
        self._next = itertools.cycle(names)
        self._every = MOVE_EVERY_STEPS if names else 0
        self._copying: Copying | None = None
        self._last: Transfer | None = None

    def between_steps(self, step: int) -> None:
        if self._copying is None and self._every and step % self._every == 0:
            self._copying = begin_copy(self._ends, next(self._next))
        self._advance()

    def settle(self) -> None:
        """Until the one on its way has arrived."""
        while self._copying is not None:
            self._ends.engine.step()
            self._advance()

    def _advance(self) -> None:
        if self._copying is not None and self._last is None:
            self._last = self._copying.advance()
        if self._last is not None and self._last.done.done():
            self._ends.engine.remove(self._last.ticket)
            self._ends.engine.take_in(self._ends.target.take(self._last.done.result().key))
            self._copying = self._last = None


if __name__ == "__main__":
    main()
