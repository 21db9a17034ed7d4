"""DORA: a rollout service for reinforcement-learning post-training of language models.

``import dora`` is light: it loads neither torch nor vLLM. The trainer client is reached as ``dora.Trainer``,
the prompt client as ``dora.Prompts``, what it submits as ``dora.Prompt``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora.client import Prompts, Trainer
    from dora.types import Prompt

__version__ = "0.1.0"
__all__ = ["Prompt", "Prompts", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Trainer", "Prompts"):
        from dora import client

        return getattr(client, name)
    if name == "Prompt":
        from dora.types import Prompt

        return Prompt
    raise AttributeError(f"module 'dora' has no attribute {name!r}")
