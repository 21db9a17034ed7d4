"""The duration of a training step on a layout."""

import math
from dataclasses import replace

import pytest

from dora.data.hardware import Hardware
from dora.lab.planning.hardware import PREFILL_EFFICIENCY
from dora.lab.planning.layout import Replica
from dora.lab.planning.models import ModelSpec
from dora.lab.planning.pace import LINK_EFFICIENCY, UPDATES, Batch, pace
from tests.unit.test_layout import EXPERTS, ROUND

BATCH = Batch(tokens=64_000.0, longest_tokens=1000, context_tokens=0.0)
FREE = Hardware("free", 80e9, 1e12, 1e12, math.inf, math.inf)  # sending takes no time
COMPUTE = FREE.flops * PREFILL_EFFICIENCY


def step_s(replica: Replica, data: float, hardware: Hardware = FREE, model: ModelSpec = ROUND) -> float:
    return pace(model, hardware, BATCH, replica).step_s(data)


def test_a_step_computes_every_token_four_times_and_five_where_it_is_recomputed() -> None:
    """Two operations a weight and pass, 64 million in layers and 10 million for the logits."""
    once_s = UPDATES * 64_000 * 2 * 74e6 / COMPUTE
    kept, recomputed = (Replica(2, 1, 1, 1, recompute, 8000) for recompute in (False, True))
    assert step_s(kept, 2) == pytest.approx(4 * once_s / 4)
    assert step_s(recomputed, 2) == pytest.approx(5 * once_s / 4)


def test_a_pipeline_waits_for_as_many_micro_batches_as_it_has_stages_but_one() -> None:
    """Two stages of two layers and the last with the logits: 32 + 10 million weights; 8 micro-batches on each."""
    assert step_s(Replica(1, 2, 1, 1, False, 4000), 2) == pytest.approx(
        UPDATES * (8 + 1) * 4000 * 4 * 2 * 42e6 / COMPUTE
    )


def test_attention_is_two_operations_for_every_value_of_every_token_of_the_context() -> None:
    """10 heads of 100 + 100 values, 4 layers."""
    near, far = (replace(BATCH, context_tokens=tokens) for tokens in (0.0, 500.0))
    replica = Replica(1, 1, 1, 1, False, 8000)
    longer_s = pace(ROUND, FREE, far, replica).step_s(1) - pace(ROUND, FREE, near, replica).step_s(1)
    assert longer_s == pytest.approx(UPDATES * 64_000 * 4 * 4 * 2 * 2000 * 500 / COMPUTE)


def test_no_replica_has_less_than_the_longest_response() -> None:
    replica = Replica(1, 1, 1, 1, False, 1000)
    assert step_s(replica, 64) == pytest.approx(step_s(replica, 1) / 64)
    assert step_s(replica, 128) == step_s(replica, 64)


def test_micro_batches_take_no_less_than_their_launches() -> None:
    one = replace(BATCH, tokens=64.0, longest_tokens=1)
    assert pace(ROUND, FREE, one, Replica(1, 1, 1, 1, False, 1)).step_s(1) == pytest.approx(
        UPDATES * 64 * 4 * 4 * 223e-6
    )


@pytest.mark.parametrize(
    ("model", "replica", "data", "link_bytes", "network_bytes"),
    [
        # 4 layers, each with 4 exchanges of 2 KB a token in 3 passes, of which a rank sends half to the other.
        (ROUND, Replica(2, 1, 1, 1, False, 1000), 1, 64_000 * 4 * 4 * 3 * 2000 / 2, 0),
        # Keys and values, 4 KB a token; backward twice.
        (ROUND, Replica(1, 1, 2, 1, False, 1000), 1, 64_000 * 4 * 4 * 4000 / 2 + 6 * 84e6 / 2, 0),
        # From stage to stage, forward, backward and for logprobs; two stages' 8 replicas are on two nodes.
        (ROUND, Replica(1, 2, 1, 1, False, 1000), 8, 6 * 42e6 * 7 / 8, 9 / 8 * 8000 * 3 * 2000),
        # Gradients and weights, within a node and across.
        (ROUND, Replica(1, 1, 1, 1, False, 1000), 8, 6 * 84e6 * 7 / 8, 0),
        (ROUND, Replica(1, 1, 1, 1, False, 1000), 16, 0, 6 * 84e6 * 15 / 16),
        # Two copies of 2 KB to experts and back, of which 3 in 4 to other ranks; experts on 2 times 4 of them.
        (EXPERTS, Replica(1, 1, 1, 4, False, 1000), 8,
         8000 * 4 * 3 * 2 * 2 * 2000 * 3 / 4 + 6 * (36e6 * 7 / 8 + 12e6 / 2), 0),
    ],
)  # fmt: skip
def test_what_is_sent_is_what_it_is_by_hand(
    model: ModelSpec, replica: Replica, data: int, link_bytes: float, network_bytes: float
) -> None:
    slow = replace(FREE, link_bytes_per_s=1e9, network_bytes_per_s=1e8)
    longer_s = step_s(replica, data, slow, model) - step_s(replica, data, FREE, model)
    assert longer_s == pytest.approx(UPDATES * (link_bytes / 1e9 + network_bytes / 1e8) / LINK_EFFICIENCY)
