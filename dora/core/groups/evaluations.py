"""The accounts of evaluations: which run, their requests, who has which of these. The rules are in evaluation.py."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from dora.core.events import OfferedPrompt
from dora.core.table import Column


@dataclass(slots=True, eq=False)
class EvalRequest:
    """One response of an evaluation."""

    row: int  # of the table of requests, where it is empty: by it reports name the request
    request_id: str
    evaluation_id: str
    group_id: str
    prompt_tokens: int
    tokens: int = 0  # response tokens delivered so far
    worker_id: str = ""  # that runs it
    starting: int = 0  # its StartRequest, until obeyed: reports before are of an earlier stay
    finished: bool = False  # its verdict is due
    scored: bool = False

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.tokens


@dataclass(slots=True, eq=False)
class Evaluation:
    """One evaluation that runs. ``groups``: begun and not scored whole, with how many responses have no verdict."""

    evaluation_id: str
    version: int
    share: float  # of each worker's slots and KV; 0: idle slots alone
    asked: int  # groups
    todo: deque[OfferedPrompt]  # not begun
    groups: dict[str, int] = field(default_factory=dict)
    held: int = 0  # requests on workers
    waiting: deque[str] = field(default_factory=deque)  # requests begun and on no worker, in order
    begun: int = 0  # groups
    done: int = 0  # groups whose responses are all scored
    refused: int = 0  # groups that no engine can take
    hosted_s: float = 0.0  # when a worker hosted its version last, or was to
    preempted: int = 0  # times that training took a slot back


class Evaluations:
    """Those that run, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.running: dict[str, Evaluation] = {}
        self.requests: dict[str, EvalRequest] = {}  # begun, of groups that are not scored whole
        self.row_of: dict[str, int] = {}  # by their ids
        self.at: dict[int, EvalRequest] = {}  # by their rows
        self.held: dict[str, dict[str, None]] = {}  # worker id -> requests that it runs, the youngest last; none empty
        self.lent: set[str] = set()  # workers that have lent slots and KV
        self.stirred = False  # one of them may begin something
        self.closed = False  # the service drains
        self._kv_tokens: Counter[str] = Counter()  # worker id -> context of what it runs

    def count(self, worker_id: str) -> int:
        """Requests that a worker runs."""
        return len(self.held.get(worker_id, ()))

    def kv_tokens(self, worker_id: str) -> int:
        """KV of these, as far as the worker has told."""
        return self._kv_tokens[worker_id]

    def youngest(self, worker_id: str) -> EvalRequest | None:
        """The last of these that came; None: the worker runs none."""
        held = self.held.get(worker_id)
        return self.requests[next(reversed(held))] if held else None

    def reported(self, worker_id: str, rows: Column) -> Column:
        """Of which of these rows tokens are to be taken over from this worker's report; bool (rows,)."""
        found = np.zeros(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist()):
            request = self.at.get(row)
            found[place] = request is not None and request.worker_id == worker_id and not request.starting
        return found

    def begin(self, request: EvalRequest) -> None:
        self.requests[request.request_id] = self.at[request.row] = request
        self.row_of[request.request_id] = request.row

    def forget(self, request: EvalRequest) -> None:
        """No worker runs it, and it waits for none."""
        del self.requests[request.request_id], self.at[request.row], self.row_of[request.request_id]

    def grows(self, request: EvalRequest, tokens: int) -> None:
        """Its worker has delivered so many of its tokens."""
        self._kv_tokens[request.worker_id] += tokens - request.tokens
        request.tokens = tokens

    def give(self, request: EvalRequest, worker_id: str, command_id: int) -> None:
        """The worker is told to run the request, by this command."""
        request.worker_id, request.starting = worker_id, command_id
        self.running[request.evaluation_id].held += 1
        self._kv_tokens[worker_id] += request.context
        self.held.setdefault(worker_id, {})[request.request_id] = None

    def leaves(self, request: EvalRequest) -> None:
        """Its worker runs the request no more."""
        held = self.held[request.worker_id]
        del held[request.request_id]
        self.running[request.evaluation_id].held -= 1
        self._kv_tokens[request.worker_id] -= request.context
        if not held:
            del self.held[request.worker_id], self._kv_tokens[request.worker_id]
        self.stirred = True
        request.worker_id, request.starting = "", 0

    def wait(self, request_id: str) -> None:
        """The request leaves its worker, and waits before all others of its evaluation."""
        request = self.requests[request_id]
        self.leaves(request)
        self.running[request.evaluation_id].waiting.appendleft(request_id)

    def lost(self, worker_id: str) -> None:
        """The worker is gone: what it ran goes on elsewhere, after the last delivered token."""
        for request_id in reversed(list(self.held.get(worker_id, ()))):
            self.wait(request_id)
        self.lent.discard(worker_id)
