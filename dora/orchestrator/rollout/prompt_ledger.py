"""The prompt ledger: every prompt that is queued, drawn or admitted, and the journal records of its way."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import Final

from dora.data.types import Prompt
from dora.errors import Conflict, IllegalTransition
from dora.journal import records
from dora.journal.durable import CANCELLED_KEPT_MAX
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc.errors import LimitExceeded

QUEUED_BYTES_MAX: Final = 512 << 20  # queued prompts, in memory
TOKEN_BYTES: Final = 40  # a token id in a Python tuple
SUBMITTED: Final = -1  # instead of a position in the source


class PromptState(Enum):
    """Lists the states of prompts. The ledger does not hold a prompt that is DONE."""

    QUEUED = auto()
    DRAWN = auto()
    ADMITTED = auto()
    DONE = auto()


_NEXT: Final = {  # every other pair is illegal
    (PromptState.DONE, "submit"): PromptState.QUEUED,
    (PromptState.DONE, "read"): PromptState.DRAWN,
    (PromptState.QUEUED, "draw"): PromptState.DRAWN,
    (PromptState.QUEUED, "cancel"): PromptState.DONE,
    (PromptState.DRAWN, "admit"): PromptState.ADMITTED,
    (PromptState.DRAWN, "drop"): PromptState.DONE,
    (PromptState.ADMITTED, "finish"): PromptState.DONE,
    (PromptState.ADMITTED, "cancel group"): PromptState.DONE,
}


@dataclass(slots=True)
class _KnownPrompt:
    """Holds a prompt that is not DONE: its position in the source, or SUBMITTED and an ``arrival``."""

    prompt: Prompt
    state: PromptState
    position: int
    arrival: int


class PromptLedger:
    """Owns the state of every prompt. A restart makes the states again from the journal records.

    ======== ================================= =================== ==============================================
    State    Entered by                        Then                Record in the journal, when the state is entered
    ======== ================================= =================== ==============================================
    QUEUED   ``submit``: over gRPC             DRAWN or DONE       ``Submitted``
    DRAWN    ``draw``: from the queue;         ADMITTED or DONE    none: a restart draws the prompt again
             ``read``: from the source
    ADMITTED ``admit``: it has a group         DONE                ``Admitted``
    DONE     ``cancel`` (was QUEUED)           QUEUED or DRAWN:    ``PromptsWithdrawn``, with the prompt's id
             ``drop`` (was DRAWN, cancelled)   its id is free      ``PromptsWithdrawn``, with the prompt's id
             ``finish`` (was ADMITTED)                             none: ``Committed`` of its step covers the group
             ``cancel_group`` (was ADMITTED)                       ``Dropped``
             ``refuse``: of the source                             ``PromptsWithdrawn``
    ======== ================================= =================== ==============================================

    The queue gives the highest priority first, and equal priorities in the order of their arrival. The ledger also
    retains the next position in the source, and the ids of the prompts and groups that were cancelled last.
    A change that the table lacks raises IllegalTransition and changes nothing.
    """

    def __init__(self, journal: Journal, queued_most: int) -> None:
        """The queue has room for ``queued_most`` prompts."""
        self._journal = journal
        self._queued_most = queued_most
        self._known: dict[str, _KnownPrompt] = {}  # by prompt id
        self._heap: list[tuple[int, int, str]] = []  # -priority, arrival, id; stale if no such prompt is queued
        self._arrivals = 0  # submitted prompts so far
        self.queued = 0  # prompts
        self.queued_bytes = 0  # at most QUEUED_BYTES_MAX
        self.next_position = 0  # in the source
        self.passed: set[int] = set()  # positions from ``next_position`` on that are not drawn again
        self.ended = False  # submissions have ended
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # ids of prompts and groups, the last ones
        self.queued_cancelled = 0  # prompts cancelled while queued

    def state(self, prompt_id: str) -> PromptState:
        known = self._known.get(prompt_id)
        return PromptState.DONE if known is None else known.state

    def prompt(self, prompt_id: str) -> Prompt:
        """Returns a prompt that is not DONE."""
        return self._known[prompt_id].prompt

    def check_free(self, prompt_id: str) -> None:
        """Raises Conflict unless the id may be given to another prompt."""
        if prompt_id in self._known:
            raise _in_use(prompt_id)

    def check_room(self, count: int) -> None:
        """Raises Conflict after ``end``, LimitExceeded if the queue has no room for so many prompts."""
        if self.ended:
            raise Conflict(
                "prompts", count, "0, because `end` has closed the queue; submit to a new service", why="came too late"
            )
        room = self._queued_most - self.queued
        if count > room:
            raise LimitExceeded("prompts", count, f"at most {room} now (queue of {self._queued_most})")

    # ---------------------------------------------------------------------------------------------------------- queue

    def submit(self, prompts: Sequence[Prompt]) -> int:
        """Queues all or none. Returns how many more the queue has room for.

        Raises Conflict for an id in use or after ``end``, LimitExceeded for a full queue.
        """
        self.check_room(len(prompts))
        names: set[str] = set()
        for prompt in prompts:
            if prompt.prompt_id in names:
                raise _in_use(prompt.prompt_id)
            self.check_free(prompt.prompt_id)
            names.add(prompt.prompt_id)
        more_bytes = sum(map(memory_bytes, prompts))
        if self.queued_bytes + more_bytes > QUEUED_BYTES_MAX:
            allowed = f"at most {QUEUED_BYTES_MAX - self.queued_bytes} now (queue of {QUEUED_BYTES_MAX})"
            raise LimitExceeded("prompts: bytes in memory", more_bytes, allowed)
        arrivals = range(self._arrivals + 1, self._arrivals + 1 + len(prompts))
        self._arrivals += len(prompts)
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            self._cancelled.pop(prompt.prompt_id, None)
            self._enqueue(prompt, arrival)
        if prompts and self._journal.writes:
            self._journal.note(records.Submitted(list(arrivals), [records.prompt_values(prompt) for prompt in prompts]))
        return self._queued_most - self.queued

    def draw(self, count: int) -> list[Prompt]:
        drawn: list[Prompt] = []
        while self.queued and len(drawn) < count:
            _, arrival, name = heappop(self._heap)
            known = self._known.get(name)
            if known is not None and known.state is PromptState.QUEUED and known.arrival == arrival:
                self._dequeue(name, "draw")
                drawn.append(known.prompt)
        return drawn

    def draw_one(self, prompt_id: str) -> Prompt:
        """Draws this queued prompt. Raises IllegalTransition for one that is not queued."""
        prompt = self._dequeue(prompt_id, "draw").prompt
        self._thin_out()
        return prompt

    def cancel(self, prompt_id: str) -> bool:
        """Cancels a queued prompt. Returns False if it is not in the queue."""
        if self.state(prompt_id) is not PromptState.QUEUED:
            return False
        self._withdraw([self._dequeue(prompt_id, "cancel")], [prompt_id])
        self.queued_cancelled += 1
        self._thin_out()
        return True

    def _thin_out(self) -> None:
        if len(self._heap) > 2 * self.queued + 64:  # stale cells must not pile up
            self._heap = [
                (-known.prompt.priority, known.arrival, name)
                for name, known in self._known.items()
                if known.state is PromptState.QUEUED
            ]
            heapify(self._heap)

    def end(self) -> int:
        """Closes the queue for submissions. Returns how many prompts are queued. May be repeated."""
        if not self.ended:
            self._journal.note(records.PromptsEnded())
        self.ended = True
        return self.queued

    def _enqueue(self, prompt: Prompt, arrival: int) -> None:
        self._add(prompt, "submit", SUBMITTED, arrival)
        heappush(self._heap, (-prompt.priority, arrival, prompt.prompt_id))
        self.queued += 1
        self.queued_bytes += memory_bytes(prompt)

    def _dequeue(self, prompt_id: str, action: str) -> _KnownPrompt:
        known = self._move(prompt_id, action)
        self.queued -= 1
        self.queued_bytes -= memory_bytes(known.prompt)
        return known

    # --------------------------------------------------------------------------------------------------------- source

    def read(self, position: int, prompt: Prompt) -> None:
        """Draws the source's prompt at this position. Raises Conflict for an id in use."""
        self.check_free(prompt.prompt_id)
        self._add(prompt, "read", position, 0)

    def refuse(self, positions: Sequence[int]) -> None:
        """Never draws the source's prompts at these positions again, because no engine can take them."""
        if positions:
            self._journal.note(records.PromptsWithdrawn([], list(positions), []))

    def read_up_to(self, position: int) -> None:
        """Continues reading the source from ``position``."""
        self.next_position = position
        self.passed = {each for each in self.passed if each >= position} if self.passed else self.passed

    # ---------------------------------------------------------------------------------------------------------- groups

    def drawn(self, prompt_id: str) -> Prompt:
        """Returns a prompt that is about to be admitted. Raises IllegalTransition if it is not DRAWN."""
        self._next(prompt_id, "admit")
        return self._known[prompt_id].prompt

    def admit(self, responses: Sequence[ResponseState], deadline: int) -> None:
        """Notes the responses of the prompt's group, in the order of their samples."""
        first = responses[0]
        known = self._move(first.prompt.prompt_id, "admit")
        if self._journal.writes:
            self._journal.note(
                records.Admitted(
                    first.number,
                    first.group_id,
                    records.prompt_values(first.prompt),
                    first.version,
                    deadline,
                    first.window_versions,
                    first.started_at,
                    [response.row for response in responses],
                    known.position,
                    known.arrival,
                )
            )

    def drop(self, prompt_id: str) -> None:
        """Notes that a drawn prompt was cancelled before it was admitted."""
        self._withdraw([self._move(prompt_id, "drop")], [prompt_id])

    def finish(self, prompt_id: str) -> None:
        """Notes that the prompt's group was trained on."""
        self._move(prompt_id, "finish")

    def cancel_group(self, responses: Sequence[ResponseState], line: str, *, on_request: bool) -> None:
        """Notes the group's cancellation, with the run record's ``line`` as JSON. ``on_request`` means that a user
        asked.
        """
        first = responses[0]
        self._move(first.prompt.prompt_id, "cancel group")
        names = [first.group_id, first.prompt.prompt_id] if on_request else [first.group_id]
        self._journal.note(records.Dropped(first.number, names, line))
        self._remember_cancelled(names)

    def was_cancelled(self, name: str) -> bool:
        """Returns whether the prompt or group of this id was cancelled."""
        return name in self._cancelled

    # --------------------------------------------------------------------------------------------------------- restart

    def restore(
        self,
        admitted: Iterable[tuple[Prompt, int, int]],
        queued: Iterable[tuple[int, Prompt]] = (),
        cancelled: Iterable[str] = (),
        *,
        next_arrival: int = 1,
        next_position: int = 0,
        passed: Iterable[int] = (),
        ended: bool = False,
    ) -> None:
        """Restores prompts: admitted ones with position and arrival, queued ones with arrival. Positions in ``passed``
        are not drawn again.
        """
        for prompt, position, arrival in admitted:
            self._known[prompt.prompt_id] = _KnownPrompt(prompt, PromptState.ADMITTED, position, arrival)
        for arrival, prompt in queued:
            self._enqueue(prompt, arrival)
        self._remember_cancelled(cancelled)
        self._arrivals, self.next_position = next_arrival - 1, next_position
        self.passed, self.ended = set(passed), ended

    # ----------------------------------------------------------------------------------------------------------- parts

    def _next(self, prompt_id: str, action: str) -> PromptState:
        state = self.state(prompt_id)
        if (state, action) not in _NEXT:
            raise IllegalTransition(f"prompt {prompt_id}: {action} in state {state.name}")
        return _NEXT[state, action]

    def _add(self, prompt: Prompt, action: str, position: int, arrival: int) -> None:
        after = self._next(prompt.prompt_id, action)
        self._known[prompt.prompt_id] = _KnownPrompt(prompt, after, position, arrival)

    def _move(self, prompt_id: str, action: str) -> _KnownPrompt:
        after = self._next(prompt_id, action)
        known = self._known[prompt_id]
        known.state = after
        if after is PromptState.DONE:
            del self._known[prompt_id]
        return known

    def _withdraw(self, prompts: Sequence[_KnownPrompt], cancelled: Sequence[str]) -> None:
        arrivals = [known.arrival for known in prompts if known.position == SUBMITTED]
        positions = [known.position for known in prompts if known.position != SUBMITTED]
        self._journal.note(records.PromptsWithdrawn(arrivals, positions, list(cancelled)))
        self._remember_cancelled(cancelled)

    def _remember_cancelled(self, names: Iterable[str]) -> None:
        for name in names:
            self._cancelled[name] = None
            self._cancelled.move_to_end(name)
            if len(self._cancelled) > CANCELLED_KEPT_MAX:
                self._cancelled.popitem(last=False)


def _in_use(prompt_id: str) -> Conflict:
    return Conflict("prompt_id", prompt_id, "an id that is neither queued nor being generated", why="is in use")


def memory_bytes(prompt: Prompt) -> int:
    """Estimates the memory of a prompt that waits."""
    return TOKEN_BYTES * len(prompt.token_ids) + 4 * len(prompt.text) + len(prompt.verifier_json)
