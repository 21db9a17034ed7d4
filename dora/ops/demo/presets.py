"""The defaults of ``dora demo``: one preset per model."""

from dataclasses import dataclass, replace
from pathlib import Path

from dora.errors import InvalidValue, one_of
from dora.models import layer_count


@dataclass(frozen=True, slots=True)
class DemoPreset:
    """A demo that fits two cores: sizes for the service, hyperparameters for the reference trainer."""

    prompts: str  # the service's prompt source
    groups: int  # prompt groups per step
    group_size: int  # responses per prompt
    max_tokens: int
    temperature: float
    learning_rate: float
    slots: int  # concurrent requests per worker
    kv_tokens: int  # KV cache per worker
    max_model_len_tokens: int
    steps: int = 3
    window: int = 2
    workers: int = 2
    trainer_threads: int = 1
    # When a worker changes version, the paper's strategy moves its running requests, which a demo should show. With two
    # workers, the default strategy lets most of them finish where they are.
    policy: str = "dora"
    period_s: float = 5.0  # between rebalancing cycles: steps are short here
    train_layers: int = 0  # number of last decoder layers to train; 0: all
    micro_batch_tokens: int = 1024  # of the trainer: its logits take this times the vocabulary, several times over
    autocast: bool = False  # the trainer multiplies matrices in bfloat16 if the processor is fast at it
    environment: str = ""  # module:Class that drives the responses, as sessions of several turns; empty: none


# A step takes about a second on two cores, and the longest response about four: with three versions in the window, it
# runs on one worker while the other one generates for newer versions. The learning rate is too high for a longer run.
TINY = DemoPreset(
    prompts="tiny-tail",
    groups=12,
    group_size=8,
    max_tokens=400,
    temperature=1.0,
    learning_rate=3e-3,
    slots=32,
    kv_tokens=16384,
    max_model_len_tokens=512,
    steps=18,
    window=3,
)

PRESETS: dict[str, DemoPreset] = {
    # Two cores train about as fast as they sample (80 to 150 tokens/s), so a run of two minutes learns from about
    # 10,000 tokens: short answers, scored number by number, with a learning rate too high for a longer run. The last 3
    # of 30 layers are trained. The trainer has one thread: beside two engines on two cores, a second one would mostly
    # wait.
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
    "tiny-hybrid": TINY,
}

_TINY_AGENT = replace(
    TINY, prompts="tiny", max_tokens=8, steps=60, learning_rate=4e-3, environment="dora.ops.demo.agent_tasks:Lookup"
)
AGENT_PRESETS: dict[str, DemoPreset] = {
    "smollm2": replace(PRESETS["smollm2"], max_tokens=40, steps=8, environment="dora.ops.demo.agent_tasks:Checked"),
    "tiny": _TINY_AGENT,
    "tiny-moe": _TINY_AGENT,
    "tiny-hybrid": _TINY_AGENT,
}


def preset(model: str, *, is_agent: bool = False) -> DemoPreset:
    """The preset of ``model``. A Hugging Face folder uses smollm2's sizes, with no more trained layers than it has.
    Raises InvalidValue for another name.
    """
    presets = AGENT_PRESETS if is_agent else PRESETS
    if model in presets:
        return presets[model]
    if "/" in model:
        folder, sizes = Path(model), presets["smollm2"]
        layers = layer_count(folder) if (folder / "config.json").is_file() else 0
        return replace(sizes, train_layers=min(sizes.train_layers, layers or sizes.train_layers))
    raise InvalidValue("--model", model, f"{one_of(model, PRESETS)}, or the path of a Hugging Face folder (with a '/')")
