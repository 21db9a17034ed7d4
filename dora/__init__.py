"""DORA: a rollout service for reinforcement-learning post-training of language models.

``import dora`` is light: it loads neither torch nor vLLM. The trainer client is reached as ``dora.Trainer``,
the prompt client as ``dora.Prompts``, what it submits as ``dora.Prompt``, weights that several ranks have together as
``dora.AllRanks``; ``dora.sync`` has both clients for code that
is not asynchronous.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dora.release import __version__

if TYPE_CHECKING:
    from dora import sync
    from dora.client import AllRanks, Prompts, Trainer
    from dora.data.types import Prompt

__all__ = ["AllRanks", "Prompt", "Prompts", "Trainer", "__version__", "sync"]


def __getattr__(name: str) -> Any:
    if name in ("AllRanks", "Trainer", "Prompts"):
        from dora import client

        return getattr(client, name)
    if name == "Prompt":
        from dora.data.types import Prompt

        return Prompt
    if name == "sync":
        return import_module("dora.sync")
    raise AttributeError(f"module 'dora' has no attribute {name!r}")
