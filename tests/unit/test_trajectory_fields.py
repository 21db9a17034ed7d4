"""A trajectory's field is declared once: whatever does not follow the declaration is named here."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.config import Config, validated
from dora.data.token_spans import TokenColumns
from dora.data.trajectory import DECLARED, MEANINGS, Trajectory
from dora.data.trajectory_fields import JSON, Packing, PersistedIn, ValueKind
from dora.data.types import Prompt, Reward, RoutingShape
from dora.journal import records
from dora.journal.log import DEFAULT_SIZES
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.recovery.resume import restore_buffer
from dora.orchestrator.recovery.state_folder import state_folder_of
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.branches import trajectories
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import readers
from dora.orchestrator.starting import journal_of
from dora.rpc import convert, packed
from dora.rpc import dora_pb2 as pb

ROUTING = RoutingShape(layers=2, top_k=1, experts=4)
OWN_NAMES = {  # fields of PackedGroup that have no single field of a trajectory
    "seeds": "sampling",
    "segments": "worker_history",
}


def test_every_field_of_a_trajectory_is_declared_and_says_what_it_means() -> None:
    silent = {each.name for each in fields(Trajectory)} - DECLARED.keys() - {"decoder"}
    assert not silent, f"dora/data/trajectory.py: {silent} are not Annotated[type, meaning, Declared(...)]"
    assert all(MEANINGS.values())


def test_the_protobuf_message_has_each_field() -> None:
    message = pb.Trajectory.DESCRIPTOR
    lacking = DECLARED.keys() - {*message.fields_by_name, *message.oneofs_by_name}
    assert not lacking, f"dora.proto: message Trajectory lacks {lacking}: add them, then run make proto"
    undeclared = {each.name for each in message.fields if not each.containing_oneof} - DECLARED.keys()
    assert not undeclared, f"dora/data/trajectory.py declares no {undeclared}, which message Trajectory has"


def test_the_packed_message_has_each_column() -> None:
    columns = {
        each.column or name for name, each in DECLARED.items() if each.packing not in (Packing.TOKENS, Packing.LEFT_OUT)
    }
    named = set(pb.PackedGroup.DESCRIPTOR.fields_by_name)
    assert not columns - named, f"dora.proto: message PackedGroup lacks {columns - named}: add them, run make proto"
    undeclared = named - columns - OWN_NAMES.keys()
    assert not undeclared, f"dora/data/trajectory.py declares no column {undeclared}, which message PackedGroup has"


def test_every_kind_of_value_can_be_written() -> None:
    assert set(JSON) == set(ValueKind), "dora/data/trajectory_fields.py: JSON"
    assert {*convert.FORMS, *convert.OWN_FORMS, *convert.UNCHANGED} == set(ValueKind), "dora/rpc/convert.py: FORMS"
    by_token = {name for name, declared in DECLARED.items() if declared.packing is Packing.TOKENS}
    assert by_token == {"response_token_ids", "logprobs"}, "dora/rpc/packed.py: TOKEN holds no other field"


def test_the_service_computes_each_field() -> None:
    lacking = DECLARED.keys() ^ readers(0, 0, 1).keys()
    assert not lacking, f"dora/orchestrator/rollout/responses/state.py: no value is read for {lacking}"


def configured(state: Path) -> Config:
    return validated(
        {
            "rollout": {"group_size": 2, "stop_token_ids": [12], "reference_version": 1, "seed": 5},
            "service": {"state": str(state)},
        }
    )


def finished(book: ResponseBuffer, journal: Journal) -> None:
    """One group of two responses, of which all that the journal keeps is told to it."""
    prompt = Prompt("p0", "sums", (1, 2, 3), "text", 2)
    entries = book.admit("g0", prompt, 3, {"g0.0": 4, "g0.1": 7}, at=10.5)
    values = records.prompt_values(prompt)
    journal.note(records.Admitted(entries[0].number, "g0", values, 3, 4, 3, 10.5, [4, 7], -1, 1))
    rows, counts = np.array([4, 7]), np.array([2, 3])
    row_bytes = book.routing.token_bytes if book.routing else 0
    routed_bytes = np.array([ROUTING.rows(3, count) * row_bytes for count in counts.tolist()])
    columns = TokenColumns(
        rows,
        np.zeros(2, np.int64),
        counts,
        np.array([1, 2], np.uint8),
        np.array([0, 2]),
        np.arange(11, 16, dtype=np.int32),  # 12 ends the first response
        np.linspace(-1.0, -0.2, 5, dtype=np.float32),
        {},
        np.cumsum(routed_bytes) - routed_bytes,
        routed_bytes,
        memoryview(bytes(np.arange(int(routed_bytes.sum())) % 4)),
    )
    journal.report(book.accept("w1", 3, columns, at=11.5))
    for entry, value in zip(entries, (0.5, 1.5), strict=True):
        entry.reward = Reward(value, {"format": value}, f"it is {value}", True)
        journal.verdict(entry, 12.0)


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    found = {name: getattr(trajectory, name) for name in DECLARED}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


async def test_a_restarted_service_restores_each_field_from_the_log_record_that_keeps_it(tmp_path: Path) -> None:
    kinds = {kind.__name__ for kind in records.KINDS}
    assert {each.persisted for each in DECLARED.values()} - {PersistedIn.NOWHERE} <= kinds
    config = configured(tmp_path)
    book = ResponseBuffer(config.rollout, ROUTING, window_versions=3)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        journal = journal_of(config, state, Storage())
        finished(book, journal)
        await journal.close()
    again = ResponseBuffer(config.rollout, ROUTING)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        restore_buffer(again, list(state.found.groups), state.found.requests, 0)
    before, after = (list(map(values_of, each.deliver("g0", 5)[0].trajectories)) for each in (book, again))
    defaults = {each.name: each.default for each in fields(Trajectory)}
    for name, declared in DECLARED.items():
        if declared.persisted is not PersistedIn.NOWHERE:
            given = [each[name] for each in before]
            assert any(value != defaults[name] for value in given), f"finished() gives {name} its default: lost unseen"
        assert [each[name] for each in after] == [each[name] for each in before], f"{name}: record {declared.persisted}"


@pytest.mark.parametrize("packing", [Packing.SAME, Packing.EACH, Packing.RARE])
def test_packed_columns_hold_what_the_service_reads_of_responses(tmp_path: Path, packing: Packing) -> None:
    config = configured(tmp_path)
    book = ResponseBuffer(config.rollout, window_versions=3)
    finished(book, Journal())
    group, _ = book.deliver("g0", 5)
    assert isinstance(group, packed.PackedGroup)
    entries = [book["g0.0"], book["g0.1"]]
    expected = [values_of(*trajectories(each, 5, config.rollout.reference_version, len(entries))) for each in entries]
    found = list(map(values_of, group.trajectories))
    for name in (name for name, declared in DECLARED.items() if declared.packing is packing):
        assert [each[name] for each in found] == [each[name] for each in expected], name
