"""Routed experts on their way: rows beside tokens, in reports, book, trajectory and record; and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.config import RolloutConfig, validated
from dora.data.run_record import Recorder
from dora.data.token_spans import TokenColumns, TokenSpan
from dora.data.trajectory import Trajectory
from dora.data.types import Prompt, RequestSpec, Reward, RoutingShape, SamplingParams
from dora.errors import InvalidValue
from dora.models import routing
from dora.models.experts import routing_of
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.invariants import violations
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.responses.branches import trajectories
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ReportError, ResponseState
from dora.orchestrator.rollout.responses.turn_order import TurnLimits, TurnOrder
from dora.orchestrator.setup import required_routing
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import BATCH_BYTES
from dora.rpc.columns import columns_from_wire, columns_to_wire
from dora.rpc.convert import request_to_wire, trajectory_bytes_most, trajectory_from_wire, trajectory_to_wire
from dora.worker.fake.engine import FakeEngine
from tests.contract.trainer_service import make_trajectory
from tests.contract.workers import Worker
from tests.refusals import data_words, refused
from tests.turn_orders import order

SHAPE = RoutingShape(layers=3, top_k=2, experts=8)
PROMPT = Prompt("p", "task", (5, 6, 7, 8))
QWEN = {"num_hidden_layers": 6, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"num_hidden_layers": 6, "n_routed_experts": 64, "num_experts_per_tok": 6}


def rows(first: int, end: int) -> bytes:
    """Returns the experts of the tokens at these positions: each names its position, and no two layers are alike."""
    ids = [[(place + layer) % 8, (place + layer + 3) % 8] for place in range(first, end) for layer in range(3)]
    return np.asarray(ids, np.uint8).tobytes()


def delta(first: int, *token_ids: int, routed: bytes | None = None, end: bool = False) -> TokenColumns:
    """Tokens with the rows of what was fed to sample them."""
    begin = 0 if first == 0 else 4 + first - 1
    found = rows(begin, 4 + first + len(token_ids) - 1) if routed is None else routed
    stretch = TokenSpan(0, first, token_ids, (-0.5,) * len(token_ids), "stop" if end else None, "", found)
    return columns_from_wire(columns_to_wire([stretch]))


@pytest.fixture
def buffer() -> ResponseBuffer:
    made = ResponseBuffer(RolloutConfig(), SHAPE)
    made.admit("g", PROMPT, 0, {"r": 0}, 0.0)
    return made


@pytest.fixture
def entry(buffer: ResponseBuffer) -> ResponseState:
    return buffer["r"]


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({**QWEN}, RoutingShape(6, 8, 128)),
        ({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, RoutingShape(2, 8, 128)),
        ({**DEEPSEEK, "first_k_dense_replace": 1, "moe_layer_freq": 1}, RoutingShape(5, 6, 64)),
        ({**DEEPSEEK, "first_k_dense_replace": 1, "moe_layer_freq": 2}, RoutingShape(2, 6, 64)),
        ({**QWEN, "moe_layer_freq": [0, 1, 1, 0, 1, 1]}, RoutingShape(4, 8, 128)),
        ({**QWEN, "moe_layers": [1, 3, 5]}, RoutingShape(3, 8, 128)),
        ({"text_config": QWEN}, RoutingShape(6, 8, 128)),
        ({"num_hidden_layers": 6}, None),
    ],
)
def test_a_config_says_which_layers_have_experts(config: dict[str, Any], shape: RoutingShape | None) -> None:
    assert routing_of(config, "config.json") == shape


def test_a_row_takes_a_byte_an_expert_and_two_where_there_are_many() -> None:
    assert RoutingShape(48, 8, 256).token_bytes == 48 * 8
    assert RoutingShape(48, 8, 257).token_bytes == 48 * 8 * 2
    assert [RoutingShape.rows(4, tokens) for tokens in (0, 1, 2)] == [0, 4, 5], "the last token was never fed"


def test_router_replay_is_refused_of_a_dense_model_and_off_by_default(tiny_dense: Path, tiny_moe: Path) -> None:
    wanted = validated({"workers": {"router_replay": True}})
    assert required_routing(validated({}), tiny_dense) is None
    assert required_routing(wanted, tiny_moe) == RoutingShape(2, 2, 8)
    for ask in (
        lambda: required_routing(wanted, tiny_dense),
        lambda: FakeEngine(model=tiny_dense, router_replay=True),
    ):
        with refused(InvalidValue, field="workers.router_replay", value=True):
            ask()


def test_the_book_keeps_rows_as_they_were_first_told(buffer: ResponseBuffer, entry: ResponseState) -> None:
    """Tokens that are repeated after a re-prefill are skipped, with whatever other experts they name."""
    for told in (delta(0, 10, 11), delta(2, 12), delta(1, 11, 12, 13)):
        buffer.accept("w0", 0, told, 1.0)
    again = delta(0, 10, 11, 12, 13, 14, routed=rows(1, 8) + rows(7, 8), end=True)
    buffer.accept("w1", 0, again, 1.0)
    entry.reward = Reward(1.0)
    (trajectory,) = trajectories(entry, 0, 0, 1)
    assert trajectory.response_token_ids.tolist() == [10, 11, 12, 13, 14]
    assert trajectory.routed_experts is not None and trajectory.routed_experts.dtype == np.uint8
    assert trajectory.routed_experts.shape == (4 + 5 - 1, 3, 2)
    assert trajectory.routed_experts.tobytes() == rows(0, 8)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (delta(0, 10, routed=b""), "routed_experts bytes = 0 .*24"),
        (delta(0, 10, routed=rows(0, 5)), "routed_experts bytes = 30 .*24"),
        (delta(0, 10, 11, routed=rows(0, 6)), "routed_experts bytes = 36 .*30"),
        (delta(0, 10, routed=rows(0, 3) + bytes([0, 8, 1, 2, 3, 4])), "routed_experts = 8 .*0 to 7"),
        (delta(0, 10, routed=bytes(24)), "an expert twice"),
    ],
)
def test_rows_that_cannot_be_are_refused(buffer: ResponseBuffer, told: TokenColumns, reason: str) -> None:
    with refused(ReportError, names=data_words(reason)):
        buffer.accept("w0", 0, told, 1.0)


def test_a_turn_needs_rows_of_its_given_tokens_and_of_the_one_before(buffer: ResponseBuffer) -> None:
    (session,) = buffer.admit("s", replace(PROMPT, environment="tool"), 0, {"s": 1}, 0.0)
    for first, routed in ((0, rows(0, 4)), (3, rows(4, 7))):
        if first:
            buffer.give(order(session, [5, 6], 9, "tool"), 0.0)
        told = columns_from_wire(columns_to_wire([TokenSpan(1, first, (10,), (-0.5,), "stop", "", routed)]))
        for wrong in (routed[6:], routed + routed[:6]):
            with refused(ReportError, field="s: routed_experts bytes", value=len(wrong), names=(str(len(routed)),)):
                buffer.accept("w0", 0, replace(told, routed_bytes=np.array([len(wrong)]), routed_experts=wrong), 1.0)
        buffer.accept("w0", 0, told, 1.0)
    assert session.routed == rows(0, 7)


def test_rows_that_nobody_asked_for_are_refused() -> None:
    buffer = ResponseBuffer(RolloutConfig())
    buffer.admit("g", PROMPT, 0, {"r": 0}, 0.0)
    with refused(ReportError, field="r: routed_experts bytes", value=24):
        buffer.accept("w0", 0, delta(0, 10), 1.0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_survive_the_wire_and_the_record(tmp_path: Path, dtype: type[np.generic]) -> None:
    found = np.arange(2 * 4 * 3).reshape(4, 3, 2).astype(dtype) * 9
    trajectory = make_trajectory(0, 0, 0, routed_experts=found)
    found[:] = 0
    assert trajectory.routed_experts is not None and trajectory.routed_experts[3, 2, 1] == 23 * 9, "it has its own"
    message = pb.Trajectory.FromString(trajectory_to_wire(trajectory).SerializeToString())
    with Recorder(tmp_path) as recorder:
        recorder.append([trajectory])
    (recorded,) = read_trajectories(tmp_path / "trajectories.jsonl")
    for again in (trajectory_from_wire(message), recorded):
        assert again.routed_experts is not None and again.routed_experts.dtype == dtype
        assert again.routed_experts.tolist() == trajectory.routed_experts.tolist()
        again.routed_experts[0] = 0  # writable


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((5, 3, 2), np.uint8),
        np.zeros((3, 3, 2), np.uint8),
        np.zeros((4, 6), np.uint8),
        np.zeros((4, 3, 2), np.int64),
    ],
)
def test_a_trajectory_has_a_row_for_each_token_that_was_fed(wrong: Any) -> None:
    with refused(InvalidValue, field="trajectory s0-g0-0: routed_experts", names=("uint8", "uint16", "4", "top_k")):
        make_trajectory(0, 0, 0, routed_experts=wrong)


def test_a_row_may_lack_of_what_no_loss_needs() -> None:
    """Of environment tokens after which a session was broken off, none was fed."""
    values: dict[str, Any] = {"response_token_ids": [1, 2, 3, 4], "logprobs": [0.0] * 4, "length_tokens": 4}
    for mask, least in (([1, 1, 0, 0], 3), ([1, 0, 1, 0], 4), ([0, 0, 0, 0], 0)):
        for rows in range(least, 6):
            found = np.ones((rows, 3, 2), np.uint8)
            made = make_trajectory(0, 0, 0, loss_mask=mask, prompt_token_ids=[5, 6], routed_experts=found, **values)
            assert made.routed_experts is not None and len(made.routed_experts) == rows
        for rows in (least - 1, 6) if least else (6,):
            found = np.ones((rows, 3, 2), np.uint8)
            with refused(InvalidValue, field="trajectory s0-g0-0: routed_experts", names=(str(least), "5")):
                make_trajectory(0, 0, 0, loss_mask=mask, prompt_token_ids=[5, 6], routed_experts=found, **values)


def test_a_turn_whose_rows_fit_into_no_message_is_refused() -> None:
    config = validated({"service": {"max_message_bytes": 1 << 20}, "workers": {"max_model_len_tokens": 4096}})
    asked = pb.TurnRequest(given_token_ids=np.arange(2000, dtype="<i4").tobytes(), max_tokens=1000)
    for shape in (None, RoutingShape(layers=48, top_k=8, experts=128)):
        buffer = ResponseBuffer(config.rollout, shape)
        (session,) = buffer.admit("g", replace(PROMPT, environment="tool"), 0, {"r": 0}, 0.0)
        limits = TurnLimits.of(config, 0, buffer.sampling)
        if shape is None:
            assert TurnOrder.parse(asked, session, limits).max_tokens == 1000
            continue
        with refused(InvalidValue, field="given_token_ids", names=("service.max_message_bytes", "1048576")):
            TurnOrder.parse(asked, session, limits)


def test_a_damaged_record_or_message_is_refused() -> None:
    trajectory = make_trajectory(0, 0, 0, routed_experts=np.ones((4, 3, 2), np.uint8))
    record = trajectory.to_json_dict()
    for change in ({"base64": "*"}, {"base64": "AAA="}, {"layers": 0}, {"id_bytes": 3}):
        with refused(InvalidValue, names=("routed_experts",)):
            Trajectory.from_json_dict({**record, "routed_experts": {**record["routed_experts"], **change}})
    message = trajectory_to_wire(trajectory)
    message.routed_experts.top_k = 5
    with refused(InvalidValue, field="routed_experts: bytes", value=24):
        trajectory_from_wire(message)


def test_a_record_is_verified_for_its_rows() -> None:
    sound = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    twice = sound.copy()
    twice[2, 0] = 5
    group = [make_trajectory(0, 0, 0, group_size=1, routed_experts=sound)]
    assert not list(violations(group))
    other = make_trajectory(0, 1, 0, group_size=1, routed_experts=twice)
    assert list(violations([*group, other])) == [
        "trajectory s0-g1-0: the token at position 2 was sent to [5, 5] in layer 0, one of them twice."
    ]
    bare = make_trajectory(0, 2, 0, group_size=1)
    (found,) = violations([*group, bare])
    assert "1 with (1, 2), 1 with none" in found


def test_a_prompt_whose_rows_fit_into_no_message_is_refused() -> None:
    config = validated({"service": {"max_message_bytes": 1 << 20}, "workers": {"max_model_len_tokens": 4096}})
    wide = RoutingShape(layers=48, top_k=8, experts=128)
    prompt = Prompt("p", "task", tuple(range(1, 1000)), sampling={"max_tokens": 3000})
    PromptCheck(config).checked(prompt)
    with refused(
        InvalidValue,
        field="prompt p: sampling.max_tokens",
        value=3000,
        names=("service.max_message_bytes", "1048576", "6"),
    ):
        PromptCheck(config, routing=wide).checked(prompt)
    most = trajectory_bytes_most(2, 3, SHAPE)
    assert trajectory_to_wire(make_trajectory(0, 0, 0, routed_experts=np.ones((4, 3, 2), np.uint8))).ByteSize() <= most


class _Wide(FakeEngine):
    """Rows of long prompts take some megabytes in all."""

    def __init__(self) -> None:
        super().__init__(slots=8, kv_tokens=32768, max_model_len_tokens=2048, router_replay=True)
        self._turns._routed = RoutingShape(layers=64, top_k=8, experts=16)


def test_reports_are_cut_before_they_are_too_large(tiny_dense: Path) -> None:
    worker = Worker(None, tiny_dense, engine=_Wide())
    sizes: list[int] = []
    hear = worker._hear

    def sized(message: pb.WorkerMessage) -> None:
        sizes.append(message.ByteSize())
        hear(message)

    worker._hear = sized  # type: ignore[method-assign]
    worker.engine.load_weights(1, tiny_dense, None)
    prompt_tokens = 500
    for index in range(5):
        prompt = tuple(3 + (index + place) % 50 for place in range(prompt_tokens))
        request = RequestSpec(f"r{index}", 1, prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        worker.order(start_request=request_to_wire(request))
    for index in range(5):
        worker.finish(f"r{index}")
        assert len(worker.routed[f"r{index}"]) == (prompt_tokens + 1) * 64 * 8
    assert max(sizes) <= BATCH_BYTES and sum(sizes) > 2 * BATCH_BYTES


def test_a_model_of_experts_says_its_shape(tiny_moe: Path) -> None:
    assert routing(tiny_moe) == RoutingShape(layers=2, top_k=2, experts=8)
