import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, PreTrainedModel

from dora.errors import Conflict, InvalidValue
from dora.models import check_parallel, default_cache, experts, resolve_model
from dora.models.checkpoint_names import to_checkpoint
from dora.models.prepared import prepare_once
from dora.models.tiny import make_tiny
from dora.models.tiny_vocabulary import CLASSES, VOCABULARY
from tests.refusals import refused


def load(folder: Path) -> PreTrainedModel:
    """The model as transformers reads it; nothing missing, nothing left over."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_tiny_model_round_trips_through_its_checkpoint(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"tiny_{kind}")
    model = load(folder)
    saved = load_file(folder / "model.safetensors")
    again = to_checkpoint(model.state_dict(), json.loads((folder / "config.json").read_text()))
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) and saved[name].dtype == torch.float32 for name in saved)
    assert ("lm_head.weight" in saved) == (kind == "moe")  # the dense one is tied


def test_a_config_tells_a_mixture_of_experts(tiny_dense: Path, tiny_moe: Path, tmp_path: Path) -> None:
    assert (experts(tiny_dense), experts(tiny_moe)) == (None, (8, 2))
    for config, expected in (
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"n_routed_experts": 512, "moe_topk": 12}, (512, 12)),
        ({"text_config": {"num_experts": 128, "num_experts_per_tok": 8}}, (128, 8)),
        ({"num_experts": 1, "num_experts_per_tok": 1}, None),
        ({"num_experts": None}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert experts(tmp_path) == expected
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8}))
    with refused(InvalidValue, value=0, names=("num_experts_per_tok", "1", "8")):
        experts(tmp_path)


def test_a_tiny_mixture_has_as_many_experts_as_asked_for(tmp_path: Path) -> None:
    for kind in ("moe", "mla"):
        folder = make_tiny(kind, tmp_path / kind, experts=(16, 4))
        assert experts(folder) == (16, 4)
        load(folder)
    with refused(InvalidValue, field="experts"):
        make_tiny("dense", tmp_path / "dense", experts=(16, 4))


def test_experts_get_one_tensor_per_expert_and_projection(tiny_moe: Path) -> None:
    saved = load_file(tiny_moe / "model.safetensors")
    fused = load(tiny_moe).state_dict()
    gate_up = fused["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(saved["model.layers.1.mlp.experts.5.gate_proj.weight"], gate_up[5, :64])
    assert torch.equal(saved["model.layers.1.mlp.experts.5.up_proj.weight"], gate_up[5, 64:])
    down = fused["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(saved["model.layers.1.mlp.experts.5.down_proj.weight"], down[5])


def test_mixtral_keeps_the_names_of_its_checkpoints(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = to_checkpoint(model.state_dict(), config.to_dict())
    assert ours.keys() == saved.keys() and all(torch.equal(ours[name], saved[name]) for name in saved)


def test_fused_experts_of_an_unknown_family_are_refused() -> None:
    with refused(InvalidValue, field="model_type", value="new_moe", names=("qwen3_moe",)):
        to_checkpoint({"model.layers.0.mlp.experts.down_proj": torch.zeros(2, 4, 4)}, {"model_type": "new_moe"})


def test_a_seed_gives_the_same_bytes_and_leaves_the_global_random_state(tmp_path: Path, tiny_dense: Path) -> None:
    before = torch.get_rng_state()
    same, other = make_tiny("dense", tmp_path / "same"), make_tiny("dense", tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = (tiny_dense / "model.safetensors").read_bytes()
    assert (same / "model.safetensors").read_bytes() == weights != (other / "model.safetensors").read_bytes()


def test_the_distribution_is_neither_flat_nor_a_single_token(tiny_dense: Path) -> None:
    logits = load(tiny_dense)(torch.randint(len(VOCABULARY), (4, 64))).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert 2.0 < entropy.mean() < 4.0  # flat would be 4.16


def test_the_tiny_tokenizer_is_read_by_transformers(tiny_dense: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dense)
    assert len(tokenizer) == len(VOCABULARY) == 64
    ids = tokenizer("DIGITS 1a\n", add_special_tokens=False).input_ids
    assert [VOCABULARY[i] for i in ids] == ["DIGITS", " ", "1", "a", "\n"]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "DIGITS 1a\n"
    config = json.loads((tiny_dense / "config.json").read_text())
    for role in ("pad", "bos", "eos"):
        assert config[f"{role}_token_id"] == getattr(tokenizer, f"{role}_token_id")


def test_no_class_of_the_tiny_task_holds_another_ones_characters_or_a_capital() -> None:
    together = "".join(CLASSES.values())
    assert len(set(together)) == len(together) and together == together.lower()


def test_a_prepared_folder_is_reused_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    calls = []

    def make(empty: Path) -> None:
        calls.append(empty)
        (empty / "file").write_text("content")

    for _ in range(2):
        assert prepare_once(folder, {"recipe": 1}, make) == folder
    assert len(calls) == 1 and (folder / "file").read_text() == "content"
    with refused(Conflict, field="folder"):
        prepare_once(folder, {"recipe": 2}, make)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    full = OSError("disk full")

    def make(empty: Path) -> None:
        (empty / "half").write_text("")
        raise full

    with pytest.raises(OSError) as caught:
        prepare_once(tmp_path / "made", {"recipe": 1}, make)
    assert caught.value is full
    assert not list(tmp_path.iterdir())


def test_several_preparing_at_once_end_with_one_whole_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: make_tiny("dense", tmp_path / "tiny"), range(4)))
    assert set(folders) == {tmp_path / "tiny"} == set(tmp_path.iterdir())


def test_named_models_are_kept_in_the_cache(tmp_path: Path) -> None:
    assert resolve_model("tiny", tmp_path).parent == tmp_path
    assert resolve_model("tiny-moe", tmp_path) == resolve_model("tiny-moe", tmp_path)
    folder = resolve_model("tiny", tmp_path)
    assert resolve_model(str(folder), tmp_path) == folder


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_no_engine_could_load_is_refused(missing: str, tmp_path: Path) -> None:
    folder = make_tiny("dense", tmp_path / "model")
    (folder / missing).unlink()
    with refused(InvalidValue, field="--model") as caught:
        resolve_model(str(folder), tmp_path)
    assert caught.value.value == str(folder)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "dora"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache() == Path.home() / ".cache" / "dora"


@pytest.mark.full
def test_a_process_of_its_own_prepares_a_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dora.models"]
    done = subprocess.run([*command, "tiny", str(tmp_path)], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == resolve_model("tiny", tmp_path)
    refused = subprocess.run([*command, "absent", str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["one of smollm2, tiny, tiny-moe, tiny-hybrid, or a folder with config.json"]


@pytest.mark.e2e
def test_smollm2_answers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    output = load(smollm2).generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert "4" in tokenizer.decode(output) and output[-1] == tokenizer.eos_token_id
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())


def test_ranks_that_do_not_divide_a_model_are_refused_with_what_does(tmp_path: Path) -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tensor, pipeline in ((1, 1), (2, 3), (4, 2), (12, 1)):
        check_parallel(tmp_path, tensor, pipeline)
    with refused(InvalidValue, field="workers.tensor_parallel", value=5, names=("12",)):
        check_parallel(tmp_path, 5, 1)
    with refused(InvalidValue, field="workers.tensor_parallel", value=6, names=("4",)):
        check_parallel(tmp_path, 6, 1)
    with refused(InvalidValue, field="workers.pipeline_parallel", value=4, names=("3",)):
        check_parallel(tmp_path, 1, 4)
