"""The metrics of one host: its machine, its pool, and its workers' engines under vLLM's own names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from dora.core.fleet.worker import Worker
from dora.data.engine_times import BY_NAME, ENDS, HISTOGRAMS
from dora.host.command import pool_id_of
from dora.host.launcher import LOCAL
from dora.metrics.declaration import DeclaredMetric, Labelled
from dora.metrics.text import HistogramText
from dora.orchestrator.metrics.readings import WORKER_STATES, all_of
from dora.orchestrator.rollout.streams import WorkerSession
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services import status
from dora.rpc import dora_pb2 as pb

Series: TypeAlias = tuple[tuple[str, ...], Sequence[int], float]
ENGINES_APART: Final = 64
ALL: Final = "all"  # in place of an engine's number


def _summed(model: str, series: Sequence[Series]) -> Series:
    counts = np.array([counts for _, counts, _ in series], np.int64).sum(axis=0)
    return (model, ALL), counts.tolist(), sum(total for *_, total in series)


class HostReadings:
    """Describes a host at one moment, on the event loop. ``model`` labels its engines' metrics."""

    def __init__(self, runtime: Runtime, host: pb.HostStatus, model: str) -> None:
        self._runtime = runtime
        self._model = model
        self.host = host

    @cached_property
    def workers(self) -> Sequence[Worker]:
        """Returns the workers that load versions from the host's store."""
        state = self._runtime.core.state
        workers = state.workers.values()
        if self.host.name == LOCAL:
            return [worker for worker in workers if worker.host not in state.arrived]
        return [worker for worker in workers if worker.host == self.host.name]

    @cached_property
    def _sessions(self) -> Sequence[tuple[Worker, WorkerSession]]:
        sessions = self._runtime.sessions.workers
        return [(each, sessions[each.worker_id]) for each in self.workers if each.worker_id in sessions]

    def worker_states(self) -> Labelled:
        return all_of(WORKER_STATES, Counter(map(status.worker_state, self.workers)))

    def clock_ahead_s(self) -> float:
        return max((session.clock_ahead_s for _, session in self._sessions), key=abs, default=0.0)

    def pool_bytes(self, name: str) -> float | None:
        """Returns a field of the report of the host's pool, or None if it has no pool."""
        pool = self._runtime.sessions.pools.get(pool_id_of(self.host.name))
        return None if pool is None else getattr(pool.report, name)

    def engines(self, name: str) -> Labelled:
        """Returns a field of every engine's load, labelled as vLLM does."""
        return {self._engine(worker): float(getattr(session.load, name)) for worker, session in self._sessions}

    def ended(self) -> Labelled:
        """Returns ended requests of every engine, by their end."""
        return {
            (*self._engine(worker), end): float(session.times.ended.get(end, 0))
            for worker, session in self._sessions
            for end in ENDS
        }

    def prompt_tokens(self) -> Labelled:
        return {self._engine(worker): float(session.times.prompt_tokens) for worker, session in self._sessions}

    def histograms(self) -> Mapping[str, list[Series]]:
        """Returns each histogram's series: labels, counts and sum of every engine that has reported it. The series of
        more than ``ENGINES_APART`` engines are added up, so that the page stays small.
        """
        found: dict[str, list[Series]] = {name: [] for name in BY_NAME}
        for worker, session in self._sessions:
            for each in session.times.histograms:
                found[each.name].append((self._engine(worker), tuple(each.buckets), each.sum))
        if len(self._sessions) <= ENGINES_APART:
            return found
        return {name: [_summed(self._model, series)] if series else [] for name, series in found.items()}

    def kv_use(self) -> Labelled:
        return {self._engine(each): session.load.kv_used_tokens / each.kv_tokens for each, session in self._sessions}

    def _engine(self, worker: Worker) -> tuple[str, str]:
        return self._model, str(worker.index)


Metric: TypeAlias = DeclaredMetric[HostReadings]

MACHINE: Final = (
    Metric("dora_host_cores", "Cores of the host.", lambda seen: seen.host.capacity.cores),
    Metric("dora_host_gpus", "GPUs of the host.", lambda seen: len(seen.host.capacity.gpus)),
    Metric("dora_host_memory_bytes", "Memory of the host.", lambda seen: seen.host.capacity.memory_bytes),
    Metric("dora_host_memory_free_bytes", "Free memory.", lambda seen: seen.host.capacity.memory_free_bytes),
    Metric("dora_host_store_free_bytes", "Room for versions.", lambda seen: seen.host.capacity.store_free_bytes),
    Metric("dora_host_store_versions", "Versions that the host holds.", lambda seen: len(seen.host.versions)),
    Metric("dora_host_seen_timestamp_seconds", "Time of its last message.", lambda seen: seen.host.seen_at),
    Metric("dora_host_clock_ahead_seconds", "As `dora_clock_ahead_seconds`.", lambda seen: seen.clock_ahead_s()),
    Metric("dora_host_workers_wanted", "Workers that the host should have.", lambda seen: seen.host.workers),
    Metric("dora_host_workers", "Its workers by state.", lambda seen: seen.worker_states(), ("state",)),
    Metric("dora_host_pool_memory_bytes", "Memory of its pool.", lambda seen: seen.pool_bytes("memory_bytes")),
    Metric("dora_host_pool_spill_bytes", "KV that its pool has on disk.", lambda seen: seen.pool_bytes("spill_bytes")),
    Metric("dora_host_pool_parked_requests", "Requests in its pool.", lambda seen: seen.pool_bytes("parked")),
)

# vLLM 0.32, vllm/v1/metrics/loggers.py; ``engine`` is the worker's number in the service.
LABELS: Final = ("model_name", "engine")
ENGINES: Final = (
    Metric("vllm:num_requests_running", "Requests being decoded.", lambda seen: seen.engines("running"), LABELS),
    Metric("vllm:num_requests_waiting", "Requests queued.", lambda seen: seen.engines("waiting"), LABELS),
    Metric("vllm:kv_cache_usage_perc", "Share of KV in use, 0 to 1.", lambda seen: seen.kv_use(), LABELS),
    Metric("vllm:generation_tokens_total", "Sampled tokens.", lambda seen: seen.engines("generated_tokens"), LABELS),
    Metric("vllm:prompt_tokens_total", "Tokens before a first token.", lambda seen: seen.prompt_tokens(), LABELS),
    Metric("vllm:request_success_total", "Ended requests.", lambda seen: seen.ended(), (*LABELS, "finished_reason")),
    Metric("dora_session_state_bytes", "States kept for forks.", lambda seen: seen.engines("state_bytes"), LABELS),
    Metric(
        "dora_session_states_dropped_total",
        "States that had no room.",
        lambda seen: seen.engines("states_dropped"),
        LABELS,
    ),
    Metric(
        "vllm:spec_decode_num_draft_tokens_total",
        "Drafted tokens.",
        lambda seen: seen.engines("drafted_tokens"),
        LABELS,
    ),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Drafted tokens that were sampled.",
        lambda seen: seen.engines("accepted_tokens"),
        LABELS,
    ),
    Metric("vllm:num_preemptions_total", "Requests that lost KV.", lambda seen: seen.engines("preemptions"), LABELS),
)
HOST: Final = (*MACHINE, *ENGINES)
HISTOGRAM_TEXTS: Final = tuple(HistogramText(each.name, each.meaning, each.bounds, LABELS) for each in HISTOGRAMS)


def histograms_text(found: Mapping[str, list[Series]]) -> bytes:
    return b"".join(text.of(found[each.name]) for each, text in zip(HISTOGRAMS, HISTOGRAM_TEXTS, strict=True))
