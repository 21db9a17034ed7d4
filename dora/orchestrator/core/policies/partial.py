"""Partial rollout, for comparison in the simulator only: it breaks C1."""

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.targets import plannable
from dora.orchestrator.core.snapshot import Plan, Snapshot, Trigger
from dora.orchestrator.core.state import Worker

VERSION = 0


class PartialPolicy(BasePolicy):
    """Responses go on under newer weights, and DP groups take new prompts without end (paper 004, section 5).

    A response is then sampled by several versions, which the core has no notion of: here everything runs under version
    0 for ever, in a window that never ends (``Strategy.versioned``); staleness means nothing then. What a
    change of weights costs, every running context computed anew, the simulated engines have to pay at each publish. A
    service refuses this policy (``check_live``): it would train on what an old version sampled.
    """

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        return Plan(dict.fromkeys(plannable(snapshot).tolist(), VERSION))

    def versions(self, floor: Floor) -> tuple[int, ...]:
        return (VERSION,)

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        """Slots alone count: what exceeds the KV waits inside the engine."""
        return True
