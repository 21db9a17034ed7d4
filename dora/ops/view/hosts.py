"""The hosts of a running service: as a table, and in one line."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from dora.ops.view.numbers import NONE, size
from dora.ops.view.tables import Column, Sheet
from dora.rpc.dora_pb2 import HostStatus, Status

STATE_STYLES: Final = {
    "ready": "green",
    "draining": "cyan",
    "expected": "yellow",
    "failed": "bold red",
    "lost": "bold red",
}

HOST_COLUMNS: Final[Sequence[Column[HostStatus]]] = (
    Column(
        "host",
        "its name, for `drain` and `scale --host`; `local`: the service's own",
        lambda row: row.name,
        words=True,
    ),
    Column(
        "state",
        "`ready`; `draining`: its workers are draining; `drained`: its workers ended as requested "
        "(hosts that have left are below the table); `failed`: no worker may be restarted; `lost`: its "
        "agent's connection broke (the reason is below the table); `expected`: "
        "its agent has not reconnected since the service's restart",
        lambda row: Text(row.state, style=STATE_STYLES.get(row.state, "dim")),
        words=True,
    ),
    Column(
        "workers",
        "those that host a version, out of its target number",
        lambda row: f"{row.workers_ready}/{row.workers}",
    ),
    Column(
        "versions",
        "the policy versions stored on it",
        lambda row: ", ".join(f"v{version}" for version in row.versions[-4:]) or NONE,
        words=True,
    ),
    Column("place", "as given by `dora host --zone`", lambda row: row.zone or NONE, words=True, rank=4),
    Column("cores", "of its processor", lambda row: f"{row.capacity.cores:,}", rank=2),
    Column(
        "memory",
        "free, out of the total",
        lambda row: f"{size(row.capacity.memory_free_bytes)}/{size(row.capacity.memory_bytes)}",
        rank=1,
    ),
    Column("GPUs", "found by its driver", lambda row: f"{len(row.capacity.gpus):,}", rank=2),
    Column(
        "speed",
        "of its workers' steps, measured by kind of machine, as a multiple of that of `balance.cost`",
        lambda row: f"{row.speed:.2f}" if row.speed else NONE,
        rank=3,
    ),
    Column("epoch", "number of the join, over all hosts; 0: the service's own", lambda row: f"{row.epoch:,}", rank=3),
    Column("pid", "its agent's process", lambda row: str(row.pid or NONE), rank=4),
)


def hosts_table(status: Status) -> Sheet[HostStatus]:
    """The hosts; below them the reasons of losses and faults, and the hosts that have left."""
    there = [row for row in status.hosts if not _has_left(row)]
    notes = [f"{row.name}: {row.reason}" for row in there if row.reason]
    if left := [f"{row.name}{f' ({row.reason})' * bool(row.reason)}" for row in status.hosts if _has_left(row)]:
        notes.append(f"left, as was asked: {', '.join(left)}")
    return Sheet(HOST_COLUMNS, there, "hosts", notes=notes)


def notice_rows(status: Status) -> list[tuple[str, str]]:
    """Returns the hosts that leave by a deadline, with the cause and the time left."""
    return [
        (f"host {row.name}", f"leaves: {row.reason}; {row.leaves_in_s:.0f} s left")
        for row in status.hosts
        if row.leaves_in_s
    ]


def _has_left(row: HostStatus) -> bool:
    return row.state == "drained" and bool(row.epoch)


def hosts_line(status: Status) -> str:
    """Each connected host with its workers, then the number of lost hosts."""
    there = [row for row in status.hosts if row.state not in ("lost", "drained") or not row.epoch]
    words = [
        f"{row.name} {row.workers_ready}/{row.workers}{'' if row.state == 'ready' else ' ' + row.state}"
        for row in there
    ]
    lost = [row.name for row in status.hosts if row.state == "lost"]
    return ", ".join(words) + (f"; lost: {', '.join(lost)}" if lost else "")
