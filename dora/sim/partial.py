"""Partial rollout, for comparison: it breaks C1, so the simulator runs it and no service does.

Responses go on under newer weights, and workers take new prompts without end ("DORA", section 5). A response is then
sampled by several versions, which the core has no notion of: here everything runs under version 0 for ever, in a window
that never ends, and staleness means nothing. A change of weights has every running context computed anew: the world
makes its engines pay that at each publish (``WorkerDriver.renew``).
"""

from collections.abc import Mapping
from typing import Final

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.plan import Plan, Trigger
from dora.core.policies import POLICIES, Strategy
from dora.core.policies.base import BasePolicy
from dora.core.policies.targets import plannable
from dora.core.view import View
from dora.data.limits import WINDOW_MAX
from dora.sim.scenario import Scenario

NAME: Final = "partial"
VERSION: Final = 0
ENDLESS_STEPS: Final = 1 << 30  # no run has so many


class PartialPolicy(BasePolicy):
    """Every worker hosts the one version that there is, and takes what it has slots for."""

    def plan(self, view: View, trigger: Trigger) -> Plan:
        return Plan(dict.fromkeys(plannable(view).tolist(), VERSION))

    def versions(self, dispatcher: Dispatcher) -> tuple[int, ...]:
        return (VERSION,)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Slots alone count: what exceeds the KV waits inside the engine."""
        return True


# the largest window is named for it, as it has no bound
STRATEGY: Final = Strategy(PartialPolicy, windows=(WINDOW_MAX, WINDOW_MAX))


def strategies() -> Mapping[str, Strategy]:
    """All that the simulator runs, the baselines first."""
    every = {**POLICIES, NAME: STRATEGY}
    first = [name for name in ("sync", "one_step", "stream", NAME) if name in every]
    return {name: every[name] for name in (*first, *every)}


def has_versions(policy: str) -> bool:
    """Whether its responses belong to versions, so that windows and staleness mean something."""
    return policy != NAME


def window_steps(scenario: Scenario) -> int:
    """Steps that a version lives: the window, or without end where there is one version alone."""
    return scenario.window.most if has_versions(scenario.balance.policy) else ENDLESS_STEPS


def policy_of(scenario: Scenario, config: BalanceConfig) -> PartialPolicy | None:
    """The policy for a core that knows no such name; None where the core has it itself."""
    return None if has_versions(scenario.balance.policy) else PartialPolicy(config)
