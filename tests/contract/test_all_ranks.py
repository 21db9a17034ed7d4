"""Weights that are cut over two ranks are published by both together, and are those that one rank would have."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dora.models.tiny import make_tiny
from tests.contract.trainer_service import TOKEN, StartService
from tests.trainer_ranks import ended, start_ranks

GROUPS = 2


def work(address: str, model: str, fault: str) -> int:
    """One of two ranks: a sharded model, changed, committed by rank 0 with the other taking part."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import dora.sync
    from dora.errors import InvalidValue
    from dora.trainers.sharding import shard

    dist.init_process_group("gloo")
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if fault == "misshapen":
        module.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    shard(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    try:
        if dist.get_rank() == 0:
            with dora.sync.Trainer(address, token=TOKEN) as trainer:
                step = next(trainer.steps(groups=GROUPS))
                list(step)
                step.commit(weights=dora.AllRanks(module))
        else:
            dora.AllRanks(module).take_part()
    except InvalidValue as refused:
        print(f"refused: {refused}")
        return 3
    finally:
        dist.destroy_process_group()
    return 0


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full)])
async def test_all_ranks_publish_one_version(start_service: StartService, kind: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = make_tiny(kind, tmp_path / "model")
    service = await start_service(tmp_path / "store", model)
    ranks = await asyncio.to_thread(start_ranks, 2, tmp_path / "ranks", work, service.address, str(model), "")
    codes = await asyncio.to_thread(ended, ranks)
    assert codes == [0, 0], [rank.text() for rank in ranks]
    found = load_file(service.service.store.folder(1) / "model.safetensors")
    expected = load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(bool((found[name] == tensor * 1.5).all()) for name, tensor in expected.items())


async def test_weights_that_do_not_fit_are_told_on_every_rank(start_service: StartService, tmp_path: Path) -> None:
    model = make_tiny("dense", tmp_path / "model")
    service = await start_service(tmp_path / "store", model)
    ranks = await asyncio.to_thread(start_ranks, 2, tmp_path / "ranks", work, service.address, str(model), "misshapen")
    codes = await asyncio.to_thread(ended, ranks)
    texts = [rank.text() for rank in ranks]
    assert codes == [3, 3], texts
    assert "refused: weights: model.norm.weight: shape = [3]" in texts[0]
    assert "accepted by the leading rank" in texts[1]
    assert service.service.store.versions() == (0,)
