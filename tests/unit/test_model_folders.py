"""Model folders that contradict themselves: each seed makes one contradiction, and names what it made."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.errors import InvalidValue
from dora.host.last_words import WORDS_MAX, reason_in
from dora.models.ends import end_token_ids
from dora.models.loadable import check_loadable
from dora.models.tiny_vocabulary import EOS_ID, VOCABULARY
from dora.weights.contradictions import check_folder
from dora.weights.reference import TensorHeader, check_tensors, read_header, read_reference
from tests.refusals import refused

SEEDS = 60
VOCABULARY_SIZE = len(VOCABULARY)


def change(file: Path, **fields: Any) -> None:
    """Sets fields of a JSON file; None removes one."""
    said = {**json.loads(file.read_text()), **fields} if file.is_file() else fields
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


def rewrite(folder: Path, changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in changed(load_file(file)).items()}, file)


# Each maker writes one contradiction and returns words that the message must have: a refusal's, or a warning's.
def ends(folder: Path, rng: random.Random) -> list[str]:
    first, second = rng.sample([token_id for token_id in range(VOCABULARY_SIZE) if token_id != EOS_ID], 2)
    change(folder / "generation_config.json", eos_token_id=rng.choice([first, [first]]))
    change(folder / "config.json", eos_token_id=rng.choice([second, [second, EOS_ID], None]))
    return [f"[{first}] in generation_config.json"]


def end_outside(folder: Path, rng: random.Random) -> list[str]:
    outside = VOCABULARY_SIZE + rng.randrange(9)
    change(folder / rng.choice(["config.json", "generation_config.json"]), eos_token_id=outside)
    return [f"[{outside}]", "outside"]


def tied_head(folder: Path, rng: random.Random) -> list[str]:
    at = rng.randrange(VOCABULARY_SIZE)

    def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[at, rng.randrange(head.shape[1])] += 1
        return {**tensors, "lm_head.weight": head}

    rewrite(folder, with_head)
    return ["tie_word_embeddings is true", "lm_head.weight"]


def untied_head(folder: Path, rng: random.Random) -> list[str]:
    change(folder / "config.json", tie_word_embeddings=False)
    return ["tie_word_embeddings is false", "lm_head.weight"]


def rope_theta(folder: Path, rng: random.Random) -> list[str]:
    theta = float(rng.randrange(20_000, 90_000))
    change(folder / "config.json", rope_theta=theta)
    return [f"rope_theta is {theta}", "rope_parameters.rope_theta is 10000.0"]


def rope_twice(folder: Path, rng: random.Random) -> list[str]:
    kind = rng.choice(["linear", "yarn", "dynamic"])
    change(folder / "config.json", rope_scaling={"rope_type": kind, "factor": 2.0})
    return ["rope_parameters.rope_type is 'default'", f"rope_scaling.rope_type is '{kind}'"]


def rope_types(folder: Path, rng: random.Random) -> list[str]:
    kind = rng.choice(["linear", "yarn"])
    change(folder / "config.json", rope_parameters={"rope_type": "default", "type": kind, "rope_theta": 10000.0})
    return ["rope_type is 'default'", f"type is '{kind}'"]


def dtype(folder: Path, rng: random.Random) -> list[str]:
    said = rng.choice(["bfloat16", "float16"])
    name = rng.choice(["dtype", "torch_dtype"])
    change(folder / "config.json", **{"dtype": None, "torch_dtype": None, name: said})
    return [said, "F32"]


def dtype_twice(folder: Path, rng: random.Random) -> list[str]:
    change(folder / "config.json", dtype="float32", torch_dtype="bfloat16")
    return ["dtype is 'float32'", "torch_dtype is 'bfloat16'"]


def added_token(folder: Path, rng: random.Random) -> list[str]:
    text = f"<|added-{rng.randrange(99)}|>"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": VOCABULARY_SIZE, "content": text, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return [text, str(VOCABULARY_SIZE)]


def generation_default(folder: Path, rng: random.Random) -> list[str]:
    name, value = rng.choice(
        [("repetition_penalty", 1.2), ("no_repeat_ngram_size", 3), ("suppress_tokens", [5]), ("min_new_tokens", 4)]
    )
    change(folder / "generation_config.json", **{name: value})
    return [f"{name} = {value}", "not applied"]


REFUSED = (tied_head, untied_head, rope_theta, rope_twice, rope_types, dtype_twice)
WARNED = (ends, end_outside, dtype, added_token, generation_default)
MAKERS = (*REFUSED, *WARNED)


def copied(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_contradiction_of_a_folder_is_named(seed: int, tiny_dense: Path, tmp_path: Path) -> None:
    folder, rng = copied(tiny_dense, tmp_path / "model"), random.Random(seed)
    maker = MAKERS[seed % len(MAKERS)]
    words = maker(folder, rng)
    if maker in REFUSED:
        with refused(InvalidValue, field="--model", names=words):
            check_folder(folder)
    else:
        said = " ".join(check_folder(folder))
        assert all(word in said for word in words), (maker.__name__, said)


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_a_folder_that_agrees_with_itself_passes_without_a_warning(model: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    assert check_folder(folder) == ()
    check_loadable(folder, "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_every_file_that_names_an_end_ends_a_response(seed: int, tiny_dense: Path, tmp_path: Path) -> None:
    folder, rng = copied(tiny_dense, tmp_path / "model"), random.Random(seed)
    first, second, third = rng.sample(range(VOCABULARY_SIZE), 3)
    wanted = set()
    change(folder / "tokenizer_config.json", eos_token=None)
    for name, token_id in (("generation_config.json", first), ("config.json", second)):
        said = rng.choice([None, token_id, [token_id]])
        change(folder / name, eos_token_id=said)
        wanted |= set() if said is None else {token_id}
    if rng.random() < 0.7:
        text = VOCABULARY[third]
        change(folder / "tokenizer_config.json", eos_token=rng.choice([text, {"content": text}]))
        wanted.add(third)
    assert end_token_ids(folder) == tuple(sorted(wanted))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"head_dim": 16}, (16, 32)),
        ({"architectures": ["NoSuchModelForCausalLM"]}, ("NoSuchModelForCausalLM",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("gptq", "quantization_config")),
    ],
)
def test_what_an_engine_will_refuse_is_refused_before_it_starts(
    fields: dict[str, Any], names: tuple[object, ...], tiny_dense: Path, tmp_path: Path
) -> None:
    folder = copied(tiny_dense, tmp_path / "model")
    change(folder / "config.json", **fields)
    with refused(InvalidValue, field="--model", names=names):
        check_loadable(folder, "cpu")


def test_head_sizes_are_those_of_the_installed_engine() -> None:
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    from dora.models.loadable import CPU_HEAD_SIZES

    assert list(CPU_HEAD_SIZES) == attention.CPUAttentionBackend.get_supported_head_sizes()


BUFFERS = [
    ("model.rotary_emb.inv_freq", (32,)),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", (32,)),
    ("model.layers.1.self_attn.rotary_emb.cos_cached", (1, 1, 64, 32)),
    ("transformer.h.0.attn.bias", (1, 1, 64, 64)),
    ("transformer.h.0.attn.masked_bias", ()),
    ("gpt_neox.layers.0.attention.bias", (1, 1, 64, 64)),
]


@pytest.mark.parametrize(("name", "shape"), BUFFERS)
def test_a_buffer_that_follows_from_the_configuration_is_optional_both_ways(
    name: str, shape: tuple[int, ...], tiny_dense: Path, tmp_path: Path
) -> None:
    folder = copied(tiny_dense, tmp_path / "model")
    without = read_header(folder / "model.safetensors")
    wanted = read_reference(folder).tensors
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(shape)})
    having = read_header(folder / "model.safetensors")
    check_tensors(having, wanted)
    check_tensors(without, read_reference(folder).tensors)
    check_tensors({**having, name: TensorHeader(name, "BF16", shape)}, read_reference(folder).tensors)


@pytest.mark.parametrize("seed", range(20))
def test_a_tensor_that_matters_is_never_optional(seed: int, tiny_dense: Path) -> None:
    rng, wanted = random.Random(seed), read_reference(tiny_dense).tensors
    found = {tensor.name: tensor for tensor in wanted}
    gone = rng.choice(sorted(found))
    with refused(InvalidValue, field=gone):
        check_tensors({name: tensor for name, tensor in found.items() if name != gone}, wanted)
    extra = rng.choice(
        ["model.layers.0.self_attn.bias", "transformer.h.0.attn.bias", "model.inv_freq", "x.attention.bias"]
    )
    with refused(InvalidValue, value=extra):
        check_tensors({**found, extra: TensorHeader(extra, "F32", (64,))}, wanted)


def test_the_layers_that_predict_ahead_may_be_missing_where_loaders_skip_them(tiny_dense: Path, tmp_path: Path) -> None:
    folder = copied(tiny_dense, tmp_path / "model")
    without = read_header(folder / "model.safetensors")
    rewrite(folder, lambda tensors: {**tensors, "mtp.fc.weight": torch.zeros(4, 4)})
    with refused(InvalidValue, field="mtp.fc.weight"):
        check_tensors(without, read_reference(folder).tensors)
    change(folder / "config.json", model_type="qwen3_next")
    check_tensors(without, read_reference(folder).tensors)


TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 3, in start
    engine(model, settings)
    ^^^^^^^^^^^^^^^^^^^^^^^
ValueError: head size 16 is not supported; use 32 or 64
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (TRACEBACK, "ValueError: head size 16 is not supported; use 32 or 64"),
        (TRACEBACK + "error: model = 'x': it must be y\n", "error: model = 'x': it must be y"),
        (TRACEBACK + "[rank0] resource_tracker: cleaned up 2 objects\n", None),
        (
            "(pid=7) ERROR [core.py:3] RuntimeError: no room for 3 blocks\n[0] done\n",
            "RuntimeError: no room for 3 blocks",
        ),
        ("  Value error, no such architecture [type=value_error, input=...]\n    For further information\n", None),
        ("starting\nkilled by a signal\n\n", "killed by a signal"),
        ("", "it wrote nothing"),
        ("ValueError: " + "x" * 5000, None),
    ],
)
def test_a_worker_s_last_words_are_the_line_that_says_why_it_ended(log: str, reason: str | None) -> None:
    found = reason_in(log)
    assert "\n" not in found and "^^^" not in found and len(found) <= WORDS_MAX + 3
    assert "error" in found.lower() or reason is not None
    if reason is not None:
        assert found == reason.removeprefix("error: ")
