"""An evaluation's results in the service: streamed, bounded, and forgotten in the book as they end."""

import numpy as np
import pytest

from dora.config import RolloutConfig
from dora.core import commands as do
from dora.core import events as on
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt, Reward
from dora.errors import Conflict
from dora.orchestrator.rollout import evaluations as module
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import UNREAD, Evaluations, EvaluationStream
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import TOKEN, SegmentStart
from dora.rpc.errors import LimitExceeded
from tests.part_core import PartCore
from tests.refusals import refused

PROMPTS = [Prompt(f"p{number}", "task", (1, 2), group_size=2) for number in range(3)]


class Service:
    """Evaluations on a book, and what the core was asked to end."""

    def __init__(self) -> None:
        self.buffer = ResponseBuffer(RolloutConfig())
        self.rows = {f"e1.{group}.{sample}": 2 * group + sample for group in range(3) for sample in range(2)}
        self.core = PartCore(self.rows)
        self.evaluations = Evaluations(self.core, self.buffer, Environments(self.buffer, self.core.state))

    def open(self, name: str) -> EvaluationStream:
        stream = self.evaluations.prepared(name, PROMPTS)
        self.evaluations.open(stream)
        return stream

    def carry_out(self, command: do.Command) -> None:
        self.evaluations.handlers[type(command)](command)

    def finish(self, group: int, tokens: int = 4) -> None:
        """Both responses of a group end with so many tokens, and are scored."""
        names = tuple(name for name in self.rows if name.startswith(f"e1.{group}."))
        self.carry_out(do.BeginEvaluationGroup("e1", f"e1.{group}", f"p{group}", 5, names))
        for name in names:
            entry = self.buffer[name]
            entry.segment_starts.append(SegmentStart("w0", 0, "new"))
            entry.delivered += np.zeros(tokens, TOKEN).tobytes()
            entry.finish_reason, entry.reward = "stop", Reward(0.5)
        self.carry_out(do.EndEvaluationGroup("e1", f"e1.{group}"))


async def test_results_are_streamed_and_then_why_it_ends() -> None:
    service = Service()
    stream = service.open("name")
    service.finish(0)
    service.carry_out(do.BeginEvaluationGroup("e1", "e1.1", "p1", 5, ("e1.1.0", "e1.1.1")))
    service.carry_out(do.EndEvaluationGroup("e1", "e1.1", "it is too long"))
    service.carry_out(do.BeginEvaluationGroup("e1", "e1.2", "p2", 5, ("e1.2.0", "e1.2.1")))
    assert service.buffer.get("e1.2.0") is not None and not list(service.buffer.groups()), "no group of a step"
    service.carry_out(do.EndEvaluation("e1", "asked for"))
    group, refused = [result async for result in stream.results()]
    assert isinstance(group, TrajectoryGroup) and refused == ("p1", "it is too long")
    assert {(each.behaviour_version, each.trained_step, each.staleness) for each in group.trajectories} == {(5, 5, 0)}
    assert stream.reason == "asked for" and not stream.unread_bytes and not service.evaluations.running
    assert all(service.buffer.get(name) is None for name in service.rows)


async def test_results_that_nobody_reads_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_BYTES_MAX", 1000)
    service = Service()
    stream = service.open("")
    service.finish(0)
    await anext(stream.results())
    service.finish(1, tokens=16)
    assert not service.core.posted, "the first one was read"
    service.finish(2, tokens=16)
    assert service.core.posted == [on.EvaluationCancelled("e1", UNREAD)]


def test_what_has_no_room_or_an_id_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    with refused(Conflict, names=("p0",)):
        service.evaluations.prepared("", [PROMPTS[0], PROMPTS[0]])
    monkeypatch.setattr(module, "PROMPT_BYTES_MAX", 300)
    first = service.open("")
    with refused(LimitExceeded, field="bytes in memory", value=246, names=("54",)):
        service.evaluations.prepared("", PROMPTS)
    service.carry_out(do.EndEvaluation("e1", "asked for"))
    assert service.open("").evaluation_id != first.evaluation_id
