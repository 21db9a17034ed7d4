"""The simulated world around a core that has its own service: book, executor and journal are those of a real one.

Each command is checked against the books of the run, then the service's own executor carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from zlib import crc32

from dora.core import commands as do
from dora.core import events as on
from dora.sim.ledger import Violation
from dora.sim.scenario import Scenario
from dora.sim.service import Facts, Service
from dora.sim.workload import SimPrompt
from dora.sim.world import World


@dataclass(frozen=True, slots=True)
class Habits:
    """How those around a core keep it waiting, faults apart: the order of events follows from it."""

    prompts_most_s: float = 1.0  # until prompts are there
    verdict_most_s: float = 1.0  # until the verifier has judged a response
    trainer_rests_most_s: float = 0.0  # from a commit until the trainer asks for the next step
    odd_groups: float = 0.1  # share of prompts that bring a smaller group
    last_prompts: int | None = None  # the run ends with so many more; None: with a service that drains

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
    """A World whose shell is the service's. Prompts and verdicts take their time."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.random = Random(f"world {seed}")
        self.habits = Habits.drawn(Random(f"habits {seed}"))
        self.logged = Facts()  # that the orchestrators have told the journal
        self.prompts_left: int | None = None  # None: without end
        self.prompts_again: list[SimPrompt] = []  # that were drawn, and what was to become of them is lost
        self._service: Service | None = None
        self._offers: dict[str, on.OfferedPrompt] = {}
        self._priorities = Random(f"priorities {seed}").choice((1, 1, 1, 3))
        self._checks: dict[type, Callable[[Any], None]] = {  # beside the books' own
            do.ScoreRequest: self._check_finished,
            do.ScoreEvaluated: self._check_finished,
            do.DeliverGroup: self._check_delivered,
            do.CloseStep: self._check_closed,
        }
        super().__init__(scenario, seed)

    @property
    def service(self) -> Service:
        """The one that lives now."""
        if self._service is None:
            self._service = Service(self, self.logged)
        return self._service

    def take_over(self, event: on.Progress) -> None:
        self.service.taken_over(self.machine, event)
        worker = self.workers.get(event.worker_id)
        if event.tokens and (worker is None or worker.epoch != event.epoch):
            raise Violation(f"a report of the lost epoch {event.epoch} of {event.worker_id} is taken over (C2)")
        for request_id in event.tokens:
            self.ledger.take_over(event, request_id)

    def carry_out(self, event: on.Event, commands: list[do.Command]) -> None:
        """The books check each command, and the service's own executor carries it out."""
        service = self.service
        service.handled(self.machine, event)
        for command in commands:
            check = self._books.get(type(command)) or self._checks.get(type(command))
            if check is not None:
                check(command)
            service.executor.carry_out(command)
        service.carried_out(event)

    def posted(self, event: on.Event) -> None:
        """The executor tells the core of what it waited for."""
        if isinstance(event, on.PromptsOffered):
            event = replace(event, prompts=tuple(self._offers[each.prompt_id] for each in event.prompts))
        elif isinstance(event, on.RequestScored):
            self.ledger.scored(event.request_id)
        self.post(event)

    def _check_finished(self, command: do.ScoreRequest | do.ScoreEvaluated) -> None:
        self.ledger.check_finished(command.request_id)

    def _check_delivered(self, command: do.DeliverGroup) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.deliver(command)

    def _check_closed(self, command: do.CloseStep) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.closed(command)

    # ------------------------------------------------------------------------------------------- prompts and verdicts

    def priority(self, prompt_id: str) -> int:
        """In a quarter of the seeds prompts differ in it."""
        return crc32(prompt_id.encode()) % self._priorities

    def prompts_s(self) -> float:
        """Until prompts are there."""
        return self.random.random() * self.habits.prompts_most_s

    def drawn(self, asked: int) -> list[SimPrompt]:
        """At least one prompt, as long as there are any; it need not be as many as were asked for."""
        count = self.random.randint(1, asked)
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
        """As the core knows it."""
        return self._offers[prompt_id]

    def _sized(self, prompt: SimPrompt) -> SimPrompt:
        """Groups have the scenario's size at most; some are smaller."""
        if self.random.random() >= self.habits.odd_groups:
            return prompt
        size = self.random.randint(1, prompt.group_size)
        return replace(prompt, group_size=size, lengths=prompt.lengths[:size], turns=prompt.turns[:size])

    def verdict_s(self) -> float:
        """Until the verifier has judged a response."""
        return self.random.random() * self.habits.verdict_most_s

    def evaluate(self, evaluation_id: str, count: int, version: int = -1, share: float = 0.0) -> on.EvaluationAsked:
        event = super().evaluate(evaluation_id, count, version, share)
        self.service.ask_evaluation(evaluation_id, list(self.ledger.evaluations[evaluation_id].todo.values()))
        return event
