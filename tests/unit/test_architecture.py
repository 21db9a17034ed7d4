"""Models that plans read from a ``config.json``: their parameters, KV and experts, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dora.errors import InvalidValue
from dora.lab.planning.layout import PipelineStage, stage_parameters, stages
from dora.lab.planning.models import MODELS, ModelSpec
from dora.ops.cli.offline.model_architecture import planned_model
from tests.refusals import refused

# The fields that determine sizes, as published.
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 152_064, "tie_word_embeddings": False}
_DENSE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {**_QWEN2, **dict(zip(_DENSE, (28, 3584, 28, 4, 18_944), strict=True))},
    "qwen2.5-14b": {**_QWEN2, **dict(zip(_DENSE, (48, 5120, 40, 8, 13_824), strict=True))},
    "qwen2.5-32b": {**_QWEN2, **dict(zip(_DENSE, (64, 5120, 40, 8, 27_648), strict=True))},
    "qwen2.5-72b": {**_QWEN2, **dict(zip(_DENSE, (80, 8192, 64, 8, 29_568), strict=True))},
    "qwen3-30b-a3b": {
        **dict(zip(_DENSE, (48, 2048, 32, 4, 6144), strict=True)),
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "longcat-flash": {
        "model_type": "longcat_flash",
        "architectures": ["LongcatFlashForCausalLM"],
        "num_layers": 28,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "ffn_hidden_size": 12_288,
        "expert_ffn_hidden_size": 2048,
        "vocab_size": 131_072,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129_280,
    "tie_word_embeddings": False,
}
TINY = {
    **_QWEN2,
    **dict(zip(_DENSE, (2, 64, 4, 2, 96), strict=True)),
    "vocab_size": 128,
}
SEEDS = 12


def read(folder: Path, tree: object) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    return planned_model(str(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_model_of_that_name(name: str, tmp_path: Path) -> None:
    found, known = read(tmp_path / name, PUBLISHED[name]), MODELS[name]
    assert found.parameters == pytest.approx(known.parameters, rel=0.002)
    assert found.active_parameters == pytest.approx(known.active_parameters, rel=0.04)  # 27 billion, in the text
    assert found.kv_token_bytes == known.kv_token_bytes
    assert found.expert_parameters == known.expert_parameters
    for field in ("name", "layers", "hidden_dim", "heads", "kv_heads", "head_dim", "vocabulary", "ffn_dim"):
        assert getattr(found, field) == getattr(known, field), field
    for field in ("value_dim", "latent_dim", "experts", "experts_per_token", "expert_dim", "block_layers", "tied"):
        assert getattr(found, field) == getattr(known, field), field


def test_a_mixture_with_dense_layers_and_latent_attention_has_its_published_sizes(tmp_path: Path) -> None:
    """DeepSeek-V3's report: 671 billion parameters, of which a token uses 37 billion."""
    found = read(tmp_path / "v3", DEEPSEEK_V3)
    assert found.parameters == pytest.approx(671e9, rel=0.001)
    assert found.active_parameters == pytest.approx(37e9, rel=0.02)
    assert found.expert_parameters == 58 * 256 * 3 * 7168 * 2048
    assert found.kv_token_bytes == 61 * 576 * 2
    assert (found.dense_blocks, found.layer_experts) == (3, pytest.approx(8 * 58 / 61))
    assert found.ffn_dim == round((3 * 18_432 + 58 * 2048) / 61)


def test_a_copy_of_an_architecture_with_code_of_its_own_and_quantised_weights_is_planned(tmp_path: Path) -> None:
    own = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "own.Own"}}
    copy = {**DEEPSEEK_V3, **own, "quantization_config": {"quant_method": "fp8"}}
    assert read(tmp_path / "v3", copy) == read(tmp_path / "v3", DEEPSEEK_V3)


