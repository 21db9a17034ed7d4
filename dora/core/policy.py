"""The contract of a rollout strategy: what it may see, keep and do."""

from typing import Protocol

from dora.core.dispatcher import Dispatcher
from dora.core.plan import Move, Plan, Trigger
from dora.core.view import View


class Policy(Protocol):
    """A rollout strategy. Start from ``policies/base.py``, whose ``dispatch`` fits most.

    *See*: a plan is made from a ``View``, the core's state as columns; ``dispatch`` and the questions beside it get the
    ``Dispatcher``, the same state to read, with the verbs that give work. Nothing else: no clock, randomness or I/O.

    *Keep*: a policy may remember things between calls, but nothing that cannot be derived again. A fresh policy that is
    given the same state must make a valid plan, since an orchestrator that restarts has a fresh one
    (``tests/sim/test_policy_restart.py``).

    *Do*: it answers plans and moves, and gives work by ``Dispatcher.place`` and ``Dispatcher.admit``. It writes no
    state itself. No promise rests on it: the core refuses a placement that would break C1 and an admission that would
    break C3.
    """

    def observe(self, dispatcher: Dispatcher) -> None:
        """Brings up to date what plans go by and a view does not show. Called right before ``plan``.

        For ``laxity`` alone, whose schedule follows the times of steps and tokens.
        """

    def plan(self, view: View, trigger: Trigger) -> Plan:
        """A whole re-balancing cycle: which worker is to host which version, and which requests move."""

    def relieve(self, view: View) -> tuple[Move, ...]:
        """Only moves, under the present targets: asked for now and then while requests stand on leaving workers."""

    def successor(self, dispatcher: Dispatcher) -> int | None:
        """The version that starved workers of older versions get, where that is known without a plan; None: it is not.

        For ``laxity`` alone: where KV is ample, workers starve one by one, hundreds a step, and a plan for each would
        say the same in a thousand times as long.
        """

    def begins(self, dispatcher: Dispatcher, version: int) -> bool:
        """Whether it would begin a group of this version, an old one, that the window admits, if a worker had room.

        For ``dora`` alone, which begins nothing under an old version that could end too late: a worker that is idle for
        it starves, and is not to wait for the next periodic plan.
        """

    def dispatch(self, dispatcher: Dispatcher) -> None:
        """Gives workers with room something to do: waiting requests, or new groups. Called after every change."""
