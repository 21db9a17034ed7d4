"""Rewards: user functions, ``module:function``, each run in separate processes with a time limit.

A reward function is plain Python:

    def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict) -> float

``response_text`` is the response without special tokens, ``verifier`` the prompt's data (the answer, for example). An
``async def`` is awaited, in one event loop for all calls. A function may instead return a mapping, in which all keys
but ``reward`` are optional:

    {"reward": 0.5, "components": {"format": 1.0, "answer": 0.0}, "log": "no answer found"}

Rewards and components are finite numbers of Python, or scalars of numpy or torch. There are at most 128 components,
with names of at most 200 bytes; a log is cut after 32 KiB. If a function raises, takes too long, ends its process or
returns anything else, the trajectory is still delivered, with ``Reward(valid=False, value=0.0, log=...)``. One process
runs one call at a time, so a function need not be thread-safe.

    pool.py (service) ──▶ supervisor.py ──▶ process.py: the function

The function shares its process with ``process.py`` only, and the supervisor ends all processes that it started.
"""

from dora.rewards.group_filter import EQUAL_REWARDS, EqualRewards, FilterRunner, GroupFilter
from dora.rewards.runner import RewardRunner

__all__ = ["EQUAL_REWARDS", "EqualRewards", "FilterRunner", "GroupFilter", "RewardRunner"]
