"""The pools of a running service: as a table, and in one line."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from dora.ops.view.numbers import NONE, size
from dora.ops.view.tables import Column, Sheet
from dora.rpc.dora_pb2 import PoolStatus, Status

STATE_STYLES: Final = {"ready": "green", "joining": "yellow", "lost": "bold red"}
LEFT: Final = "drained"  # its host was asked to leave

POOL_COLUMNS: Final[Sequence[Column[PoolStatus]]] = (
    Column("pool", "its id, for `migrate --to`", lambda row: row.pool_id, words=True),
    Column(
        "state",
        "`joining`: no worker has reported its KV size yet; `ready`; `lost`: its connection broke (the reason "
        "is below the table)",
        lambda row: Text(row.state, style=STATE_STYLES.get(row.state, "dim")),
        words=True,
    ),
    Column("parked", "requests whose KV it stores", lambda row: f"{row.parked:,}"),
    Column("tokens", "their KV, out of its capacity", lambda row: f"{row.kv_tokens:,}/{row.capacity_tokens:,}"),
    Column(
        "memory",
        "host memory in use, including transfers in progress, out of `kv.pool_mb`",
        lambda row: f"{size(row.memory_bytes)}/{size(row.memory_most_bytes)}",
    ),
    Column(
        "disk",
        "disk space in use, out of `kv.spill_mb`",
        lambda row: f"{size(row.spill_bytes)}/{size(row.spill_most_bytes)}" if row.spill_most_bytes else NONE,
        rank=1,
    ),
    Column("pinned", "memory pinned against swapping", lambda row: size(row.pinned_bytes), rank=2),
    Column("pid", "the pool's process", lambda row: str(row.pid or NONE), rank=3),
)


def pools_table(status: Status) -> Sheet[PoolStatus]:
    """The pools; below them the reasons of losses, and the pools whose hosts have left."""
    there = [row for row in status.pools if row.state != LEFT]
    notes = [f"{row.pool_id}: {row.reason}" for row in there if row.reason]
    if left := [row.pool_id for row in status.pools if row.state == LEFT]:
        notes.append(f"left, as was asked: {', '.join(left)}")
    return Sheet(POOL_COLUMNS, there, "pools", notes=notes)


def pools_line(status: Status) -> str:
    if not status.pools:
        return "none"
    parked = sum(row.parked for row in status.pools)
    memory_bytes, spill_bytes = (
        sum(getattr(row, name) for row in status.pools) for name in ("memory_bytes", "spill_bytes")
    )
    disk = f", {size(spill_bytes)} on disk" if spill_bytes else ""
    states = ", ".join(f"{row.pool_id} {row.state}" for row in status.pools if row.state != LEFT) or "none"
    return f"{states}: {parked:,} parked, {size(memory_bytes)} in memory{disk}"
