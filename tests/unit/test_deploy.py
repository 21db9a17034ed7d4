from pathlib import Path

import dora
from dora.config import load_config

ROOT = Path(dora.__file__).parent.parent


def test_the_sample_configuration_is_valid() -> None:
    config = load_config(ROOT / "deploy" / "dora.toml")
    assert config.prompts.source.startswith("reasoning-gym:") and config.window.size == 2


def test_the_image_has_a_compiler_where_engines_need_one_alone() -> None:
    """A host with GPUs is refused without one (dora/host/gpu_host.py). Nothing else in an image compiles."""
    stages = (ROOT / "deploy/Containerfile").read_text().split("\nFROM ")[1:]
    last = {head.split()[2]: text for head, _, text in (stage.partition("\n") for stage in stages)}
    parts = {name: last["user"] + last[name] for name in ("cpu", "cuda")}
    assert {name: "gcc" in text for name, text in parts.items()} == {"cpu": False, "cuda": True}
    assert all(text.rpartition("USER ")[2].startswith("10001:10001") for text in parts.values())
