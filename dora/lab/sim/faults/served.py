"""The simulated world around a core with its own service: response buffer, executor and journal are the real ones.

The run's ledger checks each command, then the service's own executor carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from zlib import crc32

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.faults.service import SimLog, SimService
from dora.lab.sim.ledger import Violation
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.workload import SimPrompt
from dora.lab.sim.world import World


@dataclass(frozen=True, slots=True)
class Habits:
    """Delays of the processes around a core, apart from faults. They determine the order of events."""

    prompts_most_s: float = 1.0  # until prompts are available
    verdict_most_s: float = 1.0  # until a verdict
    trainer_rests_most_s: float = 0.0  # from a commit until the trainer requests the next step
    odd_groups: float = 0.1  # share of prompts with a smaller group
    last_prompts: int | None = None  # the run ends after this many more prompts; None: by draining the service

    @classmethod
    def drawn(cls, random: Random) -> "Habits":
        return cls(
            random.choice((0.1, 1.0, 5.0)),
            random.choice((0.1, 1.0, 5.0)),
            random.choice((0.0, 0.0, 2.0, 8.0)),
            random.choice((0.1, 0.5)),
            random.choice((None, 0, 6)),
        )


class ServedWorld(World):
    """A World that uses the service's shell. Prompts and verdicts are delayed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.random = Random(f"world {seed}")
        self.habits = Habits.drawn(Random(f"habits {seed}"))
        self.logged = SimLog()  # records that the orchestrators gave to the journal
        self.prompts_left: int | None = None  # None: endless
        self.prompts_again: list[SimPrompt] = []  # drawn prompts whose further records were lost
        self._service: SimService | None = None
        self._offers: dict[str, on.OfferedPrompt] = {}
        self._priorities = Random(f"priorities {seed}").choice((1, 1, 1, 3))
        self._checks: dict[type, Callable[[Any], None]] = {  # in addition to the ledger's own
            do.ScoreRequest: self._check_finished,
            do.ScoreEvaluated: self._check_finished,
            do.BreakOffSession: self._check_broken_off,
            do.DeliverGroup: self._check_delivered,
            do.CloseStep: self._check_closed,
        }
        super().__init__(scenario, seed)

    @property
    def service(self) -> SimService:
        if self._service is None:
            self._service = SimService(self, self.logged)
        return self._service

    def take_over(self, event: on.Progress) -> None:
        self.service.taken_over(self.machine, event)
        worker = self.workers.get(event.worker_id)
        if event.tokens and (worker is None or worker.epoch != event.epoch):
            raise Violation(f"a report of the lost epoch {event.epoch} of {event.worker_id} is taken over (C2)")
        for request_id in event.tokens:
            self.ledger.take_over(event, request_id)

    def carry_out(self, event: on.Event, commands: list[do.Command]) -> None:
        """Checks each command against the ledger, and carries it out with the service's own executor."""
        service = self.service
        service.handled(self.machine, event)
        for command in commands:
            check = self._books.get(type(command)) or self._checks.get(type(command))
            if check is not None:
                check(command)
            service.executor.carry_out(command)
        service.carried_out(event)

    def posted(self, event: on.Event) -> None:
        if isinstance(event, on.PromptsOffered):
            event = replace(event, prompts=tuple(self._offers[each.prompt_id] for each in event.prompts))
        elif isinstance(event, on.RequestScored):
            self.ledger.scored(event.request_id, event.reward if event.valid else None)
        self.post(event)

    def _check_finished(self, command: do.ScoreRequest | do.ScoreEvaluated) -> None:
        self.ledger.check_finished(command.request_id)

    def _check_broken_off(self, command: do.BreakOffSession) -> None:
        self.ledger.break_off(command)

    def _check_delivered(self, command: do.DeliverGroup) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.deliver(command)

    def _check_closed(self, command: do.CloseStep) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.closed(command)

    # ------------------------------------------------------------------------------------------- prompts and verdicts

    def priority(self, prompt_id: str) -> int:
        """Prompts have different priorities in a quarter of the seeds."""
        return crc32(prompt_id.encode()) % self._priorities

    def prompts_s(self) -> float:
        return self.random.random() * self.habits.prompts_most_s

    def drawn(self, most: int) -> list[SimPrompt]:
        """Some prompts: at least one while any are left, and possibly fewer than ``most``."""
        count = self.random.randint(1, most)
        again, self.prompts_again = self.prompts_again[:count], self.prompts_again[count:]
        count -= len(again)
        if self.prompts_left is not None:
            count = min(count, self.prompts_left)
            self.prompts_left -= count
        drawn = [*again, *(self._sized(prompt) for prompt in self.prompts.take(count))]
        self.ledger.offer(drawn)
        self._offers.update(
            (prompt.prompt_id, offered) for prompt, offered in zip(drawn, self._offered(drawn), strict=True)
        )
        return drawn

    def known_prompt(self, prompt_id: str) -> on.OfferedPrompt:
        return self._offers[prompt_id]

    def _sized(self, prompt: SimPrompt) -> SimPrompt:
        if self.random.random() >= self.habits.odd_groups:
            return prompt
        size = self.random.randint(1, prompt.group_size)
        size_min = min(prompt.group_size_min, size)
        return replace(
            prompt, group_size=size, group_size_min=size_min, lengths=prompt.lengths[:size], turns=prompt.turns[:size]
        )

    def verdict_s(self) -> float:
        return self.random.random() * self.habits.verdict_most_s

    def evaluate(self, evaluation_id: str, count: int, version: int = -1, share: float = 0.0) -> on.EvaluationRequested:
        event = super().evaluate(evaluation_id, count, version, share)
        self.service.ask_evaluation(evaluation_id, list(self.ledger.evaluations[evaluation_id].todo.values()))
        return event
