"""Limits of sessions that the service checks."""

from typing import Final

import numpy as np

from dora.config import Config
from dora.core.state import State
from dora.data.types import Prompt
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.turn_order import TurnLimits, TurnOrder
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded
from tests.unit.effects.rows import Place, Row, Seen
from tests.unit.test_branches import Session


def forks(config: Config, _: Place) -> int:
    """The number of times that a session may fork."""
    session = Session((1,))
    limits = TurnLimits.of(config, 0, session.buffer.sampling)
    for done in range(100):
        given = np.ones(1, "<i4").tobytes()
        request = pb.TurnRequest(turn=done + 1, first_token=0, given_token_ids=given)
        try:
            order = TurnOrder.parse(request, session.entry, limits)
        except LimitExceeded:
            return done
        assert order.is_fork
        session.ask(1, (order.after_turn, 0))
        session.sample(1, "w0")
    return 100


def opened(config: Config, _: Place) -> int:
    """The number of sessions that clients may open."""
    environments, ledger = Environments(ResponseBuffer(config.rollout), State(config)), PromptLedger(Journal(), 1000)
    for number in range(20):
        ledger.submit([Prompt(f"p{number}", "", (), group_size=1000, environment="open")])
        try:
            environments.check_room(f"p{number}", 1000, ledger, config.sessions.open_max)
        except LimitExceeded:
            return 1000 * number
    return 20_000


ROWS: Final[dict[str, Row]] = {
    "sessions.forks": Seen(7, forks, 7),
    "sessions.open_max": Seen(7000, opened, 7000),
}
