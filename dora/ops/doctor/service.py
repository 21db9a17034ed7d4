"""The verdicts on a running service's hosts: what each measured, and what to do if it is not as it should be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from dora.rpc import dora_pb2 as pb

OWN: Final = "local"  # the service's own host
CLOCK_S: Final = 1.0
EXPIRES_S: Final = 7 * 86400.0
MEMORY_SHARE: Final = 0.05  # of a host's memory that should be free
FREE_BYTES: Final = 1 << 30  # of the host's folder
DISK_BYTES_PER_S: Final = 20e6
LINK_BYTES_PER_S: Final = 10e6
LOSS: Final = 0.01
OF_HOSTS: Final = frozenset({"service", "host", "worker"})
MOVED_TOKENS: Final = 1024  # of the move that is estimated if none was measured
FETCH_S: Final = 60.0  # of a whole version, as a probe's rate promises
MOVED_S: Final = 1.0  # of a probe's KV there and back

How = Literal["now", "run", "probe", "estimate"]


@dataclass(frozen=True, slots=True)
class Finding:
    host: Annotated[str, "name of the host; `local` is the service's own"]
    check: Annotated[str, "what was examined; of a link also the other host"]
    ok: Annotated[bool, "whether it is as it should be"]
    found: Annotated[str, "what was measured"]
    action: Annotated[str, "what to do; empty: nothing"] = ""
    how: Annotated[
        How,
        "how it was measured: `now`, by this examination; in the `run`, at the last time; by a `probe` of this "
        "examination, which moved bytes; `estimate`, from other figures",
    ] = "now"


def findings_of(hosts: Sequence[pb.ExaminedHost], now: datetime | None = None) -> list[Finding]:
    at = (now or datetime.now(UTC)).timestamp()
    ordered = sorted(hosts, key=lambda each: (each.host != OWN, each.host))
    own = next((each.found for each in ordered if each.host == OWN), pb.HostExamination())
    return [finding for each in ordered for finding in _of_host(each, own, at)]


def _of_host(host: pb.ExaminedHost, own: pb.HostExamination, now: float) -> Iterator[Finding]:
    name = host.host
    is_whole = host.workers_ready >= host.workers
    action = "" if is_whole else "`dora workers` and the worker's log say why"
    yield Finding(name, "workers", is_whole, f"{host.workers_ready} of {host.workers} ready", action)
    if host.trouble:
        yield Finding(name, "answer", False, host.trouble, "look at the agent's log there, and at the network")
        return
    yield _versions(name, host.found, own)
    yield _clock(host)
    yield from _room(name, host.found)
    if host.found.HasField("certificate"):
        yield _certificate(name, host.found.certificate, now)
    yield from _links(name, host.found)
    yield from _load(host)
    yield from _move(host)


def _versions(name: str, found: pb.HostExamination, own: pb.HostExamination) -> Finding:
    here, there = _packages(found), _packages(own)
    names = sorted(here.keys() | there.keys())
    different = [f"{each} {there.get(each, 'none')}" for each in names if here.get(each) != there.get(each)]
    said = ", ".join(f"{package} {version}" for package, version in here.items())
    action = f"install what the service has: {', '.join(different)}" if different else ""
    return Finding(name, "versions", not different, said, action)


def _packages(found: pb.HostExamination) -> dict[str, str]:
    return {"dora": found.dora_version, **dict(sorted(found.packages.items())), "python": found.python_version}


def _clock(host: pb.ExaminedHost) -> Finding:
    ok = abs(host.clock_ahead_s) <= CLOCK_S + host.clock_error_s
    said = f"{host.clock_ahead_s * 1000:+.1f} ms, within {host.clock_error_s * 1000:.1f} ms"
    return Finding(host.host, "clock", ok, said, "" if ok else "start NTP there and on the service's host")


def _room(name: str, found: pb.HostExamination) -> Iterator[Finding]:
    capacity = found.capacity
    ok = capacity.memory_free_bytes >= MEMORY_SHARE * capacity.memory_bytes
    said = f"{_bytes(capacity.memory_free_bytes)} of {_bytes(capacity.memory_bytes)} free, {capacity.cores} cores"
    yield Finding(name, "memory", ok, said, "" if ok else "end other processes, or give `kv.pool_mb` less")
    needed = max(FREE_BYTES, found.version_bytes)
    ok = found.folder_free_bytes >= needed
    said = f"{_bytes(found.folder_free_bytes)} free"
    yield Finding(name, "disk", ok, said, "" if ok else f"free {_bytes(needed)} where its run folder is")
    ok = found.disk_bytes_per_s >= DISK_BYTES_PER_S
    said = f"{_bytes(found.disk_bytes_per_s)}/s written"
    yield Finding(name, "disk rate", ok, said, "" if ok else "put its run folder on a local disk or in memory")


def _certificate(name: str, found: pb.Certificate, now: float) -> Finding:
    ends = datetime.fromtimestamp(found.ends_at, UTC)
    roles, left_s = ", ".join(found.roles) or "no role", found.ends_at - now
    said = f"{roles}, until {ends:%Y-%m-%d %H:%M} UTC"
    action = ""
    if found.trouble:
        action = f"replace its files: {found.trouble}"
    elif not OF_HOSTS & set(found.roles):
        action = f"give it a certificate for one of {', '.join(sorted(OF_HOSTS))}"
    elif left_s < EXPIRES_S:
        action = f"renew it: it ends in {max(0.0, left_s) / 86400:.1f} days (`dora tls make`)"
    return Finding(name, "certificate", not action, said, action)


def _links(name: str, found: pb.HostExamination) -> Iterator[Finding]:
    for link in found.links:
        check = f"link to {link.host}"
        if link.trouble:
            yield Finding(name, check, False, link.trouble, f"open {link.address} from {name} to {link.host}")
            continue
        said = f"{_bytes(link.bytes_per_s)}/s, {link.round_trip_s * 1000:.1f} ms, {link.loss:.1%} lost"
        action = ""
        if link.loss > LOSS:
            action = "look for a bad cable, port or driver between the two"
        elif link.bytes_per_s < LINK_BYTES_PER_S:
            action = "use a faster network, or give the host a `--zone`: versions and KV will be late"
        yield Finding(name, check, not action, said, action)


def _load(host: pb.ExaminedHost) -> Iterator[Finding]:
    """Finds the time of a load, as measured in the run or else of reading the files; and that of its way here."""
    name, found, read_s = host.host, host.found, 0.0
    if found.read_bytes_per_s:
        read_s = found.version_bytes / found.read_bytes_per_s
    read = f"{_bytes(found.version_bytes)} read in {read_s:.2f} s"
    said = f"{host.load_s:.2f} s at the last one; {read}" if host.load_s else f"none yet; {read}"
    ok = found.version_bytes > 0
    action = "" if ok else "it holds no version: look at the agent's log there"
    yield Finding(name, "load", ok, said, action, "run" if host.load_s else "estimate")
    if host.fetch_s:
        said = f"{host.fetch_s:.2f} s for {_bytes(host.fetched_bytes)} at the last version"
        yield Finding(name, "fetch", True, said, how="run")
    if found.HasField("fetch"):
        yield _probed_fetch(name, found)


def _probed_fetch(name: str, found: pb.HostExamination) -> Finding:
    fetch = found.fetch
    check = f"fetch from {fetch.host}"
    if fetch.trouble or not fetch.bytes:
        said = fetch.trouble or "no chunk came"
        return Finding(name, check, False, said, f"look at the agent's log on {fetch.host}", "probe")
    whole_s = fetch.took_s * max(1.0, found.version_bytes / fetch.bytes)
    said = f"{_bytes(fetch.bytes)} in {fetch.took_s:.2f} s; {_bytes(found.version_bytes)} would take {whole_s:.2f} s"
    action = "use a faster network: its workers get versions late" if whole_s > FETCH_S else ""
    return Finding(name, check, not action, said, action, "probe")


def _move(host: pb.ExaminedHost) -> Iterator[Finding]:
    """Finds the time of a move, as measured in the run or as the slowest link allows, and that of a probe's blocks."""
    rates = [link.bytes_per_s for link in host.found.links if link.bytes_per_s]
    if host.move_s:
        said = f"{host.move_s * 1000:.0f} ms for {_bytes(host.moved_bytes)} at the last one"
        yield Finding(host.host, "move", True, said, how="run")
    elif rates and host.kv_token_bytes:
        size = MOVED_TOKENS * host.kv_token_bytes
        said = f"none yet; {MOVED_TOKENS:,} tokens are {_bytes(size)}: {size / min(rates) * 1000:.0f} ms by its links"
        yield Finding(host.host, "move", True, said, how="estimate")
    for link in host.found.links:
        if link.kv_bytes:
            said = f"{_bytes(link.kv_bytes)} of KV there and back in {link.kv_s * 1000:.0f} ms"
            action = "keep moves within a `--zone`: this link is slow for them" if link.kv_s > MOVED_S else ""
            yield Finding(host.host, f"move to {link.host}", not action, said, action, "probe")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
