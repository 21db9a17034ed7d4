"""What ``dora demo`` runs by default, one preset a model."""

from dataclasses import dataclass

from dora.errors import InvalidValue, one_of


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
    # When a worker changes version, the paper's strategy moves the requests that it still runs, which a demo is to
    # show; with two workers the default strategy lets most of them end where they are.
    policy: str = "dora"
    period_s: float = 5.0  # between periodic re-balancings: steps are short here
    train_layers: int = 0  # the last so many decoder layers; 0: all
    micro_batch_tokens: int = 1024  # of the trainer: its logits are this times the vocabulary, several times over
    autocast: bool = False  # the trainer multiplies matrices in bfloat16, where the processor does that fast


TINY = DemoPreset(
    prompts="tiny",
    groups=8,
    group_size=8,
    max_tokens=96,
    temperature=1.0,
    learning_rate=1e-3,
    slots=32,
    kv_tokens=16384,
    max_model_len_tokens=128,
)

PRESETS: dict[str, DemoPreset] = {
    # Two cores train about as fast as they sample (80 to 150 tokens a second), so a run of two minutes has some 10,000
    # tokens to learn from: short answers, scored number by number, and a learning rate that a longer run would not
    # bear. Of 30 layers the last 3 are trained. The trainer has one thread: two of them, beside two engines on two
    # cores, would wait for each other most of the time.
    "smollm2": DemoPreset(
        prompts="counting",
        groups=4,
        group_size=8,
        max_tokens=64,
        temperature=1.0,
        learning_rate=3e-4,
        slots=16,
        kv_tokens=8192,
        max_model_len_tokens=256,
        steps=8,
        train_layers=3,
        autocast=True,
    ),
    "tiny": TINY,
    "tiny-moe": TINY,
}


def preset(model: str) -> DemoPreset:
    """The preset of ``model``; a Hugging Face folder gets smollm2's sizes. Raises InvalidValue for another name."""
    if model in PRESETS:
        return PRESETS[model]
    if "/" in model:
        return PRESETS["smollm2"]
    raise InvalidValue("--model", model, f"{one_of(model, PRESETS)}, or the path of a Hugging Face folder (with a '/')")
