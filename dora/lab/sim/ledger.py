"""The simulator's own ledger of admitted, sampled, delivered and trained groups. The promises are checked against it.

It reads nothing from the core, so it detects a core that miscounts.
"""

from collections import Counter
from dataclasses import dataclass, field

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.selection import REDUNDANT
from dora.core.rules.sessions import TOTAL
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError, described
from dora.lab.sim.workload import SimPrompt, environment_tokens


class Violation(AssertionError):
    """A broken promise: C1, C2 or C3, with the facts."""


class Lost(Violation):
    """C2: an admitted group will never be trained, although it was not cancelled."""


class Duplicated(Violation):
    """C2: the trainer received a group twice."""


class Stalled(Violation):
    """The trainer waits for an event that cannot occur."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a run, with its simulated time. ``kind`` is violation, lost, duplicated, stalled or raised.

    ``raised`` is an exception that is neither a check's nor the core's refusal, so a bug of a strategy or of the core.
    """

    kind: str
    message: str
    at_s: float
    raised: bool = False


def failure_of(error: Exception, at_s: float) -> Failure:
    """The failure for an exception that ended a run. An exception of the core is a broken promise too."""
    kinds: dict[type[Exception], str] = {Lost: "lost", Duplicated: "duplicated", Stalled: "stalled"}
    raised = not isinstance(error, (Violation, DoraError))
    if raised:
        message = described(error)
    else:
        message = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    return Failure(kinds.get(type(error), "violation"), message, round(at_s, 3), raised)


@dataclass(slots=True)
class SimResponse:
    """One response of an admitted group."""

    group_id: str
    version: int
    index: int  # within its group
    prompt: SimPrompt
    tokens: int = 0  # as accepted by the service
    finished: bool = False
    requested_turn: int = -1  # the environment was called after this turn and answers at ``answer_s``
    answer_s: float = 0.0
    turn: int = 0  # sessions: the present or last turn; -1: the environment has not given the prompt
    idle: bool = False  # sessions: this turn has ended, and the next was not asked
    ended: bool = False  # sessions: the environment has ended it
    troubled: bool = False  # sessions: its environment has failed or stands still
    forked: bool = False  # sessions: the present turn has left the branch of the one before
    cut_tokens: int = 0  # sessions: tokens that the KV of that branch loses to serve the turn; 0: it does not serve it

    @classmethod
    def of(cls, group_id: str, version: int, index: int, prompt: SimPrompt) -> "SimResponse":
        return cls(
            group_id,
            version,
            index,
            prompt,
            turn=-1 if prompt.is_from_environment else 0,
            idle=prompt.is_from_environment,
        )

    @property
    def turn_end(self) -> int:
        """The tokens at the end of the present turn."""
        return self.prompt.spans(self.index)[self.turn][1]


@dataclass(slots=True)
class SimGroup:
    prompt: SimPrompt
    version: int
    window: int  # at its admission: the staleness limit is one less
    request_ids: tuple[str, ...]
    started: int  # members that have started, the first ones
    unscored: int  # of these, without a verdict
    step: int = -1  # step of its delivery
    rewards: set[float] = field(default_factory=set)  # valid ones

    def grow(self) -> None:
        """Starts all members if two rewards differ."""
        if len(self.rewards) > 1:
            self.unscored += len(self.request_ids) - self.started
            self.started = len(self.request_ids)


@dataclass(slots=True)
class SimEvaluation:
    """An evaluation: prompts under one version, never used for training."""

    todo: dict[str, SimPrompt]
    groups: dict[str, SimGroup] = field(default_factory=dict)  # running groups
    done: int = 0
    ended: bool = False


