"""The status for operators as wire messages. Changes nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice, takewhile
from typing import Final

import numpy as np

from dora.config import Config
from dora.core.fleet.worker import Worker
from dora.core.rules.precision import is_full
from dora.core.state import GroupStatus, RequestStatus, State
from dora.data.mismatch import by_version, mismatches
from dora.data.score import Evaluated
from dora.host.command import pool_id_of
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.streams import DRAINED, KvTier, MemberSessions
from dora.orchestrator.rollout.telemetry import RecentMove, StepRecord, Telemetry
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.services.draining import Draining
from dora.orchestrator.services.evaluation import Evaluating
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s
from dora.system.log_lines import LastWarnings

MISMATCHES_SHOWN: Final = 8
MOVES_TOLD: Final = 1024  # in one status, the latest
_STEP: Final = tuple(each.name for each in fields(StepRecord))  # same names on the wire


class News:
    """Holds the steps and moves that a stream of statuses has told, so that each is told once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._step = self._move = -1  # the last ones that were told

    def steps(self) -> list[StepRecord]:
        found = [each for each in self._telemetry.steps if each.step > self._step]
        self._step = found[-1].step if found else self._step
        return found

    def moves(self) -> list[RecentMove]:
        newest_first = takewhile(lambda each: each.number > self._move, reversed(self._telemetry.latest_moves))
        found = list(islice(newest_first, MOVES_TOLD))[::-1]
        self._move = found[-1].number if found else self._move
        return found


