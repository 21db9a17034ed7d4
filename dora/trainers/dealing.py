"""Sends rows of a step from the leader to the other ranks: in nearly equal parts, as bytes.

Only the leader has whole groups and computes advantages; a rank gets responses with their advantages.
"""

from collections.abc import Sequence

import numpy as np

from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import trajectory_from_wire, trajectory_to_wire
from dora.trainers.batches import karmarkar_karp
from dora.trainers.objectives.batch import Row

_ADVANTAGE = np.dtype("<f8")


def dealt(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Returns the rows of each rank, with nearly equal numbers of tokens. The first may have the most."""
    parts = karmarkar_karp([row.length_tokens for row in rows], ranks)
    return [[rows[index] for index in part] for part in parts]


def rows_to_bytes(rows: Sequence[Row]) -> bytes:
    """Encodes the count of rows (8 bytes), their advantages (8 each), and the responses, a ``pb.TrajectoryBatch``."""
    message = pb.TrajectoryBatch()
    for row in rows:
        part = message.groups.add(group_id=row.trajectory.group_id)
        part.trajectories.append(trajectory_to_wire(row.trajectory))
    numbers = np.array([row.advantage for row in rows], _ADVANTAGE)
    return len(rows).to_bytes(8, "little") + numbers.tobytes() + message.SerializeToString()


def rows_from_bytes(content: bytes) -> list[Row]:
    count = int.from_bytes(content[:8], "little")
    advantages = np.frombuffer(content, _ADVANTAGE, count, 8) if count else ()
    message = pb.TrajectoryBatch.FromString(content[8 + count * _ADVANTAGE.itemsize :])
    trajectories = (trajectory_from_wire(each.trajectories[0]) for each in message.groups)
    return [Row(each, float(advantage)) for each, advantage in zip(trajectories, advantages, strict=True)]
