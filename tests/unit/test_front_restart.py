"""A front's last word on a session while its service restarts: nobody else would end the session."""

from typing import Any

from dora.agents.front.service import Service, ServiceSession
from dora.rpc.errors import ServiceUnavailable


class Restarting:
    """A client of a service that is gone for the first calls."""

    prompt_id = "one"

    def __init__(self, gone: int) -> None:
        self.gone = gone
        self.heard: list[Any] = []

    async def end(self, reward: float | None, **about: Any) -> None:
        self._hear(reward)

    async def withdraw(self, prompt_id: str, reason: str) -> None:
        self._hear(prompt_id)

    def _hear(self, what: Any) -> None:
        if self.gone:
            self.gone -= 1
            raise ServiceUnavailable("failed to connect to all addresses; last error: Connection refused")
        self.heard.append(what)


async def test_an_end_and_a_withdrawal_wait_for_the_restarted_service() -> None:
    """Else a session of one turn, whose reply its agent has, would stay open until the service's own limit."""
    service, client, session = Service("127.0.0.1:1", "token"), Restarting(2), Restarting(2)
    service._sessions = client  # type: ignore[assignment]
    one = ServiceSession(session, service._take_back)  # type: ignore[arg-type]
    await one.end(1.0)
    await one.give_up("its only turn has failed")
    assert (session.heard, client.heard) == ([1.0], ["one"])
