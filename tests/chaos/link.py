"""The link between the service's host and the one that has joined, each way of which can be cut.

The run itself, and all it starts but that host, goes into a network namespace of its own first (``go_apart``), and is
one end of the link; the host is another namespace, and the other end.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.hosts import Hosts, address_of, apart, has_hosts

HERE: Final = 0
JOINED: Final = 1
WAYS: Final = {"from host": (JOINED, HERE), "to host": (HERE, JOINED)}
_APART: Final = "DORA_CHAOS_IS_APART"


def is_apart() -> bool:
    """Whether this process is in a network namespace of its own."""
    return _APART in os.environ


def go_apart(argv: Sequence[str]) -> None:
    """Becomes ``python argv`` in such a namespace, where this user may have one; else returns."""
    if not is_apart() and has_hosts():
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        line = apart([sys.executable, *argv])
        os.execvpe(line[0], line, kept | {_APART: "1"})


class HostLink:
    """``address``: the service's host. ``inside``: the beginning of the command line of what runs on the joined one."""

    def __init__(self) -> None:
        self.address = address_of(HERE)
        self.inside: list[str] = []
        self._hosts = Hosts(2)

    def __enter__(self) -> Self:
        self._hosts.__enter__()
        self._hosts.be(HERE)
        holder = self._hosts.start(JOINED, ["cat"])  # the host is there, whoever of its processes is killed
        self.inside = [
            "nsenter",
            "--user",
            "--preserve-credentials",
            "--net",
            f"--target={holder.pid}",
            f"--wd={Path.cwd()}",
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._hosts.__exit__(*exception)

    def cut(self, way: str) -> None:
        """Until ``mend``, no packet gets through that way: one of WAYS."""
        self._hosts.cut(*WAYS[way])

    def mend(self, way: str) -> None:
        self._hosts.mend(*WAYS[way])

    @property
    def packets_cut(self) -> int:
        """That were sent where it was cut: none has arrived."""
        return self._hosts.packets_cut
