"""DORA's own strategy, the default: docs/strategy.md explains it on one page.

policy.py         what a strategy is asked: who begins what, and a plan
schedule.py       how many workers a version is to have at each age, and when the steps to come end
reservations.py   KV that the admitted requests will hold, against what their version is to have: what may begin
allocation.py     how many workers each version gets now, and which
moves.py          which requests move
reserved.py       optional, acts only where ``balance.cost`` is set: workers kept below full for responses in a hurry
tuning.py         every constant, with its reason
"""

from dora.orchestrator.core.policies.laxity.policy import LaxityPolicy

__all__ = ["LaxityPolicy"]
