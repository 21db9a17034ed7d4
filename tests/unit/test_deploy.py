from pathlib import Path

import dora
from dora.config import load_config

ROOT = Path(dora.__file__).parent.parent


def test_the_sample_configuration_is_valid() -> None:
    config = load_config(ROOT / "deploy" / "dora.toml")
    assert config.prompts.source.startswith("reasoning-gym:") and config.window.size == 2
