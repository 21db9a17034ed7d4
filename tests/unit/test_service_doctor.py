"""Verdicts of ``dora doctor --service``: a sound host has nothing to do, and each fault is one finding."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from dora.errors import InvalidValue
from dora.ops.doctor.service import Finding, findings_of
from dora.orchestrator.hosts.examinations import checked_examination
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def sound(host: str, other: str) -> pb.ExaminedHost:
    found = pb.HostExamination(
        dora_version="0.1.0",
        python_version="3.11.7",
        packages={"torch": "2.9", "vllm": "0.32"},
        capacity=pb.HostCapacity(cores=64, memory_bytes=1 << 38, memory_free_bytes=1 << 37),
        folder_free_bytes=1 << 36,
        disk_bytes_per_s=5e8,
        version_bytes=1 << 30,
        read_bytes_per_s=1e9,
        certificate=pb.Certificate(roles=["host"], ends_at=NOW.timestamp() + 30 * 86400),
        links=[pb.MeasuredLink(host=other, address="h:1", bytes_per_s=1e9, round_trip_s=1e-3)],
    )
    return pb.ExaminedHost(
        host=host, found=found, clock_error_s=0.001, load_s=1.5, kv_token_bytes=1024, workers=4, workers_ready=4
    )


def findings(change: Callable[[pb.ExaminedHost], object] = lambda host: None) -> list[Finding]:
    own, other = sound("local", "gpu-7"), sound("gpu-7", "local")
    change(other)
    return findings_of([other, own], NOW)


def test_sound_hosts_have_nothing_to_do() -> None:
    found = findings()
    assert all(each.ok and not each.action for each in found)
    assert [each.host for each in found] == ["local"] * 10 + ["gpu-7"] * 10
    assert {each.check for each in found} >= {"link to gpu-7", "certificate", "load", "move", "disk rate"}


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("workers", lambda host: setattr(host, "workers_ready", 3)),
        ("answer", lambda host: (setattr(host, "trouble", "no result in 60 s"), host.ClearField("found"))),
        ("versions", lambda host: setattr(host.found, "dora_version", "0.2.0")),
        ("versions", lambda host: host.found.packages.pop("vllm")),
        ("clock", lambda host: setattr(host, "clock_ahead_s", -2.0)),
        ("memory", lambda host: setattr(host.found.capacity, "memory_free_bytes", 1 << 30)),
        ("disk", lambda host: setattr(host.found, "folder_free_bytes", 1 << 29)),
        ("disk rate", lambda host: setattr(host.found, "disk_bytes_per_s", 1e6)),
        ("certificate", lambda host: setattr(host.found.certificate, "ends_at", NOW.timestamp() + 86400)),
        ("certificate", lambda host: setattr(host.found.certificate, "ends_at", NOW.timestamp() - 1)),
        ("certificate", lambda host: host.found.certificate.roles.__setitem__(slice(None), ["trainer"])),
        ("certificate", lambda host: setattr(host.found.certificate, "trouble", "the key does not fit")),
        ("link to local", lambda host: setattr(host.found.links[0], "trouble", "connection refused")),
        ("link to local", lambda host: setattr(host.found.links[0], "bytes_per_s", 1e6)),
        ("link to local", lambda host: setattr(host.found.links[0], "loss", 0.05)),
        ("load", lambda host: setattr(host.found, "version_bytes", 0)),
    ],
)
def test_a_fault_is_one_finding_that_says_what_to_do(check: str, change: Callable[[pb.ExaminedHost], object]) -> None:
    todo = [each for each in findings(change) if not each.ok]
    assert [(each.host, each.check) for each in todo] == [("gpu-7", check)] and todo[0].action


def test_a_measured_move_stands_before_an_estimated_one() -> None:
    moves = {
        each.host: each.found for each in findings(lambda host: setattr(host, "move_s", 0.25)) if each.check == "move"
    }
    assert "250 ms" in moves["gpu-7"] and "none yet" in moves["local"]


def test_figures_say_how_they_were_measured() -> None:
    def measure(host: pb.ExaminedHost) -> None:
        host.fetch_s, host.fetched_bytes = 2.0, 1 << 29
        host.found.fetch.CopyFrom(pb.FetchProbe(host="local", bytes=1 << 26, took_s=0.5))
        host.found.links[0].kv_bytes, host.found.links[0].kv_s = 1 << 20, 0.004

    found = {each.check: each for each in findings(measure) if each.host == "gpu-7"}
    assert all(each.ok for each in found.values())
    assert [found[name].how for name in ("clock", "load", "fetch", "move")] == ["now", "run", "run", "estimate"]
    assert "1.07 GB would take 8.00 s" in found["fetch from local"].found and found["fetch from local"].how == "probe"
    assert "1.05 MB of KV there and back in 4 ms" in found["move to local"].found


@pytest.mark.parametrize(
    ("check", "fetch", "kv_s"),
    [
        ("fetch from local", pb.FetchProbe(host="local", bytes=1 << 20, took_s=1.0), 0.1),
        ("fetch from local", pb.FetchProbe(host="local", trouble="it does not send v9"), 0.1),
        ("fetch from local", pb.FetchProbe(host="local"), 0.1),
        ("move to local", pb.FetchProbe(host="local", bytes=1 << 30, took_s=1.0), 1.5),
    ],
)
def test_a_probe_that_is_slow_or_fails_says_what_to_do(check: str, fetch: pb.FetchProbe, kv_s: float) -> None:
    def measure(host: pb.ExaminedHost) -> None:
        host.found.fetch.CopyFrom(fetch)
        host.found.links[0].kv_bytes, host.found.links[0].kv_s = 1 << 20, kv_s

    todo = [each for each in findings(measure) if not each.ok]
    assert [(each.host, each.check, each.how) for each in todo] == [("gpu-7", check, "probe")] and todo[0].action


@pytest.mark.parametrize(
    "found",
    [
        pb.HostExamination(links=[pb.MeasuredLink()] * 9),
        pb.HostExamination(packages={"other": "1"}),
        pb.HostExamination(certificate=pb.Certificate(roles=["x"] * 65)),
        pb.HostExamination(dora_version="x" * 1025),
        pb.HostExamination(links=[pb.MeasuredLink(trouble="a\nb")]),
        pb.HostExamination(sent_at=float("nan")),
        pb.HostExamination(links=[pb.MeasuredLink(loss=float("inf"))]),
        pb.HostExamination(links=[pb.MeasuredLink(kv_s=float("nan"))]),
        pb.HostExamination(fetch=pb.FetchProbe(took_s=float("inf"))),
        pb.HostExamination(fetch=pb.FetchProbe(trouble="x" * 1025)),
    ],
)
def test_a_service_refuses_a_result_that_is_too_large_or_not_finite(found: pb.HostExamination) -> None:
    with refused(InvalidValue, field="examined"):
        checked_examination(found)
