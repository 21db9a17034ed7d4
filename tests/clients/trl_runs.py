"""Runs in ``.venv-trl``: ``examples/trl_grpo.py`` for all weights and for an adapter, and what of it can be compared.

Its arguments are a model folder, and the addresses of two services. It writes one JSON object.
"""

import argparse
import copy
import json
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from dora.errors import InvalidValue
from dora.trainers.lora import merged
from examples.trl_grpo import train

SETTINGS = {"groups": 2, "group_size": 2, "rows": 2, "steps": 5, "lr": 1e-3, "cpu": True, "lora": 0}


def merging(folder: str) -> bool:
    """Whether the merged weights are those of peft's own merge, and the base weights stay as they are."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    found = merged(model)
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    assert found.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(found[name], before[name]) for name in found)
    again = merged(model)
    return all(
        torch.allclose(found[name], expected[name], atol=1e-6) and torch.equal(found[name], again[name])
        for name in expected
    )


def refusal_of(folder: str) -> str:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"], use_dora=True)
    )
    try:
        merged(model)
    except InvalidValue as error:
        return error.field
    return ""


def refused(address: str, token: str, **changes: object) -> str:
    """The field of the refusal."""
    try:
        train(argparse.Namespace(address=address, **{**SETTINGS, **changes}), token)
    except InvalidValue as error:
        return error.field
    return ""


def main() -> None:
    folder, full, lora = sys.argv[1:]
    token = os.environ["DORA_TOKEN"]
    found = {
        "merging": merging(folder),
        "refused_adapter": refusal_of(folder),
        "refused": refused(full, token, group_size=4),
        "full": train(argparse.Namespace(address=full, **SETTINGS), token),
        "lora": train(argparse.Namespace(address=lora, **{**SETTINGS, "lora": 4}), token),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
