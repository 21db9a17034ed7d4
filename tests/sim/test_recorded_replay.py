"""Events that were recorded once, in small clusters with and without faults, replay to the commands of then.

Beside each log lies one CRC-32 an event, of its commands: the first event whose commands differ is named.
"""

import gzip
import struct
from dataclasses import fields
from pathlib import Path
from zlib import crc32

import msgpack
import pytest

from dora.core import commands as do
from dora.core.policies import POLICIES
from dora.journal import frames
from dora.journal.log import LOG_FOLDER
from dora.orchestrator.recording.eventlog import EventLog
from dora.orchestrator.recovery.replay import Replay

RECORDED = Path(__file__).parents[1] / "fixtures" / "replay"
NAMES = sorted(path.name.removesuffix(".log.gz") for path in RECORDED.glob("*.log.gz"))


def checksum(commands: tuple[do.Command, ...]) -> int:
    """CRC-32 of commands, by the names and values of their fields."""
    plain = [
        (type(command).__name__, {field.name: getattr(command, field.name) for field in fields(command)})
        for command in commands
    ]
    return crc32(msgpack.packb(plain, unicode_errors="surrogatepass"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_replays_to_the_same_commands(name: str, tmp_path: Path) -> None:
    path = frames.path_of(tmp_path / LOG_FOLDER, 1)
    path.parent.mkdir()
    path.write_bytes(gzip.decompress((RECORDED / f"{name}.log.gz").read_bytes()))
    packed = gzip.decompress((RECORDED / f"{name}.commands.gz").read_bytes())
    expected = struct.unpack(f"<{len(packed) // 4}I", packed)
    log = EventLog(tmp_path)
    decisions = 0
    for decision in Replay(log.config, log):
        assert not decision.failure, f"event {decision.number}: {decision.failure}"
        got = 0 if decision.refusal else checksum(decision.commands)
        assert got == expected[decision.number - 1], f"event {decision.number}, {decision.event}: {decision.commands}"
        decisions += 1
    assert decisions == len(expected)


def test_every_strategy_has_recorded_logs() -> None:
    assert {name.partition("-")[2] for name in NAMES} >= set(POLICIES)
