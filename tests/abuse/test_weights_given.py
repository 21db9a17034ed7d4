"""Weights as people hand them over: taken as what they are, or refused with the tensor's name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM

from dora.client.modules import is_sharded
from dora.client.publication import place_weights
from dora.errors import InvalidValue
from dora.weights.reference import TensorHeader, read_reference
from tests.refusals import refused

Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> tuple[TensorHeader, ...]:
    return read_reference(tiny).tensors


@pytest.fixture(scope="module")
def tensors(tiny: Path) -> Tensors:
    return dict(load_file(tiny / "model.safetensors"))


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/ranks")
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def check_placed(given: Any, expected: tuple[TensorHeader, ...], tensors: Tensors, folder: Path) -> None:
    place_weights(given, expected, folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


TAKEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view of the negative": lambda tensor: torch._neg_view(-tensor),
    "transposed": lambda tensor: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor,
    "numpy in Fortran's order": lambda tensor: np.asfortranarray(tensor.numpy()),
    "double": lambda tensor: tensor.double(),
}
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "masked": lambda tensor: np.ma.masked_array(tensor.numpy(), mask=True),
    "big-endian": lambda tensor: tensor.numpy().astype(">f4"),
    "objects": lambda tensor: tensor.numpy().astype(object),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "a list": lambda tensor: tensor.tolist(),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_tensor_in_an_odd_form_is_the_same_tensor(
    kind: str, expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    check_placed({name: TAKEN[kind](tensor) for name, tensor in tensors.items()}, expected, tensors, tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_tensor_of_numbers_is_refused_by_name(
    kind: str, expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    with refused(InvalidValue, names=("model.embed_tokens.weight",)):
        place_weights({name: REFUSED[kind](tensor) for name, tensor in tensors.items()}, expected, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_text_is_refused(expected: tuple[TensorHeader, ...], tmp_path: Path) -> None:
    with refused(InvalidValue, field="weights: name of a tensor", value=1):
        place_weights({1: torch.zeros(2)}, expected, tmp_path)  # type: ignore[arg-type]


def test_a_state_dict_has_a_tied_head_twice(
    expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    check_placed(tied, expected, tensors, tmp_path / "tied")
    copied = {name: tensor.numpy().copy() for name, tensor in tied.items()}
    check_placed(copied, expected, tensors, tmp_path / "copied")
    other = {**tied, "lm_head.weight": tied["lm_head.weight"] + 1}
    with refused(InvalidValue, field="weights: lm_head.weight", names=["tie_word_embeddings"]):
        place_weights(other, expected, tmp_path / "other")


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}, SimpleNamespace(a=1), None])
def test_a_module_may_have_any_kind_of_config(
    config: Any, tiny: Path, expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    module.config = config
    check_placed(module, expected, tensors, tmp_path)


def test_a_dtensor_is_taken_where_one_rank_has_all_of_it(
    one_rank: Any, expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    for placement in (Shard(0), Replicate()):
        given = {name: DTensor.from_local(tensor, one_rank, [placement]) for name, tensor in tensors.items()}
        check_placed(given, expected, tensors, tmp_path / type(placement).__name__)


class _Part(torch.nn.Parameter):
    """As a DTensor that is cut over two ranks looks from one of them."""

    device_mesh = SimpleNamespace(size=lambda axis: 2)
    placements = (Shard(0),)

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("this waits for the other rank")


def test_a_dtensor_of_several_ranks_is_refused_before_anybody_waits(
    expected: tuple[TensorHeader, ...], tensors: Tensors, tmp_path: Path
) -> None:
    module = torch.nn.Module()
    module.part = _Part(torch.zeros(2))
    assert is_sharded(module)
    with refused(
        InvalidValue,
        field="weights: model.embed_tokens.weight",
        value="one rank's shard of a DTensor (64, 128)",
        names=("get_model_state_dict",),
    ):
        place_weights({name: _Part(tensor) for name, tensor in tensors.items()}, expected, tmp_path)
