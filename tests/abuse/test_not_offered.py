"""Structured output and LoRA: refused by name and with the reason, wherever somebody could ask for them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dora.client.publication import place_weights
from dora.config import load_config, validated
from dora.data.sampling import NOT_OFFERED, PARAMETERS
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.models import resolve_model
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc import dora_pb2 as pb
from dora.weights.reference import read_reference
from tests.refusals import data_words, refused

CHECK = PromptCheck(validated({"prompts": "none"}), vocab_size=64)


def test_no_parameter_is_both_offered_and_not() -> None:
    assert NOT_OFFERED.keys().isdisjoint(PARAMETERS)


@pytest.mark.parametrize("value", [None, True, "a+", {"type": "json_object"}, []])
@pytest.mark.parametrize("name", NOT_OFFERED)
def test_sampling_with_a_grammar_or_an_adapter_is_refused_with_the_reason(name: str, value: object) -> None:
    reason = rf"prompt p: sampling\.{name} = .* not offered: .* one of temperature, "
    with refused(InvalidValue, names=data_words(reason)):
        CHECK.checked(Prompt("p", "", (1,), sampling={"max_tokens": 4, name: value}))  # type: ignore[dict-item]
    message = pb.Prompt(prompt_id="p", token_ids=b"\1\0\0\0", sampling_json=json.dumps({name: value}))
    with refused(InvalidValue, names=data_words(reason)):
        CHECK.checked(CHECK.from_wire(message))


@pytest.mark.parametrize("name", ["response_format", "guided_json", "lora_request"])
def test_a_row_and_a_service_that_ask_for_them_are_refused(name: str, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for row in ({"prompt": "a", name: {}}, {"prompt": "a", "sampling": {name: {}}}):
        file.write_text(json.dumps(row))
        with refused(InvalidValue, names=(name,)):
            resolve_prompts(str(file), tokenizer, check=CHECK.well_formed)
    with refused(InvalidValue, value=1, names=data_words(name)):
        load_config(None, [f"rollout.{name}=1"])


def test_a_folder_with_an_adapter_is_no_model(tiny: Path, tmp_path: Path) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    alone.mkdir()
    shutil.copytree(tiny, beside)
    assert resolve_model(str(beside)) == beside
    for folder in (alone, beside):
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        with refused(InvalidValue, field="--model", names=("merge_and_unload",)):
            resolve_model(str(folder))


def test_the_tensors_of_an_adapter_are_no_publication(tiny: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with refused(
        InvalidValue, field="weights: tensor", value="base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    ):
        place_weights({name: np.zeros((8, 64), np.float32)}, read_reference(tiny).tensors, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
