"""Re-balancing strategies by name. A third one is a file here and a line below."""

from collections.abc import Callable

from dora.config import BalanceConfig
from dora.orchestrator.core.policies.dora import DoraPolicy
from dora.orchestrator.core.snapshot import Policy

POLICIES: dict[str, Callable[[BalanceConfig], Policy]] = {"dora": DoraPolicy}

__all__ = ["POLICIES"]