def test_the_text_model_of_a_model_of_text_and_images_is_planned(tmp_path: Path) -> None:
    text = {**TINY, "model_type": "qwen3_vl_text", "head_dim": 16}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    tree = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    found, alone = read(tmp_path / "vl", tree), read(tmp_path / "vl", {**TINY, "model_type": "qwen3", "head_dim": 16})
    assert found == alone


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_dense_model_or_mixture_has_the_sizes_of_its_fields(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    heads_each, kv, head_dim, hidden = (rng.choice(each) for each in ((1, 2, 4), (1, 2, 8), (16, 24), (48, 64, 96)))
    layers, vocabulary, tied = rng.randint(1, 6), rng.randint(100, 300), rng.random() < 0.5
    heads, wide, mixture = kv * heads_each, rng.randint(8, 99), rng.random() < 0.5
    experts = rng.choice((4, 6, 16)) if mixture else 0
    chosen = rng.randint(1, experts) if mixture else 0
    tree = {
        "model_type": "qwen3_moe" if mixture else "qwen3",
        **dict(zip(_DENSE, (layers, hidden, heads, kv, wide), strict=True)),
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    if mixture:
        tree |= {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": wide}
    found = read(tmp_path / "any", tree)
    attention = hidden * head_dim * (2 * heads + 2 * kv) + 2 * head_dim + 2 * hidden  # two norms of each kind
    network = 3 * hidden * wide
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    router = hidden * experts
    assert found.parameters == outside + layers * (attention + router + network * max(1, experts)), tree
    assert found.active_parameters == outside + layers * (attention + router + network * max(1, chosen)), tree
    assert found.kv_token_bytes == layers * 2 * kv * head_dim * 2
    assert (found.tied, found.experts, found.experts_per_token) == (tied, experts, chosen)
    whole = (PipelineStage(layers, found.embeddings, 1, logits=True),)
    assert sum(map(sum, (stage_parameters(found, stage) for stage in whole))) == pytest.approx(found.parameters)
    assert stages(found, 1) == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "a configuration with a model_type"),
        ({"model_type": "gpt9"}, "the installed transformers has, not of gpt9"),
        ({"model_type": "t5"}, "a language model"),
        ({"model_type": "vit"}, "a language model"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is at most 1,024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"hidden_size": -64}, ""),
        ({"hidden_size": 0}, ""),
        ({"num_attention_heads": 0}, ""),
        ({"num_key_value_heads": 0}, ""),
        ({"num_key_value_heads": [1, 2]}, ""),
        ({"vocab_size": "128"}, ""),
        ({"vocab_size": 0}, ""),
        ({"head_dim": -1}, ""),
        ({"layer_types": ["full_attention", "linear_attention"]}, ""),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "attention in each layer, not linear_attention"),
        ({"model_type": "mamba"}, "linear_attention"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "16,384"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "from 1 to 4, not 5"),
    ],
)
def test_a_configuration_that_cannot_be_planned_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tree = {name: value for name, value in {**TINY, **change}.items() if value is not None}
    with refused(InvalidValue, field="--model", value=str(tmp_path / "config.json"), names=(words,)):
        read(tmp_path, tree)


def test_defaults_of_transformers_never_stand_for_another_model(tmp_path: Path) -> None:
    for name in ("num_hidden_layers", "hidden_size"):
        with refused(InvalidValue, field="--model", names=(f"a configuration with {name}",)):
            read(tmp_path, {key: value for key, value in TINY.items() if key != name})


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"model_type": "qwen2"'])
def test_a_file_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for name in (file, tmp_path):
        with refused(InvalidValue, field="--model", value=str(file), names=("JSON",)):
            planned_model(str(name))


def test_a_folder_without_a_configuration_and_a_path_to_nothing_are_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "gone" / "config.json", tmp_path / "gone"):
        with refused(InvalidValue, field="--model", names=(str(tmp_path), "No such file or directory")):
            planned_model(str(name))


@pytest.mark.parametrize("name", ["x" * 5000 + "/config.json", "a\0b/config.json", "~nobody-of-that-name/config.json"])
def test_a_path_that_cannot_be_is_refused(name: str) -> None:
    with refused(InvalidValue, field="--model"):
        planned_model(name)


def test_a_name_is_looked_up_first() -> None:
    assert planned_model("Qwen2.5-32B") is MODELS["qwen2.5-32b"]
    with refused(InvalidValue, field="--model", names=("did you mean qwen2.5-32b?", "or a model's folder")):
        planned_model("qwen2.5-33b")
