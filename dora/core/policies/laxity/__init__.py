"""DORA's own strategy, the default: docs/strategy.md explains it on one page.

policy.py answers what a strategy is asked; schedule.py says how many workers a version is to have at each age;
reservations.py what may begin; allocation.py which worker each version gets now; moves.py which requests move;
reserved.py, optional, which workers are kept below full where ``balance.cost`` is set; tuning.py holds every constant.
"""

from dora.core.policies.laxity.policy import LaxityPolicy

__all__ = ["LaxityPolicy"]
