"""One run in virtual time: real sampling with a KV cache and the package's learner, a simulated clock.

A step of training takes one unit. Four workers decode eight sessions each in ticks; a pinned session is decoded by a
worker of its version alone, as the core's window (``dora.core.groups.window``) admits and takes groups. A tool's pause
holds no slot. Moves of KV take no time here, loads and prefill do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch

from dora.config import WindowConfig
from dora.core.forecast.adaptive import AdaptiveSize, StepSignals
from dora.core.groups.window import Window
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import SamplingParams, Segment
from dora.trainers.learner import Learner, LearnerConfig
from dora.trainers.objectives.presets import DEFAULT, objective
from experiments.convergence.intervals import mean
from experiments.pinning.cell import GROUP_SIZE, GROUPS, LENGTH, QUESTION, REGIMES, TURN_TOKENS, VOCABULARY, Cell, Task
from experiments.pinning.policy import Cache, Decoder, FloatRows, IntColumn, Policy

WORKERS: Final = 4
WORKER_SLOTS: Final = 8
TICK: Final = 0.04  # of a step of training: a full batch of tokens takes 0.9 of it
PREFILL: Final = 0.002  # a token, of one worker: 0.4 of its share of a tick, as in the simulator's preset
LOAD: Final = 0.01  # one worker takes a version
UNTIL: Final = 3000.0  # the longest run
CHECKED: Final = 2  # sessions of each group whose logprobs are computed again
SIGNALS: Final = ("ratio_p99", "ratio_max", "effective_sample", "clip_fraction", "movement")


@dataclass(eq=False, slots=True)
class Session:
    """One member of a group. ``versions``: of each sampled token; ``version``: the one that it claims, its first."""

    group: "Group"
    member: int
    slot: int
    version: int
    attempt: int = 0
    tokens: list[int] = field(default_factory=lambda: [QUESTION])
    logprobs: list[float] = field(default_factory=lambda: [nan])
    versions: list[int] = field(default_factory=lambda: [-1])
    fed: int = 0  # tokens whose KV is in the cache
    turn: int = 0
    turns: list[list[int]] = field(default_factory=lambda: [[]])
    ready: float = 0.0  # when its tool has answered
    reward: float | None = None  # that it is trained with, once it has ended; None then: it is left out
    has_failed: bool = False

    @property
    def name(self) -> str:
        return f"{self.group.name}.{self.member}.{self.attempt}"

    @property
    def has_ended(self) -> bool:
        return self.has_failed or self.reward is not None

    @property
    def sampled(self) -> int:
        return sum(version >= 0 for version in self.versions)


@dataclass(eq=False, slots=True)
class Group:
    """All sessions of one prompt."""

    name: str
    task: Task
    version: int
    deadline: int
    members: list[Session] = field(default_factory=list)

    @property
    def valid(self) -> list[Session]:
        """The members to train on, once all have ended."""
        return [each for each in self.members if each.reward is not None]


class Rollout:
    """One cell's run. Deterministic: all randomness follows from the seed."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.regime = cell, REGIMES[cell.regime]
        self._is_pinned = self.regime.rule == "pinned"
        torch.manual_seed(cell.seed)
        self._random = np.random.default_rng(cell.seed)
        config = LearnerConfig(learning_rate=cell.learning_rate, objective=objective(DEFAULT))
        self._learner = Learner(Policy(VOCABULARY, LENGTH), config)
        self._decoders = {0: Decoder(self._learner.module)}
        self._auto = None if self.regime.window else AdaptiveSize(WindowConfig(size="auto"))
        self._window = Window(self._auto.size if self._auto else self.regime.window, GROUPS)
        slots = GROUPS * GROUP_SIZE * (WindowConfig().max + 1)
        self._cache, self._free = Cache(slots, LENGTH), list(range(slots))
        self.now = 0.0
        self._begun = self._lost = self.trained = 0  # groups; steps
        self._running: list[Session] = []
        self._ended: list[Group] = []
        self._batch: list[Group] = []
        self._until = inf  # the end of the present training
        self._worker_versions, self._workers_free = [0] * WORKERS, [0.0] * WORKERS
        self.steps: list[dict[str, float]] = []
        self.totals = dict.fromkeys(("sampled", "wasted", "failed", "again", "discarded"), 0)
        self.errors: dict[str, list[float]] = {"token": [], "claimed": []}

    def result(self) -> dict[str, Any]:
        """Runs all steps, or as many as end in time. Signals but time and reward are means over the steps."""
        while self.trained < self.cell.steps and self.now < UNTIL:
            self._train()
            self._admit()
            self._tick()
        columns = {name: [step[name] for step in self.steps] for name in self.steps[0]}
        steps = {name: columns.pop(name) for name in ("at", "reward")}
        means = {name: mean(values) for name, values in columns.items()}
        means |= {name: max(each for each in columns[name] if each == each) for name in ("oldest", "ratio_max")}
        errors = {f"{name}_{kind}": of(values) for name, values in self.errors.items()
                  for kind, of in (("mean", fmean), ("max", max))}  # fmt: skip
        return {
            "cell": self.cell.specification,
            "steps": steps,
            "totals": self.totals,
            "errors": errors,
            "groups": {"begun": self._begun, "lost": self._lost},
            "means": means,
        }

    # -------------------------------------------------------------------------------------------------- the trainer

    def _train(self) -> None:
        if self._until <= self.now:
            self._commit()
        if self._until < inf:
            return
        for group in sorted(self._ended, key=lambda each: each.deadline) if self._is_pinned else list(self._ended):
            if len(self._batch) < GROUPS and (not self._is_pinned or self._window.takeable(group.deadline)):
                if self._is_pinned:
                    self._window.take(group.version, group.deadline)
                self._ended.remove(group)
                self._batch.append(group)
        if len(self._batch) == GROUPS:
            self._until = self.now + 1.0

    def _commit(self) -> None:
        step = self.trained
        self._check()
        for group in self._batch:
            members = tuple(_trajectory(each, step) for each in group.valid)
            self._learner.add_group(TrajectoryGroup(group.name, members))
        numbers = self._learner.finish_step().numbers()
        sessions = [each for group in self._batch for each in group.members]
        ages = [step - version for each in sessions for version in each.versions if version >= 0]
        rewards = [each.reward for each in sessions if each.reward is not None and not each.has_failed]
        took = self.now - (self.steps[-1]["at"] if self.steps else 0.0)
        line = {"at": self.now, "reward": fmean(rewards), "staleness": fmean(ages), "oldest": max(ages)}
        line |= {"wait": took - 1.0, "window": self._window.size, **{name: numbers.get(name, nan) for name in SIGNALS}}
        self.steps.append(line)
        self._batch, self._until = [], inf
        self.trained += 1
        self._decoders[self.trained] = Decoder(self._learner.module)
        self._window.newest = self.trained if not self._is_pinned else self._window.publish()
        if self._auto is not None:
            told = {name: numbers.get(name) for name in ("clip_fraction", "effective_sample", "movement")}
            signals = StepSignals(took, took - 1.0, **told, staleness=line["staleness"], tokens=len(ages))
            resize = self._auto.saw(step, signals)
            if resize is not None:
                self._window.set_size(resize.size)
        if not self._is_pinned:
            self._publish()

    def _publish(self) -> None:
        """All workers take the new weights, and sessions in flight go on or not, as the regime has it."""
        rule, oldest, again = self.regime.rule, self.trained - self.regime.window + 1, 0
        if rule == "computed again":
            for place in range(max((each.fed for each in self._running), default=0)):
                longer = [each for each in self._running if each.fed > place]
                self._read(self._decoders[self.trained], longer, place)
                again += len(longer)
        for each in list(self._running) if rule.startswith("discarded") else ():
            if rule == "discarded at an update" or each.version < oldest:
                self.totals["wasted"] += each.sampled
                self.totals["discarded"] += 1
                self._replace(each)
        self.totals["again"] += again
        busy = LOAD + PREFILL * again / WORKERS
        self._worker_versions = [self.trained] * WORKERS
        self._workers_free = [max(free, self.now) + busy for free in self._workers_free]

    def _check(self) -> None:
        """Reads some sessions of the batch again: under each token's version, and under the claimed one."""
        whole = ([each for each in group.valid if len(each.tokens) == LENGTH] for group in self._batch)
        sessions = [each for group in whole for each in group[:CHECKED]]
        ids = np.array([each.tokens for each in sessions])
        versions = {version for each in sessions for version in (*each.versions, each.version) if version >= 0}
        read = {version: self._read_again(self._decoders[version], ids) for version in versions}
        for row, each in enumerate(sessions):
            for place, version in enumerate(each.versions):
                if version >= 0:
                    for kind, by in (("token", version), ("claimed", each.version)):
                        self.errors[kind].append(abs(float(read[by][row, place]) - each.logprobs[place]))

    def _read_again(self, decoder: Decoder, ids: IntColumn) -> FloatRows:
        """The logprobs of rows of tokens, by the engine's own arithmetic."""
        rows, cache, found = np.arange(len(ids)), Cache(len(ids), LENGTH), np.zeros(ids.shape, np.float32)
        for place in range(ids.shape[1] - 1):
            logprobs = decoder.read(cache, rows, ids[:, place], np.full(len(ids), place))
            found[:, place + 1] = logprobs[rows, ids[:, place + 1]]
        return found

    # ------------------------------------------------------------------------------------------------- the sessions

    def _admit(self) -> None:
        while self._may_begin():
            if self._is_pinned:
                self._window.admit(self.trained)
            name = f"p{self._begun}"
            task = Task.of(self.cell.task, f"{self.cell.seed} {name}")
            group = Group(name, task, self.trained, self._window.deadline(self.trained))
            group.members = [Session(group, member, self._free.pop(), self.trained) for member in range(GROUP_SIZE)]
            self._running += group.members
            self._begun += 1

    def _may_begin(self) -> bool:
        if self._is_pinned:
            return self._window.admissible(self.trained) > 0
        return self._begun - self._lost < (self.trained + self.regime.window) * GROUPS

    def _version_of(self, session: Session) -> int:
        """The version that samples the session's next token."""
        return session.version if self._is_pinned else self.trained

    def _replace(self, session: Session) -> None:
        """Begins another session in its place."""
        group, member = session.group, session.member
        new = Session(group, member, session.slot, self._version_of(session), session.attempt + 1)
        group.members[member] = new
        self._running[self._running.index(session)] = new

    def _tick(self) -> None:
        """Decodes a token of each session that has a place, or else passes to the next event."""
        work = list(self._placed())
        if not work:
            events = [*(each.ready for each in self._running), *self._workers_free, self._until]
            self.now = min((at for at in events if at > self.now), default=inf)
            return
        prefilled = sum(self._decode(version, sessions) for version, sessions in work)
        self.now += TICK + PREFILL * prefilled / WORKERS

    def _placed(self) -> Iterator[tuple[int, list[Session]]]:
        """The sessions that are decoded now, by the version whose weights do it."""
        waiting: dict[int, list[Session]] = {}
        for each in sorted((each for each in self._running if each.ready <= self.now), key=self._version_of):
            waiting.setdefault(self._version_of(each), []).append(each)
        self._assign({version: len(sessions) for version, sessions in waiting.items()})
        workers = list(zip(self._worker_versions, self._workers_free, strict=True))
        for version, sessions in waiting.items():
            able = sum(of == version and free <= self.now for of, free in workers)
            if able:
                yield version, sessions[: able * WORKER_SLOTS]

    def _assign(self, needs: dict[int, int]) -> None:
        """Gives each version in need a worker, the oldest first, then more to those that have most to do for each."""
        if not needs:
            return
        targets = dict.fromkeys(list(needs)[:WORKERS], 1)
        while sum(targets.values()) < WORKERS:
            most = max(targets, key=lambda version: needs[version] / (WORKER_SLOTS * targets[version]))
            if needs[most] <= WORKER_SLOTS * targets[most]:
                break  # whatever is left keeps its version
            targets[most] += 1
        spare = []
        for worker, version in enumerate(self._worker_versions):
            if targets.get(version, 0):
                targets[version] -= 1
            else:
                spare.append(worker)
        for version in [version for version, count in targets.items() for _ in range(count)]:
            worker = spare.pop()
            self._worker_versions[worker] = version
            self._workers_free[worker] = max(self._workers_free[worker], self.now) + LOAD

    def _decode(self, version: int, sessions: Sequence[Session]) -> int:
        """Returns how many tokens were prefilled."""
        decoder, prefilled = self._decoders[version], 0
        while behind := [each for each in sessions if each.fed < len(each.tokens) - 1]:
            self._read(decoder, behind)
            prefilled += len(behind)
        logprobs = self._read(decoder, sessions)
        reached = np.exp(logprobs).cumsum(-1) > self._random.random((len(sessions), 1)) * (1.0 - 1e-6)
        chosen = reached.argmax(-1)
        found = logprobs[np.arange(len(chosen)), chosen]
        self.totals["sampled"] += len(sessions)
        for each, token, logprob in zip(sessions, chosen.tolist(), found.tolist(), strict=True):
            each.tokens.append(token)
            each.logprobs.append(logprob)
            each.versions.append(version)
            each.turns[-1].append(token)
            if len(each.turns[-1]) == TURN_TOKENS[each.turn]:
                self._turn_ended(each)
        return prefilled

    def _read(self, decoder: Decoder, sessions: Sequence[Session], place: int | None = None) -> FloatRows:
        """Reads the next token of each session, or once more the one at ``place``."""
        slots = np.array([each.slot for each in sessions])
        places = np.array([each.fed if place is None else place for each in sessions])
        ids = np.array([each.tokens[at] for each, at in zip(sessions, places, strict=True)])
        for each in sessions if place is None else ():
            each.fed += 1
        return decoder.read(self._cache, slots, ids, places)

    def _turn_ended(self, session: Session) -> None:
        if self.cell.fails_after(session.name) == session.turn:
            self._fail(session)
        elif session.turn + 1 == len(TURN_TOKENS):
            session.reward = session.group.task.reward(session.turns)
            self._end(session)
        else:
            answer = session.group.task.answer(session.turn)
            session.ready = self.now + TICK + self.cell.pause_of(session.name, session.turn)
            session.tokens += answer
            session.logprobs += [nan] * len(answer)
            session.versions += [-1] * len(answer)
            session.turn += 1
            session.turns.append([])

    def _fail(self, session: Session) -> None:
        """The environment ends without a reward."""
        session.has_failed = True
        if self.cell.failures == "reward 0":
            session.reward = 0.0
        else:
            self.totals["failed"] += session.sampled
        if self.cell.failures == "replaced":
            self._replace(session)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        self._running.remove(session)
        self._free.append(session.slot)
        group = session.group
        if not all(each.has_ended for each in group.members):
            return
        if len(group.valid) > 1:
            self._ended.append(group)
            return
        self._lost += 1
        self.totals["wasted"] += sum(each.sampled for each in group.valid)
        if self._is_pinned:
            self._window.give_back(group.version, group.deadline)


def _trajectory(session: Session, step: int) -> Trajectory:
    tokens, version, group = session.tokens, session.version, session.group
    mask = np.array([each >= 0 for each in session.versions[1:]], np.uint8)
    assert session.reward is not None
    return Trajectory(
        trajectory_id=session.name, group_id=group.name, prompt_id=group.name, task_id="pinning",
        sample_index=session.member, group_size=len(group.valid), behaviour_version=version, reference_version=0,
        trained_step=step, staleness=step - version, prompt_token_ids=np.array(tokens[:1], np.int32),
        response_token_ids=np.array(tokens[1:], np.int32), logprobs=np.array(session.logprobs[1:], np.float32),
        loss_mask=mask, sampling=SamplingParams(max_tokens=LENGTH), reward=session.reward, reward_valid=True,
        reward_components={}, verifier_log="", finish_reason="stop", started_at=0.0, finished_at=0.0,
        worker_history=(Segment("sampler", 0, len(mask) - 1, "new", version),), length_tokens=len(mask),
    )  # fmt: skip
