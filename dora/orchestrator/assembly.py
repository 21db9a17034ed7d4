"""Builds the gRPC services: each gets the parts that it uses."""

from pathlib import Path

from dora.orchestrator.rollout.responses.turn_order import TurnLimits
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services.capabilities import Capabilities
from dora.orchestrator.services.checkpoints import Checkpoints
from dora.orchestrator.services.host import HostService
from dora.orchestrator.services.opening import Opening
from dora.orchestrator.services.operator import OperatorService, PromptService
from dora.orchestrator.services.publishing import Publishing
from dora.orchestrator.services.recorded import RecordedTrajectories
from dora.orchestrator.services.server import Services
from dora.orchestrator.services.sessions import SessionService
from dora.orchestrator.services.trainer import TrainerService
from dora.orchestrator.services.worker import WorkerService
from dora.rpc.roles import ServiceTokens


def services_of(
    of: Runtime,
    model: Path,
    snapshots: Path,
    tokens: ServiceTokens,
    kv_secret: bytes = b"",
    session_secret: bytes = b"",
) -> Services:
    """Builds the services. KV snapshots are in ``snapshots``. An earlier incarnation may have made the secrets;
    ``session_secret`` goes to ``Capabilities``.
    """
    config, core, buffer, journal, life = of.config, of.core, of.buffer, of.journal, of.incarnation
    sessions, hosts, store, telemetry, feed = of.sessions, of.hosts, of.store, of.telemetry, of.feed
    environments, evaluations, trainers = of.environments, of.evaluations, of.trainers
    publishing = Publishing(config, core, store, of.versions, of.storage, of.recorder, hosts)
    opening = Opening(config, core, feed, buffer, environments, trainers, model)
    limits = TurnLimits.of(config, store.reference.vocab_size, buffer.sampling)
    recorded = RecordedTrajectories(core.state, config.record)
    checkpoints = Checkpoints(config, core, feed, journal, store, life)
    to_trainer = (config, core, trainers, buffer, journal, telemetry, hosts, store, publishing, of.draining)
    to_sessions = (
        core,
        buffer,
        journal,
        telemetry,
        environments,
        evaluations,
        of.fronts,
        opening,
        limits,
        Capabilities(session_secret),
    )
    to_workers = (config, core, buffer, journal, store, sessions, hosts, of.reports, life)
    return Services(
        TrainerService(*to_trainer, model, life.resumed),
        PromptService(core, feed, buffer, journal, of.evaluating),
        SessionService(*to_sessions),
        OperatorService(core, buffer, hosts, of.status, checkpoints, of.examinations, recorded, str(model)),
        WorkerService(*to_workers, snapshots, tokens, kv_secret),
        HostService(hosts, store, journal, life),
    )
