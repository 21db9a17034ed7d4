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
from dora.data.types import GIVEN, Arrival, EnvironmentEvent, SamplingParams, Segment
from dora.orchestrator.rollout.responses.routed_paths import Rows
from dora.orchestrator.rollout.responses.session_paths import GivenRun, places, runs_on
from dora.orchestrator.rollout.responses.state import ResponseState, readers

Value = TypeVar("Value")


def trajectories(entry: ResponseState, step: int, reference_version: int, group_size: int) -> Iterator[Trajectory]:
    """Yields a finished response as the trainer of ``step`` gets it: one trajectory, or one for each branch.
    ``group_size``: delivered members of its group.
    """
    read = readers(step, reference_version, group_size)
    if not entry.is_session:
        yield Trajectory(**{name: reader(entry) for name, reader in read.items()})
        return
    is_sampled, is_shared, index = _sampled(entry), np.zeros(entry.held_tokens, np.bool_), 0
    rows = Rows(entry)
    for turn in leaves(entry):
        path = places(entry.given, turn, entry.turn_end(turn))
        mask = is_sampled[path] & ~is_shared[path]
        if not mask.any():  # nothing was sampled in its turn
            continue
        own = _values(entry, turn, path, is_sampled[path]) | {
            "trajectory_id": f"{entry.request_id}/{index}" if index else entry.request_id,
            "loss_mask": mask.astype(np.uint8),
            "turn_rewards": _by_place(entry.verdict().turns, entry, path, mask),
            "turn_sampling": _by_place(_samplings(entry), entry, path, mask),
            "branch_index": index,
            "shared_prefix_tokens": int(is_shared[path].sum()),  # branches share a prefix, and nothing else
            "routed_experts": rows.on(turn, path),
        }
        yield Trajectory(**{name: own[name] if name in own else reader(entry) for name, reader in read.items()})
        is_shared[path] = True
        index += 1


def _sampled(entry: ResponseState) -> Column:
    """Marks the sampled tokens among all; bool."""
    found: Column = np.ones(entry.held_tokens, np.bool_)
    for run in entry.given:
        found[run.held_at : run.held_end] = False
    return found


def leaves(entry: ResponseState) -> list[int]:
    """Returns the turns that no later turn has continued whole, in order."""
    continued = {
        run.after_turn
        for run in entry.given
        if not run.is_prompt and run.first_token == entry.path_tokens(run.after_turn)
    }
    return [turn for turn in range(len(entry.given) + 1) if turn not in continued]


def _values(entry: ResponseState, turn: int, path: Column, is_sampled: Column) -> dict[str, Any]:
    """The values that the branch of a turn has of its own. ``is_sampled``: of ``path``; bool."""
    held = entry.held()[path]
    finish_reason, _ = entry.end_of(turn)
    runs = runs_on(entry.given, turn)
    return {
        "prompt_token_ids": entry.prompt_ids(turn),
        "response_token_ids": held["token_id"],
        "logprobs": held["logprob"],
        "sampling": entry.branch_sampling(turn),
        "finish_reason": finish_reason,
        "stop_reason": entry.stop_reason(turn),
        "finished_at": entry.given[turn].at if turn < len(entry.given) else entry.finished_at,
        "worker_history": tuple(_segments(entry, path, is_sampled)),
        "length_tokens": len(path),
        "events": tuple(_events(runs)),
    }


def _events(runs: Sequence[GivenRun]) -> Iterator[EnvironmentEvent]:
    """Yields the environment's turns on a path. A run that the next one follows at once has begun no turn of it."""
    for run, after in zip_longest(runs, runs[1:]):
        if run.is_prompt or after is None or after.first_token > run.end:
            yield EnvironmentEvent(run.end, GIVEN, run.name, "", run.at)


def _samplings(entry: ResponseState) -> dict[int, SamplingParams]:
    """The sampling of the turns that were asked with parameters of their own."""
    return {turn: entry.turn_sampling(turn) for turn, run in enumerate(entry.given, start=1) if run.sampling}


def _by_place(by_turn: Mapping[int, Value], entry: ResponseState, path: Column, mask: Column) -> dict[str, Value]:
    """The values of those turns whose first sampled token counts in this branch. ``mask``: its loss mask; bool."""
    return {
        str(position): value
        for turn, value in by_turn.items()
        for position in np.flatnonzero(mask & (path == entry.turn_begin(turn))).tolist()
    }


def _segments(entry: ResponseState, path: Column, is_sampled: Column) -> Iterator[Segment]:
    """Yields the segments of a path. ``path``: indexes among all tokens. Given tokens belong to the segment before."""
    segments, sampled = entry.worker_history(), np.flatnonzero(is_sampled)
    before = np.searchsorted(sampled, np.arange(len(path)), "right") - 1
    source = path[sampled[np.maximum(before, 0)]]
    of_token = np.searchsorted([each.first_token for each in segments], source, "right") - 1
    begins = np.flatnonzero(np.diff(of_token, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(path)], strict=True):
        segment = segments[int(of_token[begin])]
        arrival: Arrival = "new" if not begin else "re-prefilled" if segment.arrival == "new" else segment.arrival
        yield Segment(segment.worker_id, begin, end - 1, arrival, segment.version)