@dataclass(slots=True)
class SimLedger:
    """The ledger of one run. ``window`` is the present size, within ``bounds`` unless these are None. It limits the
    staleness of admitted groups to ``window - 1``. A step may drop ``spare`` groups.
    """

    window: int
    groups_per_step: int
    spare: int = 0
    bounds: tuple[int, int] | None = None
    offered: dict[str, SimPrompt] = field(default_factory=dict)  # drawn but not admitted
    responses: dict[str, SimResponse] = field(default_factory=dict)
    groups: dict[str, SimGroup] = field(default_factory=dict)  # admitted, neither trained nor cancelled
    received: list[str] = field(default_factory=list)  # groups of the step that the trainer collects
    admitted: int = 0
    trained: int = 0
    steps: int = 0  # committed
    cancelled: int = 0
    cancel_reasons: Counter[str] = field(default_factory=Counter)
    redundant: Counter[int] = field(default_factory=Counter)  # step -> groups due by it that were dropped as redundant
    resizes: list[do.ResizeWindow] = field(default_factory=list)
    cancelled_tokens: int = 0  # accepted tokens of cancelled groups
    replaced: int = 0  # sessions
    broken_off: int = 0  # sessions that ended without their environment
    publications: Counter[int] = field(default_factory=Counter)  # version -> number of its republications
    rejected: set[int] = field(default_factory=set)  # versions that must be published again
    evaluations: dict[str, SimEvaluation] = field(default_factory=dict)

    def duplicated(self) -> int:
        """Groups that left the ledger more often than they entered it."""
        return max(0, self.trained + self.cancelled + len(self.groups) - self.admitted)

    def offer(self, prompts: list[SimPrompt]) -> None:
        self.offered.update((prompt.prompt_id, prompt) for prompt in prompts)

    def admit(self, command: do.AdmitGroup) -> None:
        prompt = self.offered.pop(command.prompt_id, None)
        if prompt is None:
            raise Violation(f"{command.group_id} takes the prompt {command.prompt_id}, which is not on offer (C2)")
        if command.version in self.rejected:
            raise Violation(f"{command.group_id} is admitted under version {command.version}, which is rejected (C1)")
        ids, at_once = command.request_ids, prompt.at_once
        self.groups[command.group_id] = SimGroup(prompt, command.version, self.window, ids, at_once, at_once)
        self.admitted += 1
        for index, request_id in enumerate(command.request_ids):
            self.responses[request_id] = SimResponse.of(command.group_id, command.version, index, prompt)

    def resize(self, command: do.ResizeWindow) -> None:
        least, most = self.bounds or (self.window, self.window)
        if not least <= command.size <= most or abs(command.size - self.window) != 1 or not command.reason:
            raise Violation(f"the window becomes {command.size} from {self.window}, of {least} to {most} (C3)")
        self.window = command.size
        self.resizes.append(command)

    def take_back(self, command: do.DropPrompt) -> None:
        if self.offered.pop(command.prompt_id, None) is None:
            raise Violation(f"the prompt {command.prompt_id} is taken back, and is not on offer")

    def sampled(self, request_id: str, engine_version: int) -> None:
        """Checks that an engine decodes a request under the request's version."""
        response = self.responses.get(request_id)
        if response is not None and response.version != engine_version:
            raise Violation(f"{request_id} of version {response.version} is decoded under {engine_version} (C1)")

    def take_over(self, event: on.Progress, request_id: str) -> None:
        """Accepts a worker's report of a request's tokens."""
        response, tokens = self.responses[request_id], event.tokens[request_id]
        if event.version != response.version:
            raise Violation(f"{request_id} of version {response.version} was sampled under {event.version} (C1)")
        if response.version in self.rejected:
            raise Violation(f"{request_id} has tokens of version {response.version}, which is rejected (C1)")
        self.check_started(request_id)
        if tokens < response.tokens:
            raise Violation(f"{request_id} goes back from {response.tokens} to {tokens} tokens (C2)")
        if response.finished:
            raise Violation(f"{request_id} goes on after its end (C2)")
        if response.prompt.sessions:
            self._take_over_session(response, request_id, tokens, is_end=request_id in event.finished)
            return
        response.tokens = tokens
        if request_id in event.finished:
            if tokens != response.prompt.lengths[response.index]:
                raise Violation(f"{request_id} ends after {tokens} of {response.prompt.lengths[response.index]} tokens")
            response.finished = True

    def _take_over_session(self, response: SimResponse, request_id: str, tokens: int, *, is_end: bool) -> None:
        if response.idle and tokens > response.tokens:
            raise Violation(
                f"{request_id} goes on to {tokens} tokens, and no turn was requested at {response.tokens} (C2)"
            )
        if tokens > response.turn_end or (is_end and tokens != response.turn_end):
            raise Violation(f"turn {response.turn} of {request_id} ends after {tokens}, not {response.turn_end} tokens")
        response.tokens, response.idle = tokens, is_end or response.idle

    def ask(self, request_id: str) -> on.TurnRequested:
        """The environment asks a session's next turn, which may fork."""
        response = self.responses[request_id]
        prompt, turn = response.prompt, response.turn
        response.turn, response.idle, response.forked, response.cut_tokens = turn + 1, False, turn < 0, 0
        if response.forked:
            return on.TurnRequested(request_id, prompt.prompt_tokens, is_prompt=True)
        inputs, left = (
            environment_tokens(prompt.turns_of(response.index)[turn]),
            prompt.tokens_left(response.index, turn),
        )
        response.tokens += inputs
        if not left:
            return on.TurnRequested(request_id, inputs)
        response.forked, is_on_branch = True, not prompt.forks_elsewhere(response.index, turn)
        response.cut_tokens = left if is_on_branch else 0
        return on.TurnRequested(request_id, inputs + left, response.tokens - inputs - left, is_on_branch=is_on_branch)

    def replace(self, command: do.ReplaceRequest) -> None:
        """Another session begins in place of one that has failed."""
        before = self.responses.pop(command.request_id, None)
        late = TOTAL in command.reason
        if before is None or before.finished or not (before.troubled or late) or not command.reason:
            raise Violation(f"{command.request_id} is replaced, and nothing has befallen it: {command.reason} (C2)")
        if command.replacement_id in (command.request_id, *self.responses):
            raise Violation(f"{command.replacement_id} replaces {command.request_id} and is there already (C2)")
        again = SimResponse.of(before.group_id, before.version, before.index, before.prompt)
        self.responses[command.replacement_id] = again
        evaluated = {name: each for evaluation in self.evaluations.values() for name, each in evaluation.groups.items()}
        group = self.groups.get(before.group_id) or evaluated[before.group_id]
        group.request_ids = tuple(
            command.replacement_id if name == command.request_id else name for name in group.request_ids
        )
        self.replaced += 1

    def answer_s(self, request_id: str, turn: int, now_s: float) -> float:
        """Returns the time of the environment's answer to a turn. It is asked once, although the request moves."""
        response = self.responses.get(request_id)
        if response is None:
            return now_s  # cancelled
        if response.requested_turn < turn:
            response.requested_turn = turn
            response.answer_s = now_s + response.prompt.turns_of(response.index)[turn].environment_s
        return response.answer_s

    def break_off(self, command: do.BreakOffSession) -> None:
        """Ends a session whose environment has failed or stands still."""
        response = self.responses.get(command.request_id)
        late = TOTAL in command.reason
        if response is None or response.finished or not (response.troubled or late) or not command.reason:
            raise Violation(f"{command.request_id} is broken off, and nothing has befallen it: {command.reason} (C2)")
        response.finished = True
        self.broken_off += 1

    def check_finished(self, request_id: str) -> None:
        """Checks that a response is complete before the verifier scores it."""
        response = self.responses.get(request_id)
        if response is not None and response.prompt.sessions and response.ended:
            response.finished = True
        if response is None or not response.finished:
            raise Violation(f"{request_id} is scored before its end (C2)")

    def check_started(self, request_id: str) -> None:
        """Checks that a member may run: the group started with it, or has grown since."""
        if not self.has_started(self.responses[request_id]):
            started = self.groups[self.responses[request_id].group_id].started
            raise Violation(f"{request_id} runs, and the group has started {started} of its members")

    def has_started(self, response: SimResponse) -> bool:
        """Whether a response is a member with which its group has started, or has grown since."""
        group = self.groups.get(response.group_id)  # None: of an evaluation
        return group is None or response.index < group.started

    def check_grown(self, command: do.GrowGroup) -> None:
        """Checks that the members that start are all those that have not."""
        group = self.groups.get(command.group_id)
        late = () if group is None else group.request_ids[group.prompt.at_once : group.started]
        if command.request_ids != late or not late:
            raise Violation(f"{command.group_id} starts {command.request_ids}, while its rewards ask for {late}")

    def check_members(self, delivered: TrajectoryGroup) -> None:
        """Checks that a group is delivered with exactly the members that have started (C2)."""
        group = self.groups[delivered.group_id]
        found = [each.sample_index for each in delivered.trajectories]
        sizes = {each.group_size for each in delivered.trajectories}
        if sorted(set(found)) != list(range(group.started)) or sizes != {group.started}:
            logged = f"as a group of {sizes}, and {group.started} have started"
            raise Violation(f"{delivered.group_id} is delivered with the members {found} {logged} (C2)")

    def scored(self, request_id: str, reward: float | None) -> str | None:
        """Records a verdict; None is an invalid one. Returns the group's id if it was the group's last."""
        response = self.responses.get(request_id)
        if response is None:
            return None  # cancelled
        group = self.groups.get(response.group_id)
        if group is None:
            return None  # an evaluation, which no filter sees
        group.unscored -= 1
        if reward is not None:
            group.rewards.add(reward)
            group.grow()
        return None if group.unscored else response.group_id

    def check_retired(self, version: int) -> None:
        """Checks that a version has no unfinished response before its weights are retired."""
        of_version = [(name, each) for name, each in self.responses.items() if each.version == version]
        unfinished = [name for name, each in of_version if not each.finished and not self._is_skipped(each)]
        if unfinished:
            raise Violation(f"version {version} is let go, and {unfinished[0]} is unfinished (C1)")

    def _is_skipped(self, response: SimResponse) -> bool:
        group = self.groups.get(response.group_id)
        return group is not None and not group.unscored and response.index >= group.started

    def reject(self, command: do.RejectVersion) -> None:
        """Rejects a version that workers refuse. It has no sampled tokens, and gets none until published again."""
        version = command.version
        sampled = [name for name, each in self.responses.items() if each.version == version and each.tokens]
        if version in self.rejected or sampled or not command.worker_ids:
            raise Violation(f"version {version} is rejected; tokens of it: {', '.join(sampled) or 'none'} (C1)")
        self.rejected.add(version)

    def republished(self, version: int) -> None:
        self.rejected.remove(version)
        self.publications[version] += 1

    def deliver(self, command: do.DeliverGroup) -> None:
        group = self.groups.get(command.group_id)
        if self.rejected:
            raise Violation(f"{command.group_id} is delivered while {sorted(self.rejected)} are rejected")
        if group is None:
            raise Duplicated(f"{command.group_id} is delivered, but was trained, cancelled or never admitted (C2)")
        started = group.request_ids[: group.started]
        if group.unscored or not all(self.responses[request_id].finished for request_id in started):
            raise Violation(f"{command.group_id} is delivered unfinished (C2)")
        if not 0 <= command.step - group.version < group.window:
            logged = f"of version {group.version}, admitted in a window of {group.window},"
            raise Violation(f"{command.group_id} {logged} is taken by step {command.step} (C3)")
        if group.step not in (-1, command.step):
            raise Duplicated(f"{command.group_id} is delivered to the steps {group.step} and {command.step} (C2)")
        if command.group_id in self.received:
            raise Duplicated(f"{command.group_id} is delivered twice in one stream (C2)")
        if command.again != (group.step >= 0):
            raise Violation(f"{command.group_id} is delivered {'first' if group.step < 0 else 'again'}, not as it says")
        group.step = command.step
        self.received.append(command.group_id)

    def stream_began(self) -> None:
        """A step's stream was opened, possibly again: its groups are delivered from the first."""
        self.received = []

    def closed(self, command: do.CloseStep) -> None:
        if len(self.received) != self.groups_per_step and not command.exhausted:
            raise Violation(f"step {command.step} is closed with {len(self.received)} groups (C2)")
        if command.exhausted and len(self.received) != len(self.groups):
            raise Lost(f"step {command.step} ends short, with {len(self.received)} of {len(self.groups)} groups (C2)")

    def train(self) -> list[SimGroup]:
        """Removes and returns the groups of the collected step, which was trained and committed."""
        groups = []
        for group_id in self.received:
            group = self.groups.pop(group_id)
            for request_id in group.request_ids:
                del self.responses[request_id]
            groups.append(group)
        self.trained += len(groups)
        self.steps += 1
        self.received = []
        return groups

    def forget(self, command: do.ForgetGroup) -> None:
        if command.group_id in self.groups:
            raise Lost(f"{command.group_id} is forgotten before it was trained (C2)")

    def drop(self, command: do.DropGroup) -> None:
        group = self.groups.pop(command.group_id, None)
        if group is None or not command.reason:
            raise Lost(f"{command.group_id} is cancelled without being open, or without a reason (C2)")
        if command.reason == REDUNDANT:
            self._check_redundant(command.group_id, group)
        for request_id in group.request_ids:
            self.cancelled_tokens += self.responses.pop(request_id).tokens
        self.cancelled += 1
        self.cancel_reasons[command.reason] += 1

    # -------------------------------------------------------------------------------------------------- evaluations

    def ask_evaluation(self, evaluation_id: str, prompts: list[SimPrompt]) -> None:
        self.evaluations[evaluation_id] = SimEvaluation({prompt.prompt_id: prompt for prompt in prompts})

    def begin_evaluation_group(self, command: do.BeginEvaluationGroup) -> None:
        evaluation = self.evaluations[command.evaluation_id]
        prompt = evaluation.todo.pop(command.prompt_id, None)
        if prompt is None or evaluation.ended or command.group_id in evaluation.groups:
            raise Violation(f"{command.group_id} takes the prompt {command.prompt_id}, which is not to be evaluated")
        if {group.version for group in evaluation.groups.values()} - {command.version}:
            raise Violation(f"{command.group_id} is of version {command.version}, its evaluation is not (C1)")
        ids = command.request_ids
        evaluation.groups[command.group_id] = SimGroup(prompt, command.version, self.window, ids, len(ids), len(ids))
        for index, request_id in enumerate(ids):
            self.responses[request_id] = SimResponse.of(command.group_id, command.version, index, prompt)

    def end_evaluation_group(self, command: do.EndEvaluationGroup) -> None:
        evaluation = self.evaluations[command.evaluation_id]
        group = evaluation.groups.pop(command.group_id, None)
        if group is None or evaluation.ended:
            raise Duplicated(f"{command.group_id} ends twice, or never began (C2)")
        if not command.reason and not all(self.responses[name].finished for name in group.request_ids):
            raise Violation(f"{command.group_id} is given unfinished (C2)")
        evaluation.done += not command.reason
        for name in group.request_ids:
            del self.responses[name]

    def end_evaluation(self, command: do.EndEvaluation) -> None:
        """Ends an evaluation. Complete, or with a reason: then its running groups are dropped."""
        evaluation = self.evaluations[command.evaluation_id]
        if evaluation.ended or (not command.reason and (evaluation.todo or evaluation.groups)):
            raise Lost(
                f"{command.evaluation_id} ends with {len(evaluation.todo) + len(evaluation.groups)} groups missing (C2)"
            )
        evaluation.ended = True
        for group in evaluation.groups.values():
            for name in group.request_ids:
                del self.responses[name]
        evaluation.groups.clear()

    def _check_redundant(self, group_id: str, group: SimGroup) -> None:
        due, step = group.version + group.window - 1, self.steps
        self.redundant[step] += 1
        if due != step or not group.unscored or self.redundant[step] > self.spare:
            logged = f"due at {due} of step {step}; {group.unscored} unscored; {self.redundant[step]} dropped"
            raise Lost(f"{group_id} is no redundant group of its step ({logged}, {self.spare} at most; C2)")
