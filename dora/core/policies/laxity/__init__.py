"""DORA's own strategy, the default. docs/strategy.md explains it on one page.

policy.py implements the policy interface. schedule.py computes the number of workers for each version and age.
reservations.py decides what may begin. allocation.py assigns versions to workers. moves.py chooses requests to move.
reserved.py is optional: it keeps some workers below full if ``balance.cost`` is set. tuning.py holds every constant.
"""

from dora.core.policies.laxity.policy import LaxityPolicy

__all__ = ["LaxityPolicy"]
