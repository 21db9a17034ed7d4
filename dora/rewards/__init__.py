"""Rewards: plug-in functions, ``module:function``, each run in processes of its own and limited in time.

A reward function is plain Python:

    def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict) -> float

``response_text`` is the response without special tokens, ``verifier`` what came with the prompt (the answer, say).
An ``async def`` is awaited, in one event loop for all calls. A function may return a mapping instead, whose keys
besides ``reward`` are optional:

    {"reward": 0.5, "components": {"format": 1.0, "answer": 0.0}, "log": "no answer found"}

Rewards and components are finite numbers: of Python, or scalars of numpy or torch. There are at most 128 components,
with names of at most 200 bytes; a log is cut after 32 KiB. A function that raises, takes too long, ends its process or
returns anything else costs no sample: its trajectory is delivered with ``Reward(valid=False, value=0.0, log=...)``.
One process runs one call at a time; a function need not be thread-safe.

    pool.py (service) ──▶ keeper.py ──▶ process.py: the function

The function shares no process with anything of the service but ``process.py``, and its keeper ends what it has started.
"""

from dora.rewards.group_filter import EQUAL_REWARDS, EqualRewards, FilterRunner, GroupFilter
from dora.rewards.runner import RewardRunner

__all__ = ["EQUAL_REWARDS", "EqualRewards", "FilterRunner", "GroupFilter", "RewardRunner"]
