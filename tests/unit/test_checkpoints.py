"""Checkpoints of sessions' states: which are kept, and in how much memory."""

import numpy as np

from dora.kvtransfer.snapshot import STATE
from dora.worker.vllm.blocks import BlockStore
from dora.worker.vllm.checkpoints import EVERY_TOKENS, Checkpoints
from dora.worker.vllm.groups import LayerGroup

STATE_BYTES = 16
GROUPS = (LayerGroup(("attn",), 4, 0), LayerGroup(("gdn",), 1 << 20, STATE))
IDS = ([1, 2, 3], [4])  # blocks of a request, by group


class Bench:
    def __init__(self, most_states: int = 8) -> None:
        self.rows = {"attn": np.zeros((6, 8), np.uint8), "gdn": np.zeros((6, STATE_BYTES), np.uint8)}
        store = BlockStore({name: [rows] for name, rows in self.rows.items()}, {"attn": 0, "gdn": 1})
        self.checkpoints = Checkpoints(store, GROUPS, most_states * STATE_BYTES)

    def at(self, tokens: int, name: str = "r", *, at_end: bool = True) -> None:
        self.rows["gdn"][4] = tokens % 251
        if self.checkpoints.is_due(name, tokens, at_end=at_end):
            self.checkpoints.note(name, tokens, IDS)


def test_the_nearest_earlier_state_is_written_back_and_later_ones_are_dropped() -> None:
    bench = Bench()
    for tokens in (10, 20, 30):
        bench.at(tokens)
    bench.at(25, "other")
    checkpoints = bench.checkpoints
    assert [checkpoints.nearest("r", tokens) for tokens in (9, 10, 29, 99)] == [0, 10, 20, 30]
    bench.rows["attn"][:] = 7
    checkpoints.restore("r", 20, IDS)
    assert (bench.rows["gdn"][4] == 20).all() and (bench.rows["attn"] == 7).all()
    assert checkpoints.nearest("r", 99) == 20 and checkpoints.nearest("other", 99) == 25
    checkpoints.forget("r")
    assert not checkpoints.nearest("r", 99) and checkpoints.held_bytes == STATE_BYTES


def test_between_turns_ends_a_state_is_kept_every_so_many_tokens() -> None:
    bench = Bench()
    for tokens in range(EVERY_TOKENS - 2, 3 * EVERY_TOKENS, 7):
        bench.at(tokens, at_end=False)
    assert bench.checkpoints.held_bytes == 2 * STATE_BYTES
    bench.at(EVERY_TOKENS * 3, at_end=True)
    bench.at(EVERY_TOKENS * 3 + 1, at_end=False)
    assert bench.checkpoints.held_bytes == 3 * STATE_BYTES


def test_the_oldest_states_make_room_and_are_counted() -> None:
    bench = Bench(most_states=2)
    for tokens in (10, 20, 30):
        bench.at(tokens)
        bench.at(tokens)  # the same state takes no further room
    assert (bench.checkpoints.nearest("r", 19), bench.checkpoints.nearest("r", 29)) == (0, 20)
    assert (bench.checkpoints.dropped, bench.checkpoints.held_bytes) == (1, 2 * STATE_BYTES)
    without = Bench(most_states=0)
    without.at(10)
    assert not without.checkpoints.nearest("r", 10) and without.checkpoints.dropped == 1
