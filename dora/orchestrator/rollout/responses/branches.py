"""The branches of a finished session, as trainers get them.

A *branch* is the path of a turn that no later turn has continued whole. Each sampled token counts for the loss in one
branch, the first that has it: those that branches share lie before ``shared_prefix_tokens`` of the later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from dora.data.token_spans import Column
from dora.data.trajectory import Trajectory
from dora.data.types import INPUT, Arrival, EnvironmentEvent, SamplingParams, Segment
from dora.orchestrator.rollout.responses.routed_paths import Rows
from dora.orchestrator.rollout.responses.session_paths import InputRun, places, runs_on
from dora.orchestrator.rollout.responses.state import ResponseState, readers

Value = TypeVar("Value")


def trajectories(response: ResponseState, step: int, reference_version: int, group_size: int) -> Iterator[Trajectory]:
    """Yields a finished response as the trainer of ``step`` gets it, one trajectory for each branch. ``group_size``
    counts the delivered members of its group.
    """
    read = readers(step, reference_version, group_size)
    if not response.is_session:
        yield Trajectory(**{name: reader(response) for name, reader in read.items()})
        return
    is_sampled, is_shared, index = _sampled(response), np.zeros(response.buffered_tokens, np.bool_), 0
    rows = Rows(response)
    for turn in leaves(response):
        path = places(response.inputs, turn, response.turn_end(turn))
        mask = is_sampled[path] & ~is_shared[path]
        if not mask.any():  # nothing was sampled in its turn
            continue
        own = _values(response, turn, path, is_sampled[path]) | {
            "trajectory_id": f"{response.request_id}/{index}" if index else response.request_id,
            "loss_mask": mask.astype(np.uint8),
            "turn_rewards": _by_place(response.verdict().turns, response, path, mask),
            "turn_sampling": _by_place(_samplings(response), response, path, mask),
            "branch_index": index,
            "shared_prefix_tokens": int(is_shared[path].sum()),  # branches share a prefix, and nothing else
            "routed_experts": rows.on(turn, path),
        }
        yield Trajectory(**{name: own[name] if name in own else reader(response) for name, reader in read.items()})
        is_shared[path] = True
        index += 1


def _sampled(response: ResponseState) -> Column:
    found: Column = np.ones(response.buffered_tokens, np.bool_)
    for run in response.inputs:
        found[run.buffer_begin : run.buffer_end] = False
    return found


def leaves(response: ResponseState) -> list[int]:
    """Returns the turns that no later turn has continued whole, in order."""
    continued = {
        run.after_turn
        for run in response.inputs
        if not run.is_prompt and run.first_token == response.path_tokens(run.after_turn)
    }
    return [turn for turn in range(len(response.inputs) + 1) if turn not in continued]


def _values(response: ResponseState, turn: int, path: Column, is_sampled: Column) -> dict[str, Any]:
    """Returns the values of a turn's own branch. ``is_sampled`` has a bool for each token of ``path``."""
    buffered = response.buffered()[path]
    finish_reason, _ = response.end_of(turn)
    runs = runs_on(response.inputs, turn)
    return {
        "prompt_token_ids": response.prompt_ids(turn),
        "response_token_ids": buffered["token_id"],
        "logprobs": buffered["logprob"],
        "sampling": response.branch_sampling(turn),
        "finish_reason": finish_reason,
        "stop_reason": response.stop_reason(turn),
        "finished_at": response.inputs[turn].at if turn < len(response.inputs) else response.finished_at,
        "worker_history": tuple(_segments(response, path, is_sampled)),
        "length_tokens": len(path),
        "events": tuple(_events(runs)),
    }


def _events(runs: Sequence[InputRun]) -> Iterator[EnvironmentEvent]:
    """Yields the environment's turns on a path. A run that the next one follows at once has begun no turn of it."""
    for run, after in zip_longest(runs, runs[1:]):
        if run.is_prompt or after is None or after.first_token > run.end:
            yield EnvironmentEvent(run.end, INPUT, run.name, "", run.at)


def _samplings(response: ResponseState) -> dict[int, SamplingParams]:
    return {turn: response.turn_sampling(turn) for turn, run in enumerate(response.inputs, start=1) if run.sampling}


def _by_place(by_turn: Mapping[int, Value], response: ResponseState, path: Column, mask: Column) -> dict[str, Value]:
    """Returns the values of turns whose first sampled token counts in this branch. ``mask`` is its loss mask."""
    return {
        str(position): value
        for turn, value in by_turn.items()
        for position in np.flatnonzero(mask & (path == response.turn_begin(turn))).tolist()
    }


def _segments(response: ResponseState, path: Column, is_sampled: Column) -> Iterator[Segment]:
    """Yields the segments of a path of indexes among all tokens. Environment tokens belong to the segment before."""
    segments, sampled = response.worker_history(), np.flatnonzero(is_sampled)
    before = np.searchsorted(sampled, np.arange(len(path)), "right") - 1
    source = path[sampled[np.maximum(before, 0)]]
    of_token = np.searchsorted([each.first_token for each in segments], source, "right") - 1
    begins = np.flatnonzero(np.diff(of_token, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(path)], strict=True):
        segment = segments[int(of_token[begin])]
        arrival: Arrival = "new" if not begin else "re-prefilled" if segment.arrival == "new" else segment.arrival
        yield Segment(segment.worker_id, begin, end - 1, arrival, segment.version)
