"""Batch-level asynchrony by one step: a batch is generated while the trainer trains on the one before."""

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.policies.sync import SyncPolicy, batch_open


class OneStepPolicy(SyncPolicy):
    """One-step off-policy: batch ``v + 1`` is generated under version ``v`` while the trainer trains batch ``v``.

    Weights change globally: all DP groups keep version ``v`` until its whole batch is generated *and* ``v + 1`` is
    published, then all load it (paper 001, figure 3b). One batch a version; version 0 also makes the first batch, which
    is on-policy. Its window is 2.
    In the simulator the trainer waits for the whole batch (``trainer.streams`` false).
    """

    def version_of(self, step: int, newest: int, window: int) -> int:
        return max(0, step - 1)

    def choose(self, floor: Floor, version: int) -> Entry | None:
        due = version == self.version_of(floor.window.step, floor.newest, floor.window.size)
        return floor.backlog.first() if due and batch_open(floor) else None


class StreamPolicy(OneStepPolicy):
    """Streaming generation (paper 001, figure 3c): generates as one_step does, under the same global weight change.

    What differs is the trainer: it trains on the first responses of a batch while the last are still generated. Groups
    always reach it as they finish; in the simulator it uses that where ``trainer.streams`` is true.
    """
