"""DORA: a rollout service for reinforcement-learning post-training of language models.

``import dora`` is light: it loads neither torch nor vLLM. ``dora.Trainer`` is the trainer's client, ``dora.Prompts``
the client for prompts, ``dora.Prompt`` a submitted prompt, ``dora.Sessions`` the client of an environment,
``dora.AllRanks`` weights that several ranks hold together, ``dora.ReplayBuffer`` a trainer's earlier groups, and
``dora.Tls`` a client's certificate. ``dora.sync`` has the first two for synchronous code.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dora.release import __version__

# Read by gRPC when it is imported. Its fork handlers crash children of a process that has an asyncio client, such as
# DataLoader workers. A child of a fork uses no client, so it needs none of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from dora import sync
    from dora.client import AllRanks, Prompts, ReplayBuffer, Sessions, Trainer
    from dora.data.types import Prompt
    from dora.tls import Tls

__all__ = ["AllRanks", "Prompt", "Prompts", "ReplayBuffer", "Sessions", "Tls", "Trainer", "__version__", "sync"]


def __getattr__(name: str) -> Any:
    if name in ("AllRanks", "Trainer", "Prompts", "ReplayBuffer", "Sessions"):
        from dora import client

        return getattr(client, name)
    if name == "Prompt":
        from dora.data.types import Prompt

        return Prompt
    if name == "Tls":
        from dora.tls import Tls

        return Tls
    if name == "sync":
        return import_module("dora.sync")
    raise AttributeError(f"module 'dora' has no attribute {name!r}")