@dataclass(eq=False, repr=False)
class ServiceStatus:
    """Makes the status. ``tier`` is the server of the shared KV tier, or None."""

    _config: Config
    _core: Core
    _feed: PromptFeed
    _hosts: Hosts
    _sessions: MemberSessions
    _telemetry: Telemetry
    _storage: Storage
    _trainers: Trainers
    _evaluating: Evaluating
    _draining: Draining

    def __post_init__(self) -> None:
        self.tier: KvTier | None = None
        self.fleet_advice: Callable[[], pb.FleetAdvice | None] = lambda: None
        self.warnings = LastWarnings()
        self.started_s = awake_s()

    def news(self) -> News:
        """Begins a stream of statuses."""
        return News(self._telemetry)

    def of_service(self, model: str, news: News | None = None) -> pb.Status:
        """Returns the status. If ``news`` is None, it has all steps that are kept, and no moves."""
        state, position = self._core.state, self._feed.position
        window, hosts = state.window, self._hosts.statuses()
        step_s, agents_wait_s = self._telemetry.latest_s()
        return pb.Status(
            model=model,
            uptime_s=awake_s() - self.started_s,
            window_versions=window.size,
            groups_per_step=window.groups_per_step,
            filling_step=window.step,
            filling_left=window.left,
            newest_version=window.newest,
            trainer=self._trainers.shown(),
            trainer_stalled=state.lease.lapsed if self._trainers.shown() else "",
            versions=[_version(state, v) for v in range(window.oldest_live, window.newest + 1)],
            workers=[self._worker(worker) for worker in sorted(state.workers.values(), key=lambda w: w.worker_id)]
            + [
                pb.WorkerStatus(worker_id=name, state=gone, version=-1, target_version=-1, reason=reason)
                for name, gone, reason in self.gone_workers()
            ],
            counters=self.counters(),
            steps=[_step(step) for step in (self._telemetry.steps if news is None else news.steps())],
            moves=[] if news is None else [pb.Move(**asdict(move)) for move in news.moves()],
            draining=self._feed.closed,
            drain=self._draining.status(),
            evaluated=[_evaluated(each) for each in self._telemetry.evaluated],
            prompts_queued=len(self._feed) + len(state.backlog),
            storage_faults=[
                pb.StorageFault(place=fault.place, reason=fault.reason, since=fault.since)
                for fault in self._storage.faults.values()
            ],
            prompts_failed=self._feed.failure,
            source_epoch=position.epoch,
            source_index=position.index,
            kv_tier=self._tier(),
            adaptive_window=self._adaptive_window(),
            pools=self._pools(hosts),
            hosts=hosts,
            evaluations=self._evaluating.statuses(),
            dp_groups_to_add=self.workers_to_add(),
            window_wait=self._trainers.window_wait(),
            prompts_total=self._feed.total,
            warnings=[pb.LogLine(at=at, level=level, text=text) for at, level, text in tuple(self.warnings.lines)],
            step_s=step_s,
            agents_wait_s=agents_wait_s,
            fleet_advice=self.fleet_advice(),
            mismatches=self._mismatches(),
        )

    def workers_to_add(self) -> int | None:
        """Returns the advice of the latest steps, or None while a step waits for agents."""
        if (wait := self._trainers.window_wait()) is not None and wait.waits_for == "agents":
            return 0
        return self._telemetry.groups_to_add(sum(not w.draining for w in self._core.state.workers.values()))

    def _mismatches(self) -> list[pb.Mismatch]:
        state, workers = self._core.state, self._config.workers
        latest = by_version(each for step in self._telemetry.steps for each in mismatches(step.step, step.metrics))
        return [
            pb.Mismatch(**asdict(each), precision="" if is_full(state, each.version) else workers.numerics.precision)
            for each in latest[:MISMATCHES_SHOWN]
        ]

    def _adaptive_window(self) -> pb.AdaptiveWindow | None:
        adaptive, window = self._core.state.adaptive, self._config.window
        if adaptive is None:
            return None
        last = None if adaptive.last is None else pb.WindowChange(**asdict(adaptive.last))
        return pb.AdaptiveWindow(min=window.least, max=window.most, last_change=last)

    def _tier(self) -> pb.KvTierStatus | None:
        if self.tier is None:
            return None
        return self.tier.status(sum(session.tier.up for session in self._sessions.workers.values()))

    def counters(self) -> dict[str, float]:
        """Returns all counters. ``groups_lost`` counts those admitted, yet neither held, trained nor cancelled."""
        state = self._core.state
        core = {name: float(value) for name, value in asdict(state.counters).items()}
        held = len(state.group_row)
        lost = core["groups_admitted"] - core["groups_trained"] - core["groups_cancelled"] - held
        return {
            **core,
            **self._telemetry.counters(),
            "prompts_cancelled": core["prompts_cancelled"] + self._feed.ledger.queued_cancelled,
            "prompts_refused": self._feed.refused,
            "prompt_sources_failed": self._feed.sources_failed,
            "storage_faults": self._storage.faults_seen,
            "groups_lost": lost,
            "groups_open": held,
            "handoffs_now": len(state.handoffs),
            "requests_parked_now": sum(len(pool.rows) for pool in state.pools.values()),
            "kv_tokens_parked": sum(pool.kv_claimed for pool in state.pools.values()),
        }

    def _worker(self, worker: Worker) -> pb.WorkerStatus:
        session = self._sessions.workers.get(worker.worker_id)
        return pb.WorkerStatus(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            state=worker_state(worker),
            version=worker.loaded,
            target_version=worker.target,
            running=len(worker.rows) - min(worker.waiting, len(worker.rows)),
            waiting=min(worker.waiting, len(worker.rows)),
            slots=worker.slots,
            kv_use=worker.kv_used / worker.kv_tokens,
            tokens_per_s=session.rate.per_s(awake_s()) if session else 0.0,
            pid=session.pid if session else 0,
            host=session.host if session else "",
            tensor_parallel=session.capability.tensor_parallel if session else 0,
            pipeline_parallel=session.capability.pipeline_parallel if session else 0,
            tokens_per_step=session.load.tokens_per_step if session else 0.0,
            kind=self._core.state.places.of(worker.host).kind,
            speed=1.0 / self._core.state.places.step_scale(worker.host),
        )

    def _pools(self, hosts: Sequence[pb.HostStatus]) -> list[pb.PoolStatus]:
        """Returns the connected pools, then the lost ones. A pool whose host has left on request is not lost."""
        known, sessions = self._core.state.pools, self._sessions
        found = []
        for pool_id, session in sorted(sessions.pools.items()):
            pool = known.get(pool_id)
            found.append(
                pb.PoolStatus(
                    pool_id=pool_id,
                    epoch=session.epoch,
                    state="joining" if pool is None else "ready",
                    parked=session.report.parked,
                    kv_tokens=0 if pool is None else pool.kv_claimed,
                    capacity_tokens=session.kv_tokens,
                    memory_bytes=session.report.memory_bytes,
                    memory_most_bytes=session.capability.memory_bytes,
                    spill_bytes=session.report.spill_bytes,
                    spill_most_bytes=session.capability.spill_bytes,
                    pid=session.pid,
                    host=session.host,
                    pinned_bytes=session.report.pinned_bytes,
                )
            )
        left = {pool_id_of(host.name) for host in hosts if host.state == DRAINED}
        for pool_id, reason in sorted(sessions.lost_pools.items()):
            state, reason = (DRAINED, "") if pool_id in left else ("lost", reason)
            found.append(pb.PoolStatus(pool_id=pool_id, state=state, reason=reason))
        return found

    def gone_workers(self) -> Iterator[tuple[str, str, str]]:
        """Yields workers that are not connected, with state and reason. A worker that left on request is not lost, and
        starts if its host has a process of that name again.
        """
        started = self._hosts.workers()
        for name, reason in sorted(self._sessions.lost_reasons.items()):
            if name in self._core.state.workers:
                continue
            if reason != DRAINED:
                yield name, "lost", reason
            else:
                yield name, "starting" if name in started else DRAINED, ""


