"""A host as operators see it."""

import contextlib
import time
from pathlib import Path

from dora.core.state import State
from dora.host.capacity import capacity_to_wire
from dora.orchestrator.hosts.worker_counts import Host
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s
from dora.weights.host_store import HostStore


def kind_of(capacity: pb.HostCapacity) -> str:
    """Returns the models of a machine's GPUs, each once."""
    return ", ".join(sorted(set(capacity.gpus)))


def status_of(host: Host, state: State, store: HostStore, folder: Path) -> pb.HostStatus:
    """Returns a connected host's status. ``store`` and the run ``folder`` are those of the service's own host."""
    places, workers = state.places, state.workers.values()
    shown = pb.HostStatus(
        name=host.name,
        kind=places.of(host.name).kind,
        speed=1.0 / places.step_scale(host.name),
        state=host.state,
        workers=len(host.launcher.workers),
        workers_ready=sum(worker.host == host.name and worker.loaded >= 0 for worker in workers),
    )
    session = host.session
    if session is None:
        shown.capacity.CopyFrom(capacity_to_wire(folder))
        with contextlib.suppress(OSError):  # a missing run folder is shown as a storage fault
            shown.versions.extend(store.versions())
        shown.seen_at = time.time()
        return shown
    shown.epoch, shown.pid, shown.device = session.epoch, session.pid, session.device
    shown.zone = session.zone
    if host.deadline_s:
        shown.leaves_in_s = max(0.0, host.deadline_s - awake_s())
    shown.capacity.CopyFrom(session.capacity)
    shown.versions.extend(sorted(session.versions))
    shown.seen_at = session.seen_at
    troubles = (f"{name}: {why}" for name, why in session.troubles.items())
    shown.reason = "; ".join([*([host.reason] if host.reason else []), *troubles])
    return shown
