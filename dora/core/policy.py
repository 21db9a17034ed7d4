"""The contract of a rollout strategy: its inputs, its state and its actions."""

from typing import Protocol

from dora.core.dispatcher import Dispatcher
from dora.core.plan import Move, Plan, Trigger
from dora.core.view import View


class Policy(Protocol):
    """A rollout strategy. Start from ``policies/base.py``, whose ``dispatch`` fits most.

    *Inputs*: a plan is made from a ``View``, the core's state as columns; ``dispatch`` and the other methods get the
    ``Dispatcher``, the same state for reading, with the actions that assign work. No clock, randomness or I/O.

    *State*: a policy may keep only data that it can derive again. A fresh policy with the same state must make a valid
    plan, because a restarted orchestrator has a fresh one (``tests/sim/test_policy_restart.py``).

    *Actions*: it returns plans and moves, and assigns work by ``Dispatcher.place`` and ``Dispatcher.admit``. It writes
    no state itself. No promise depends on it: the core refuses a placement that would break C1 and an admission that
    would break C3.
    """

    def observe(self, dispatcher: Dispatcher) -> None:
        """Updates the policy's own state for plans. Called right before ``plan``.

        Only ``laxity`` uses it; its schedule follows the times of steps and tokens.
        """

    def plan(self, view: View, trigger: Trigger) -> Plan:
        """A whole re-balancing cycle: the version that each worker hosts, and the requests that move."""

    def relieve(self, view: View) -> tuple[Move, ...]:
        """Only moves, under the present targets: called from time to time while requests remain on vacating workers."""

    def successor(self, dispatcher: Dispatcher) -> int | None:
        """The version for starved workers of older versions, if it is known without a plan; otherwise None.

        Only ``laxity`` uses it: if KV is ample, workers starve one by one, hundreds a step, and a plan for each would
        give the same answer in a thousand times the time.
        """

    def begins(self, dispatcher: Dispatcher, version: int) -> bool:
        """Returns whether it would begin a group of this old version, given a worker with room.

        Only ``dora`` uses it: it begins nothing under an old version that could end too late, so an idle worker of that
        version is starved and must not wait for the next periodic plan.
        """

    def dispatch(self, dispatcher: Dispatcher) -> None:
        """Assigns work to workers with room: waiting requests, or new groups. Called after every change."""
