"""One life of a service, and what it has of the life before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dora.orchestrator.recovery.reattachment import Reattachment


def _without_state() -> Reattachment:
    """There is nobody to wait for."""
    reattachment = Reattachment(())
    reattachment.close()
    return reattachment


@dataclass(slots=True)
class Incarnation:
    """``number``: restarts of the service so far. ``resumed``: the ledger's values at the start; empty without a
    ledger. ``orphan_timeout_s``: how long workers and hosts live without this service.
    """

    number: int = 0
    resumed: Mapping[str, Any] = field(default_factory=dict)
    orphan_timeout_s: float = 0.0
    reattachment: Reattachment = field(default_factory=_without_state)
