"""A recorded response as a conversation: its branches, and who gave the tokens of each turn."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from dora.data.record_content import TRAJECTORIES_FILE
from dora.data.trajectory import BoolArray, Trajectory
from dora.data.types import EnvironmentEvent
from dora.errors import InvalidValue, NotFound
from dora.system.line_file import whole_lines

SAMPLED: Final = "sampled"
INPUT: Final = "given"
PROMPT: Final = "prompt"
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TurnShown:
    """A run of tokens of one speaker."""

    speaker: Annotated[str, "`prompt`, `sampled` by the policy, or `given` by the environment"]
    name: Annotated[str, "what gave the tokens, such as a tool; empty: not known, or the policy"]
    turn: Annotated[int | None, "number of a sampled turn in its branch, from 0; null for given tokens"]
    first_token: Annotated[int, "index of its first token in the response; 0 for a prompt"]
    after_s: Annotated[float | None, "when the tokens were given, in seconds after the admission; null: not known"]
    reward: Annotated[float | None, "the turn's own; null: it has none, or an earlier branch has it"]
    workers: Annotated[tuple[str, ...], "workers that sampled it, in order"]
    sampling: Annotated[dict[str, object], "the turn's own sampling parameters that are not the session's"]
    token_ids: Annotated[tuple[int, ...], "its tokens"]
    text: Annotated[str | None, "the same as text, with special tokens; null without a tokenizer"]


@dataclass(frozen=True, slots=True)
class BranchShown:
    """One trajectory of a session."""

    trajectory_id: Annotated[str, "its id"]
    branch_index: Annotated[int, "0, or more for a session that forked"]
    shared_prefix_tokens: Annotated[int, "response tokens that an earlier branch has too"]
    length_tokens: Annotated[int, "response tokens, given ones included"]
    finish_reason: Annotated[str, "`stop` or `length`, of its last turn"]
    finished_s: Annotated[float, "time from the admission to its last token"]
    worker_history: Annotated[tuple[dict[str, object], ...], "its segments, with worker, tokens, arrival and version"]
    turns: Annotated[tuple[TurnShown, ...], "the prompt, then sampled and environment tokens in order"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole session. A single answer has one branch with a prompt and a sampled turn."""

    session_id: Annotated[str, "the session: the id of its first trajectory"]
    group_id: Annotated[str, "the prompt group"]
    prompt_id: Annotated[str, "the prompt"]
    task_id: Annotated[str, "the prompt's task"]
    version: Annotated[int, "the policy version that sampled every token"]
    trained_step: Annotated[int, "the step that trained on it"]
    staleness: Annotated[int, "trained_step - version"]
    reward: Annotated[float, "the session's reward; null if there was no number"]
    reward_valid: Annotated[bool, "false: it was not trained on"]
    reward_components: Annotated[dict[str, float], "parts of the reward, by name"]
    verdict: Annotated[str, "the remarks of the environment or reward function"]
    started_at: Annotated[float, "when its group was admitted, in seconds since the Unix epoch"]
    branches: Annotated[tuple[BranchShown, ...], "its trajectories, in order"]


def find_session(record: Path, trajectory_id: str) -> list[Trajectory]:
    """Returns a recorded trajectory's session: its branches in order. Raises NotFound; InvalidValue if not a record."""
    session = session_of(trajectory_id)
    begins = (_line_begin(session) + b'"', _line_begin(session) + b"/")
    siblings = _line_begin(session.rpartition(".")[0] or session) + b"."  # of its group
    found: list[Trajectory] = []
    others: list[bytes] = []
    for line in whole_lines(_file_of(record)):
        if line.startswith(begins):
            found.append(_parsed(line))
        elif not found and (len(others) < _OTHERS_MAX or line.startswith(siblings)):
            others = [line, *others[: _OTHERS_MAX - 1]] if line.startswith(siblings) else [*others, line]
    if not found:
        known = ", ".join(sorted(map(_id_of, others)))
        raise NotFound("--show", trajectory_id, f"a trajectory of {record}, such as {known or 'none: it is empty'}")
    return sorted(found, key=lambda each: each.branch_index)


def conversation_of(branches: Sequence[Trajectory], decode: Decode | None) -> Conversation:
    """Returns the session of ``branches``, without texts if ``decode`` is None."""
    first = branches[0]
    sampled: list[BoolArray] = []
    for branch in branches:
        sampled.append(_sampled(branch, list(zip(branches, sampled, strict=False))))
    return Conversation(
        session_id=session_of(first.trajectory_id),
        group_id=first.group_id,
        prompt_id=first.prompt_id,
        task_id=first.task_id,
        version=first.behaviour_version,
        trained_step=first.trained_step,
        staleness=first.staleness,
        reward=first.reward,
        reward_valid=first.reward_valid,
        reward_components=dict(first.reward_components),
        verdict=first.verifier_log,
        started_at=first.started_at,
        branches=tuple(_branch(each, mask, decode) for each, mask in zip(branches, sampled, strict=True)),
    )


