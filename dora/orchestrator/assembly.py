"""Builds the gRPC services: each gets the parts that it uses."""

from pathlib import Path

from dora.orchestrator.rollout.responses.turn_order import TurnLimits
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services.checkpoints import Checkpoints
from dora.orchestrator.services.host import HostService
from dora.orchestrator.services.opening import Opening
from dora.orchestrator.services.operator import OperatorService, PromptService
from dora.orchestrator.services.publishing import Publishing
from dora.orchestrator.services.server import Services
from dora.orchestrator.services.sessions import SessionService
from dora.orchestrator.services.trainer import TrainerService
from dora.orchestrator.services.worker import WorkerService
from dora.rpc.roles import Tokens


def services_of(of: Runtime, model: Path, snapshots: Path, tokens: Tokens, kv_secret: bytes = b"") -> Services:
    """``snapshots``: the folder of KV snapshots. ``kv_secret``: of the run, if an earlier incarnation made one."""
    return Services(
        trainer_service(of, model),
        PromptService(of.core, of.feed, of.buffer, of.journal, of.evaluating),
        session_service(of, model),
        operator_service(of, model),
        worker_service(of, snapshots, tokens, kv_secret),
        host_service(of),
    )


def trainer_service(of: Runtime, model: Path) -> TrainerService:
    publishing = Publishing(of.config, of.core, of.store, of.versions, of.storage, of.recorder, of.hosts)
    return TrainerService(
        of.config,
        of.core,
        of.trainers,
        of.buffer,
        of.journal,
        of.telemetry,
        of.hosts,
        of.store,
        publishing,
        of.draining,
        model=model,
        resumed=of.incarnation.resumed,
    )


def session_service(of: Runtime, model: Path) -> SessionService:
    config, vocab_size = of.config, of.store.reference.vocab_size
    context_tokens, message_bytes = config.workers.context_tokens, config.service.max_message_bytes
    return SessionService(
        of.core,
        of.buffer,
        of.journal,
        of.telemetry,
        of.environments,
        of.evaluations,
        of.fronts,
        Opening(config, of.core, of.feed, of.buffer, of.environments, model),
        TurnLimits(config.sessions.forks, context_tokens, message_bytes, vocab_size, of.buffer.sampling),
    )


def operator_service(of: Runtime, model: Path) -> OperatorService:
    checkpoints = Checkpoints(of.config, of.core, of.feed, of.journal, of.store, of.incarnation)
    return OperatorService(of.core, of.buffer, of.hosts, of.status, checkpoints, of.examinations, model)


def worker_service(of: Runtime, snapshots: Path, tokens: Tokens, kv_secret: bytes = b"") -> WorkerService:
    return WorkerService(
        of.config,
        of.core,
        of.buffer,
        of.journal,
        of.store,
        of.sessions,
        of.hosts,
        of.reports,
        of.incarnation,
        snapshot_folder=snapshots,
        tokens=tokens,
        kv_secret=kv_secret,
    )


def host_service(of: Runtime) -> HostService:
    return HostService(of.hosts, of.store, of.journal, of.incarnation)
