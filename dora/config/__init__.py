"""The whole configuration: frozen, validated once. One TOML file plus dotted overrides (``--set window.size=3``).

Field names carry their units. No value is silently corrected: a bad one raises :class:`dora.errors.InvalidValue` with
the dotted field, the value and what is allowed.
"""

from dora.config.planning import (
    DEFAULT_POLICY,
    BalanceConfig,
    CostConfig,
    DoraConfig,
    RolloutConfig,
    SelectionConfig,
    WindowConfig,
    WindowSize,
)
from dora.config.processes import ClusterConfig, KvConfig, ServiceConfig, TlsConfig, WorkersConfig
from dora.config.reading import (
    Override,
    Setting,
    load_config,
    merged,
    overrides_of,
    settings_tree,
    tree_of,
    validated,
    value_at,
)
from dora.config.section import Section
from dora.config.tasks import (
    ColumnsConfig,
    EnvironmentConfig,
    EvaluationConfig,
    PromptsConfig,
    RewardConfig,
    SessionsConfig,
)
from dora.config.whole import Config

__all__ = [
    "DEFAULT_POLICY",
    "BalanceConfig",
    "ClusterConfig",
    "ColumnsConfig",
    "Config",
    "CostConfig",
    "DoraConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "KvConfig",
    "Override",
    "PromptsConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
    "SelectionConfig",
    "ServiceConfig",
    "SessionsConfig",
    "Setting",
    "TlsConfig",
    "WindowConfig",
    "WindowSize",
    "WorkersConfig",
    "load_config",
    "merged",
    "overrides_of",
    "settings_tree",
    "tree_of",
    "validated",
    "value_at",
]