def _step(step: StepRecord) -> pb.StepMetrics:
    return pb.StepMetrics(**{name: getattr(step, name) for name in _STEP})


def _evaluated(evaluated: Evaluated) -> pb.EvaluatedVersion:
    tree = evaluated.to_json_dict()
    names = [field.name for field in pb.EvaluatedVersion.DESCRIPTOR.fields]
    return pb.EvaluatedVersion(**{name: tree[name] for name in names if tree[name] is not None})


def groups_of(state: State, version: int) -> tuple[int, int]:
    """Returns the number of unfinished and of finished groups of a version that no step has taken."""
    found = np.bincount(state.groups["status"][state.groups["version"] == version], minlength=len(GroupStatus) + 1)
    return int(found[GroupStatus.OPEN]), int(found[GroupStatus.FINISHED])


def _version(state: State, version: int) -> pb.VersionStatus:
    groups, requests = state.groups, state.requests
    unfinished, finished = groups_of(state, version)
    is_open = (groups["status"] == GroupStatus.OPEN) | (groups["status"] == GroupStatus.FINISHED)
    mine = requests["version"] == version
    deadlines = groups["deadline"][(groups["version"] == version) & is_open]
    return pb.VersionStatus(
        version=version,
        deadline_step=int(deadlines.max(initial=max(0, state.window.deadline(version)))),
        newest=version == state.window.newest,
        workers=sum(worker.target == version for worker in state.workers.values()),
        groups_open=unfinished + finished,
        groups_finished=finished,
        requests_running=int(np.count_nonzero(mine & (requests["status"] == RequestStatus.RUNNING))),
        requests_waiting=int(np.count_nonzero(mine & (requests["status"] == RequestStatus.WAITING))),
        sessions_idle=len(state.idle.get(version, ())),
        state=version_state(state, version),
        reason=_reason(state, version),
    )


def version_state(state: State, version: int) -> str:
    if version in state.rejected:
        return "rejected"
    if version in state.unavailable:
        return "unavailable"
    return "suspect" if version in state.suspects else "published"


def _reason(state: State, version: int) -> str:
    if version in state.unavailable:
        return state.unavailable[version]
    if version in state.rejected:
        rejected = state.rejected[version]
        return f"{', '.join(rejected.worker_ids)}: {rejected.reason}"
    if version in state.suspects:
        return "; ".join(f"{name}: {refusal.reason}" for name, refusal in state.suspects[version].refusals.items())
    return ""


def worker_state(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    if worker.loading >= 0:
        return "loading"
    if worker.loaded < 0:
        return "joining"
    return "vacating" if worker.vacating else "ready"
