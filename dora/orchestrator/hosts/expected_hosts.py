"""Hosts of an earlier incarnation, until their agents return or are given up.

Their workers and pools need no agent to return: they connect with their old tokens. Decisions about them are sent to
the agent when it returns.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from dora.host.command import pool_id_of
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import ServiceTokens


@dataclass(slots=True)
class ExpectedHost:
    """Describes an expected host with the ``names`` of its workers and its pool."""

    epoch: int
    names: set[str]
    distrusted: set[str] = field(default_factory=set)  # to be killed and started again

    def workers_of(self, name: str) -> set[str]:
        """Returns all names but the pool's. ``name`` is the host's."""
        return self.names - {pool_id_of(name)}


class ExpectedHosts:
    """Holds expected hosts by name. The ledger's ``stands`` are [epoch, {worker or pool: mark of its token}]."""

    def __init__(self, stands: Mapping[str, Any], tokens: ServiceTokens) -> None:
        """Makes the tokens of all these workers and pools valid."""
        self._tokens = tokens
        self._hosts = {name: ExpectedHost(epoch, set(marks)) for name, (epoch, marks) in stands.items()}
        for _, marks in stands.values():
            for name, mark in marks.items():
                tokens.known_again(name, mark)

    def __contains__(self, host: str) -> bool:
        return host in self._hosts

    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def statuses(self) -> list[pb.HostStatus]:
        why = "its agent has not returned since the service was restarted"
        return [
            pb.HostStatus(name=name, state="expected", epoch=host.epoch, workers=len(host.workers_of(name)), reason=why)
            for name, host in sorted(self._hosts.items())
        ]

    def members(self) -> Set[str]:
        return {name for host in self._hosts.values() for name in host.names}

    def host_of(self, name: str) -> str | None:
        return next((host for host, expected in self._hosts.items() if name in expected.names), None)

    def orphaned(self, hello: pb.HostHello) -> bool:
        """Returns whether an agent's hello has the expected processes: those of the same epoch."""
        expected = self._hosts.get(hello.name)
        return expected is not None and hello.HasField("kept") and hello.kept.epoch == expected.epoch

    def take(self, host: str) -> ExpectedHost:
        """Removes a host from the expected ones. Its tokens stay valid."""
        return self._hosts.pop(host)

    def distrust(self, name: str) -> str | None:
        """Revokes the token of a worker or pool, which is killed and started again. Returns its host if that is
        expected.
        """
        host = self.host_of(name)
        if host is not None:
            self._hosts[host].distrusted.add(name)
            self._tokens.ended(name)
        return host

    def release(self, worker_id: str) -> str | None:
        """Marks a worker as ending for good. Returns its host if that is expected."""
        host = self.host_of(worker_id)
        if host is not None:
            self._hosts[host].names.discard(worker_id)
            self._tokens.ended(worker_id)
        return host

    def stand(self, host: str) -> tuple[int, dict[str, str]]:
        """Returns the epoch, and the marks of the valid tokens."""
        expected = self._hosts[host]
        names = sorted(expected.names - expected.distrusted)
        return expected.epoch, {name: self._tokens.mark_of(name) for name in names}
