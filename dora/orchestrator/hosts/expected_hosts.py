"""Hosts of an earlier life of the service, until their agents have come back or are given up.

Their workers and pools need no agent for it: they connect with the tokens that they have, and are let in by these. What
was decided of one of them meanwhile is told to the agent when it comes.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from dora.host.command import pool_id_of
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Tokens


@dataclass(slots=True)
class ExpectedHost:
    """``names``: of its workers and its pool."""

    epoch: int
    names: set[str]
    distrusted: set[str] = field(default_factory=set)  # to be killed, and started again

    def workers_of(self, name: str) -> set[str]:
        """All but the pool. ``name``: the host's."""
        return self.names - {pool_id_of(name)}


class ExpectedHosts:
    """By name. ``stands``: as the ledger has them, [epoch, {worker or pool: mark of its token}]."""

    def __init__(self, stands: Mapping[str, Any], tokens: Tokens) -> None:
        """From now on the tokens of all these workers and pools are good."""
        self._tokens = tokens
        self._hosts = {name: ExpectedHost(epoch, set(marks)) for name, (epoch, marks) in stands.items()}
        for _, marks in stands.values():
            for name, mark in marks.items():
                tokens.known_again(name, mark)

    def __contains__(self, host: str) -> bool:
        return host in self._hosts

    def names(self) -> tuple[str, ...]:
        """Of the hosts."""
        return tuple(self._hosts)

    def statuses(self) -> list[pb.HostStatus]:
        """As operators see them."""
        why = "its agent has not come back yet since the service was started again"
        return [
            pb.HostStatus(name=name, state="awaited", epoch=host.epoch, workers=len(host.workers_of(name)), reason=why)
            for name, host in sorted(self._hosts.items())
        ]

    def members(self) -> Set[str]:
        """All workers and pools of these hosts."""
        return {name for host in self._hosts.values() for name in host.names}

    def host_of(self, name: str) -> str | None:
        """Of a worker or pool."""
        return next((host for host, expected in self._hosts.items() if name in expected.names), None)

    def orphaned(self, hello: pb.HostHello) -> bool:
        """Whether the agent that says hello has the processes which are awaited: those of the same epoch."""
        expected = self._hosts.get(hello.name)
        return expected is not None and hello.HasField("kept") and hello.kept.epoch == expected.epoch

    def take(self, host: str) -> ExpectedHost:
        """It is awaited no more. Its tokens stay as they are."""
        return self._hosts.pop(host)

    def distrust(self, name: str) -> str | None:
        """A worker or pool is to be killed, and started again: what it connected with is good for nothing any more.

        Returns its host, where that is awaited.
        """
        host = self.host_of(name)
        if host is not None:
            self._hosts[host].distrusted.add(name)
            self._tokens.ended(name)
        return host

    def let_go(self, worker_id: str) -> str | None:
        """A worker is to end, and not to be started again. Returns its host likewise."""
        host = self.host_of(worker_id)
        if host is not None:
            self._hosts[host].names.discard(worker_id)
            self._tokens.ended(worker_id)
        return host

    def stand(self, host: str) -> tuple[int, dict[str, str]]:
        """The epoch, and the marks of the tokens that are good."""
        expected = self._hosts[host]
        names = sorted(expected.names - expected.distrusted)
        return expected.epoch, {name: self._tokens.mark_of(name) for name in names}
