"""How many experts a mixture has, as its config says; families of models name that differently."""

from collections.abc import Mapping, Sequence
from typing import Any

from dora.errors import InvalidValue

# Experts of a layer, and how many of them one token is sent to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOKEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


def experts_of(config: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    """Of a mixture of experts how many there are in a layer, and how many one token is sent to; None for other models.

    As the fields of config.json say, or its ``text_config``. Raises InvalidValue, naming the ``source``, where they
    say the one and not the other.
    """
    fields = {**config, **(config.get("text_config") or {})}
    total, chosen = (_first_number(fields, names) for names in (_EXPERTS, _TOKEN_EXPERTS))
    if total < 2:
        return None
    if not 1 <= chosen <= total:
        raise InvalidValue(f"{source}: {_TOKEN_EXPERTS[0]}", chosen, f"1 to the {total} experts there")
    return total, chosen


def _first_number(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Of the first of these fields that has one; else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
