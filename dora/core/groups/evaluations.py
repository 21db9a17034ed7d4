"""The bookkeeping of evaluations: their requests and the workers that run these. rules/evaluation.py has the rules."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from dora.core.events import OfferedPrompt
from dora.core.table import Column


@dataclass(slots=True, eq=False)
class EvalRequest:
    """One response of an evaluation. A session is idle between two turns, and no worker has its KV then."""

    row: int  # in the table of requests, where it is empty; reports name the request by it
    request_id: str
    evaluation_id: str
    group_id: str
    offered_tokens: int  # of the prompt that was offered; 0: a session whose first turn brings it
    prompt_tokens: int  # of the present branch
    is_session: bool = False
    tokens: int = 0  # delivered response tokens, with those that an environment gave
    input_tokens: int = 0  # of these: given for the next turn, which no worker has
    worker_id: str = ""  # the worker that runs it
    starting: int = 0  # its StartRequest, until obeyed: earlier reports concern an earlier segment
    finished: bool = False  # its verdict is pending
    scored: bool = False
    attempt: int = 0  # sessions: replacements before it
    spared: int = 0  # sessions: of these, those for the fault of another session
    idle_s: float = 0.0  # sessions: begin of the present or last pause
    began_s: float = 0.0  # sessions: begin of the first turn, moved on by later waits for a slot; 0: it has not begun
    waits_s: float = 0.0  # sessions: begin of the present or last wait for a slot

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.tokens


@dataclass(slots=True, eq=False)
class RunningEvaluation:
    """One running evaluation. ``groups`` has those not fully scored, with their numbers of missing verdicts."""

    evaluation_id: str
    version: int
    share: float  # of each worker's slots and KV; 0: idle slots alone
    requested: int  # groups
    todo: deque[OfferedPrompt]  # not yet begun
    groups: dict[str, int] = field(default_factory=dict)
    placed: int = 0  # requests on workers
    waiting: deque[str] = field(default_factory=deque)  # begun requests without a worker, in order
    idle: dict[str, None] = field(default_factory=dict)  # sessions between two turns
    begun: int = 0  # groups
    done: int = 0  # groups whose responses are all scored
    refused: int = 0  # groups that no engine can take
    hosted_s: float = 0.0  # last time at which a worker hosted its version, or was about to
    claims: str = ""  # the worker that was assigned its version when no other hosted it
    preempted: int = 0  # slots taken back by training


class RunningEvaluations:
    def __init__(self) -> None:
        self.running: dict[str, RunningEvaluation] = {}
        self.requests: dict[str, EvalRequest] = {}  # begun, of groups that are not fully scored
        self.row_of: dict[str, int] = {}  # by their ids
        self.at: dict[int, EvalRequest] = {}  # by their rows
        # worker id -> requests that it runs, the youngest last; no empty entries
        self.placed: dict[str, dict[str, None]] = {}
        self.lent: set[str] = set()  # workers with allotted slots and KV
        self.stirred = False  # an evaluation may be able to begin a request
        self.closed = False  # the service drains
        self._kv_tokens: Counter[str] = Counter()  # worker id -> context of its requests

    def count(self, worker_id: str) -> int:
        return len(self.placed.get(worker_id, ()))

    def kv_tokens(self, worker_id: str) -> int:
        """The KV tokens of these requests, as last reported."""
        return self._kv_tokens[worker_id]

    def longest_context(self, worker_id: str) -> int:
        """The longest context of these requests, in tokens, or 0 if there is none."""
        return max((self.requests[name].context for name in self.placed.get(worker_id, ())), default=0)

    def youngest(self, worker_id: str) -> EvalRequest | None:
        """The last of these requests to arrive, or None if the worker runs none."""
        placed = self.placed.get(worker_id)
        return self.requests[next(reversed(placed))] if placed else None

    def reported(self, worker_id: str, rows: Column) -> Column:
        """Marks the rows whose tokens in this worker's report count; bool (rows,)."""
        found = np.zeros(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist()):
            request = self.at.get(row)
            found[place] = request is not None and request.worker_id == worker_id and not request.starting
        return found

    def begin(self, request: EvalRequest, now_s: float) -> None:
        """Adds a request, which waits for its worker, or for the first turn that its environment asks."""
        self.requests[request.request_id] = self.at[request.row] = request
        self.row_of[request.request_id] = request.row
        if request.prompt_tokens:
            self.queue(request, now_s)
        else:
            self.rest(request, now_s)

    def forget(self, request: EvalRequest) -> None:
        """Removes a request: no worker runs it, and it does not wait."""
        del self.requests[request.request_id], self.at[request.row], self.row_of[request.request_id]

    def grows(self, request: EvalRequest, tokens: int) -> None:
        self._kv_tokens[request.worker_id] += tokens - request.tokens
        request.tokens = tokens

    def give(self, request: EvalRequest, worker_id: str, command_id: int, now_s: float) -> None:
        request.worker_id, request.starting, request.input_tokens = worker_id, command_id, 0
        request.began_s += now_s - request.waits_s if request.began_s else now_s
        self.running[request.evaluation_id].placed += 1
        self._kv_tokens[worker_id] += request.context
        self.placed.setdefault(worker_id, {})[request.request_id] = None

    def leaves(self, request: EvalRequest) -> None:
        placed = self.placed[request.worker_id]
        del placed[request.request_id]
        self.running[request.evaluation_id].placed -= 1
        self._kv_tokens[request.worker_id] -= request.context
        if not placed:
            del self.placed[request.worker_id], self._kv_tokens[request.worker_id]
        self.stirred = True
        request.worker_id, request.starting = "", 0

    def wait(self, request_id: str, now_s: float) -> None:
        """Takes the request off its worker and queues it first in its evaluation."""
        request = self.requests[request_id]
        self.leaves(request)
        self.queue(request, now_s, first=True)

    def queue(self, request: EvalRequest, now_s: float, *, first: bool = False) -> None:
        request.waits_s = now_s
        waiting = self.running[request.evaluation_id].waiting
        if first:
            waiting.appendleft(request.request_id)
        else:
            waiting.append(request.request_id)

    def rest(self, request: EvalRequest, now_s: float) -> None:
        """Notes that a session without a worker awaits its next turn."""
        request.idle_s = now_s
        self.running[request.evaluation_id].idle[request.request_id] = None

    def is_idle(self, request_id: str) -> bool:
        """Returns whether this is a session between two turns."""
        request = self.requests.get(request_id)
        return request is not None and request_id in self.running[request.evaluation_id].idle

    def lost(self, worker_id: str, now_s: float) -> None:
        """Queues the requests of a lost worker, to continue after their last delivered tokens."""
        for request_id in reversed(list(self.placed.get(worker_id, ()))):
            self.wait(request_id, now_s)
        self.lent.discard(worker_id)
