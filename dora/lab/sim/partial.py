"""Partial rollout, for comparison. It breaks C1, so only the simulator runs it.

Responses continue under newer weights, and workers take new prompts without a limit ("DORA", section 5). Several
versions may then sample one response, which the core cannot represent. Here everything runs under version 0, in an
endless window, and staleness has no meaning. A weight change requires recomputing every running context: the world
charges its engines for that at each publish (``WorkerDriver.renew``).
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
from dora.lab.sim.scenario import Scenario

NAME: Final = "partial"
VERSION: Final = 0
ENDLESS_STEPS: Final = 1 << 30  # more than any run has


class PartialPolicy(BasePolicy):
    """Every worker hosts the single version and takes as many requests as it has slots."""

    def plan(self, view: View, trigger: Trigger) -> Plan:
        return Plan(dict.fromkeys(plannable(view).tolist(), VERSION))

    def versions(self, dispatcher: Dispatcher) -> tuple[int, ...]:
        return (VERSION,)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Only slots limit a worker. Requests that exceed its KV wait inside the engine."""
        return True


# registered with the largest window, as it has no limit
STRATEGY: Final = Strategy(PartialPolicy, windows=(WINDOW_MAX, WINDOW_MAX))


def strategies() -> Mapping[str, Strategy]:
    """All strategies of the simulator, the baselines first."""
    every = {**POLICIES, NAME: STRATEGY}
    first = [name for name in ("sync", "one_step", "stream", NAME) if name in every]
    return {name: every[name] for name in (*first, *every)}


def has_versions(policy: str) -> bool:
    """Whether the policy's responses belong to versions, so that windows and staleness are defined."""
    return policy != NAME


def window_steps(scenario: Scenario) -> int:
    """Steps that a version is live: the window, or endless if there is only one version."""
    return scenario.window.most if has_versions(scenario.balance.policy) else ENDLESS_STEPS


def policy_of(scenario: Scenario, config: BalanceConfig) -> PartialPolicy | None:
    """The policy object for a strategy that the core does not know; None for a registered one."""
    return None if has_versions(scenario.balance.policy) else PartialPolicy(config)
