"""What ``dora demo`` runs by default, one row a model."""

from dataclasses import dataclass

from dora.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class DemoPreset:
    """A demo that fits two cores: sizes for the service, hyper-parameters for the reference trainer."""

    prompts: str  # the service's prompt source
    groups: int  # prompt groups per step
    group_size: int  # responses to one prompt
    max_tokens: int
    temperature: float
    learning_rate: float
    slots: int  # requests that one worker decodes at once
    kv_tokens: int  # KV-cache of one worker
    max_model_len_tokens: int
    steps: int = 3
    window: int = 2
    workers: int = 2
    trainer_threads: int = 1


PRESETS: dict[str, DemoPreset] = {
    # 97 ms an engine step for 16 requests, 130 trained tokens a second: 24 short answers a step is what
    # two cores sample and train in under a minute.
    "smollm2": DemoPreset(
        prompts="reasoning-gym:spell_backward,syllogism",
        groups=6,
        group_size=4,
        max_tokens=96,
        temperature=1.0,
        learning_rate=1e-5,
        slots=16,
        kv_tokens=16384,
        max_model_len_tokens=1024,
    ),
    "tiny": DemoPreset(
        prompts="tiny",
        groups=16,
        group_size=8,
        max_tokens=16,
        temperature=1.0,
        learning_rate=2e-3,
        slots=64,
        kv_tokens=16384,
        max_model_len_tokens=128,
    ),
    "tiny-moe": DemoPreset(
        prompts="tiny",
        groups=16,
        group_size=8,
        max_tokens=16,
        temperature=1.0,
        learning_rate=2e-3,
        slots=64,
        kv_tokens=16384,
        max_model_len_tokens=128,
    ),
}


def preset(model: str) -> DemoPreset:
    """The preset of ``model``; a Hugging Face folder gets smollm2's sizes. Raises InvalidValue for another name."""
    if model in PRESETS:
        return PRESETS[model]
    if "/" in model:
        return PRESETS["smollm2"]
    raise InvalidValue("--model", model, f"{', '.join(PRESETS)}, or the path of a Hugging Face folder (with a '/')")
