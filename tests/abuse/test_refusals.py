"""Reports of workers that cannot load weights, from which the service tells a bad publication from a bad worker."""

import math
from pathlib import Path

from safetensors.numpy import load_file, save_file

from dora.data.types import Canary
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.worker.fake.engine import FakeEngine
from dora.worker.loop import EngineLoop
from tests.abuse.test_workers import Orders
from tests.contract.workers import anywhere

WRONG = Canary((3, 4, 5), (-1.0, -2.0))


def outcome_of(model: Path, order: pb.LoadVersion, logprob: float | None = None) -> pb.WorkerOutcome:
    """Returns a worker's answer. ``logprob``: of each token of a canary, in place of its engine's."""
    engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=model)
    if logprob is not None:
        engine._score = lambda token_ids: [logprob] * (len(token_ids) - 1)  # type: ignore[method-assign]
    orders = Orders()
    orders.waiting.append(pb.WorkerCommand(command_id=1, load_version=order))
    EngineLoop(engine, orders, pb.Welcome(epoch=1, report_period_ms=20), versions=anywhere).turn()
    return orders.said[-1].outcome


def test_a_worker_tells_what_is_wrong_with_weights_from_what_is_wrong_with_itself(
    tiny_dense: Path, tmp_path: Path
) -> None:
    order = pb.LoadVersion(version=1, name=str(tiny_dense), canary=convert.canary_to_wire(WRONG))
    refused = outcome_of(tiny_dense, order)
    assert refused.error_kind == "weights" and refused.canary_difference > 1e-3
    order.ClearField("canary")
    assert outcome_of(tiny_dense, order).ok
    for logprob in (math.nan, -math.inf, 0.5):  # without a canary, too
        refused = outcome_of(tiny_dense, order, logprob)
        assert refused.error_kind == "weights" and refused.canary_difference == math.inf, logprob
    tensors = load_file(tiny_dense / "model.safetensors")
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, tmp_path / "model.safetensors")
    refused = outcome_of(tiny_dense, pb.LoadVersion(version=1, name=str(tmp_path)))
    assert (refused.error_kind, refused.canary_difference) == ("weights", 0.0)
    unreadable = tmp_path / "unreadable"
    (unreadable / "model.safetensors").mkdir(parents=True)
    (unreadable / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert outcome_of(tiny_dense, pb.LoadVersion(version=1, name=str(unreadable))).error_kind == "refused"
