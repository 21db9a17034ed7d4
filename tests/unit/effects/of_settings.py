"""The rows of all settings."""

from typing import Final

from tests.unit.effects import (
    of_cluster,
    of_core,
    of_engines,
    of_environments,
    of_evaluation,
    of_limits,
    of_planes,
    of_prompts,
    of_service,
    of_sessions,
)
from tests.unit.effects.rows import Row

ROWS: Final[dict[str, Row]] = {
    **of_core.ROWS,
    **of_engines.ROWS,
    **of_environments.ROWS,
    **of_evaluation.ROWS,
    **of_cluster.ROWS,
    **of_limits.ROWS,
    **of_planes.ROWS,
    **of_prompts.ROWS,
    **of_sessions.ROWS,
    **of_service.ROWS,
}