def session_of(trajectory_id: str) -> str:
    return trajectory_id.partition("/")[0]


_OTHERS_MAX: Final = 8  # ids that a refusal names


def _file_of(record: Path) -> Path:
    file = record / TRAJECTORIES_FILE
    if not file.is_file():
        raise InvalidValue("--record", str(record), f"a folder with {TRAJECTORIES_FILE}, as `--record DIR` writes it")
    return file


def _line_begin(session_id: str) -> bytes:
    return b'{"trajectory_id": ' + json.dumps(session_id).encode()[:-1]


def _id_of(line: bytes) -> str:
    try:
        return str(json.loads(line)["trajectory_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(TRAJECTORIES_FILE, line[:80], "a trajectory record in each line") from error


def _parsed(line: bytes) -> Trajectory:
    try:
        return Trajectory.from_json_dict(json.loads(line))
    except ValueError as error:
        raise InvalidValue(TRAJECTORIES_FILE, line[:80], "a trajectory record in each line") from error


def _sampled(branch: Trajectory, earlier: Sequence[tuple[Trajectory, BoolArray]]) -> BoolArray:
    """Marks the tokens that the policy sampled. The loss mask of a shared prefix is 0 throughout, so an earlier branch
    says which of its tokens were sampled.
    """
    mask = branch.loss_mask.astype(np.bool_)
    shared = branch.shared_prefix_tokens
    for other, sampled in earlier if shared else ():
        same_prompt = np.array_equal(other.prompt_token_ids, branch.prompt_token_ids)
        if same_prompt and np.array_equal(other.response_token_ids[:shared], branch.response_token_ids[:shared]):
            mask[:shared] = sampled[:shared]
            break
    return mask


def _branch(branch: Trajectory, is_sampled: BoolArray, decode: Decode | None) -> BranchShown:
    return BranchShown(
        trajectory_id=branch.trajectory_id,
        branch_index=branch.branch_index,
        shared_prefix_tokens=branch.shared_prefix_tokens,
        length_tokens=branch.length_tokens,
        finish_reason=branch.finish_reason,
        finished_s=branch.finished_at - branch.started_at,
        worker_history=tuple(segment._asdict() for segment in branch.worker_history),
        turns=tuple(_turns(branch, is_sampled, decode)),
    )


def _turns(branch: Trajectory, is_sampled: BoolArray, decode: Decode | None) -> Iterator[TurnShown]:
    response = branch.response_token_ids.tolist()

    def shown(
        speaker: str, begin: int, token_ids: list[int], event: EnvironmentEvent | None = None, turn: int | None = None
    ) -> TurnShown:
        reward = branch.turn_rewards.get(str(begin)) if speaker == SAMPLED else None
        return TurnShown(
            speaker=speaker,
            name="" if event is None else event.name,
            turn=turn,
            first_token=begin,
            after_s=None if event is None else event.at - branch.started_at,
            reward=reward,
            workers=_workers(branch, begin, begin + len(token_ids)) if speaker == SAMPLED else (),
            sampling=_own_sampling(branch, begin) if speaker == SAMPLED else {},
            token_ids=tuple(token_ids),
            text=None if decode is None else decode(token_ids),
        )

    events = list(branch.events)
    of_prompt = events.pop(0) if events and not events[0].position_token else None
    yield shown(PROMPT, 0, branch.prompt_token_ids.tolist(), of_prompt)
    place, turn = 0, 0
    for event in events:
        begin = end = event.position_token
        while begin > place and not is_sampled[begin - 1]:
            begin -= 1
        if begin > place:
            yield shown(SAMPLED, place, response[place:begin], turn=turn)
            turn += 1
        yield shown(INPUT, begin, response[begin:end], event)
        place = end
    last = max(np.flatnonzero(is_sampled).tolist(), default=-1) + 1
    if last > place:
        yield shown(SAMPLED, place, response[place:last], turn=turn)
    if len(response) > max(last, place):
        yield shown(INPUT, max(last, place), response[max(last, place) :])


def _own_sampling(branch: Trajectory, begin: int) -> dict[str, object]:
    usual = asdict(branch.sampling)
    own = asdict(branch.turn_sampling.get(str(begin), branch.sampling))
    return {name: value for name, value in own.items() if value != usual[name]}


def _workers(branch: Trajectory, begin: int, end: int) -> tuple[str, ...]:
    held = (each.worker_id for each in branch.worker_history if each.first_token < end and each.last_token >= begin)
    return tuple(dict.fromkeys(held))
