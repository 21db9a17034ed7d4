"""The parts of a service, built in order; each is closed in the reverse order."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dora.config import Config
from dora.data.run_record import Recorder
from dora.host.command import LaunchContext, is_started_so, pool_argv, pool_id_of, worker_argv, worker_environment
from dora.host.gpu_host import check_host
from dora.host.launcher import LOCAL, OwnLauncher, number_of
from dora.host.launchers import launcher_named
from dora.host.placement import log_unbound, placement_of
from dora.host.survivors import Survivors
from dora.journal.log import LOG_FOLDER, Log, Sizes
from dora.kvtier.chunks import chunk_tokens_of
from dora.kvtransfer.plane import local_host
from dora.orchestrator.assembly import services_of
from dora.orchestrator.device_sizes import device_sizes, placement_for, with_sizes, write_gpus
from dora.orchestrator.first_canary import compare_later, first_canary
from dora.orchestrator.guard import contexts_of, http_tls_of, tls_of
from dora.orchestrator.hosts.tier_server import TierServer
from dora.orchestrator.metrics.exporter import Exporter
from dora.orchestrator.metrics.server import serving_metrics
from dora.orchestrator.model_check import check_model
from dora.orchestrator.recording.audit import Audit
from dora.orchestrator.recording.storage import RUN_FOLDER, STATE, Storage
from dora.orchestrator.recovery.binding import bind, content_of
from dora.orchestrator.recovery.resume import ran_on
from dora.orchestrator.recovery.state_folder import LIVING_FILE, StateFolder
from dora.orchestrator.recovery.state_folder import SETTING as STATE_SETTING
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rotation import follow_token
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.scoring import filtering, verifying
from dora.orchestrator.services.evaluation_series import OwnEvaluations, evaluation_prompts
from dora.orchestrator.services.server import serving
from dora.orchestrator.setup import RUN_FOLDER as RUN_FOLDER_SETTING
from dora.orchestrator.setup import (
    SNAPSHOTS_FOLDER,
    WEIGHTS_FOLDER,
    cache_of,
    prepared_model,
    recorder_of,
    required_routing,
    store_of,
    with_context,
    with_load_time,
    writable,
)
from dora.orchestrator.tracing.export import tracer_of
from dora.orchestrator.version_memory import VersionMemory, version_memory
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc.roles import Role, ServiceTokens
from dora.system.log_lines import Position
from dora.weights.holds import VERSIONS_FOLDER
from dora.weights.reference import read_reference
from dora.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class ServiceHandle:
    address: str
    tokens: Mapping[Role, str] = field(repr=False)
    run_folder: Path
    model: Path
    model_s: float  # event-loop time at which the model was prepared
    versions: VersionMemory | None = None  # None: not known yet
    metrics: str = ""  # address of the metrics for Prometheus; empty: there are none
    position: Position = dict  # the step that is being filled, and the newest version

    @property
    def token(self) -> str:
        """Returns the owner's token, which permits everything that a client may do."""
        return self.tokens[Role.OWNER]


@dataclass(slots=True)
class ServiceStart:
    """Builds the parts of a service in order; ``stack`` ends them in the reverse order."""

    config: Config
    tokens: ServiceTokens
    state: StateFolder | None
    run_folder: Path
    storage: Storage
    tier: TierServer | None
    stack: contextlib.AsyncExitStack
    progress: Callable[[str], None]
    umask: int  # from before this process made its files private
    address: str = ""
    metrics: str = ""
    position: Position = dict
    model: Path = field(default_factory=Path)
    model_s: float = 0.0
    versions: VersionMemory | None = None
    evaluations: OwnEvaluations | None = None
    orphaned: set[str] = field(default_factory=set)  # processes of an earlier incarnation

    @property
    def handle(self) -> ServiceHandle:
        return ServiceHandle(
            self.address,
            self.tokens.of,
            self.run_folder,
            self.model,
            self.model_s,
            self.versions,
            self.metrics,
            self.position,
        )

    @property
    def _kept(self) -> int:
        return 0 if self.state is None else len(self.state.found.durable.versions)

    async def launch(self) -> OwnLauncher:
        """Starts the worker processes, which import their libraries meanwhile, and adopts those still running."""
        config, state, tokens = self.config, self.state, self.tokens
        living = None if state is None else Survivors(state.folder / LIVING_FILE, tokens.mark_of, state.place)
        found = {} if living is None else living.find(is_started_so)
        for name, (_, mark) in found.items():
            tokens.known_again(name, mark)
        self.orphaned = set(found)
        pool_id, workers = pool_id_of(LOCAL), config.workers
        tls = tls_of(config)
        placement = placement_of(workers.device, for_trainer=workers.gpus_for_trainer)
        placement.check(workers.count, workers.ranks)
        ours = {process.pid for process, _ in found.values()}
        await asyncio.to_thread(check_host, placement.gpus, workers.device, ours)
        log_unbound(placement)

        def environment(name: str) -> Mapping[str, str]:
            variables = worker_environment(self.config.workers, tokens.started(name), tls)
            if name == pool_id:
                return variables
            shows_trainers = workers.weights_from == "trainer"
            own = placement.environment(number_of("", name), workers.ranks, shows_trainers=shows_trainers)
            return {**variables, **own}

        def command(name: str) -> list[str]:
            tier = self.tier.endpoint if self.tier else ""
            context = LaunchContext(
                self.address, self.model, kv_host=config.kv.host, kv_tier=tier, device=placement.kind
            )
            settings = self.config  # completed with the model's values
            if name == pool_id:
                return pool_argv(settings.kv, name, context)
            return worker_argv(settings.workers, name, context)

        launcher = launcher_named(config.workers.launcher)(
            config.workers,
            command,
            environment,
            self.run_folder / "logs",
            lambda error: self.storage.failed(RUN_FOLDER, error),
            [pool_id] if config.kv.pool_mb else [],
            living=living,
            check=lambda count: placement.check(count, workers.ranks),
        )
        launcher.adopt({name: process for name, (process, _) in found.items()}, config.workers.count)
        self.stack.push_async_callback(launcher.close)
        self.stack.callback(self.progress, "ending the workers")
        await launcher.begin(config.workers.count)
        return launcher

    async def prepare(self) -> None:
        """Prepares the model, and the stored versions of an earlier incarnation, if the host's memory can hold all."""
        self.progress(f"preparing the model {self.config.model}")
        self.model = await prepared_model(self.config, self.progress, self.umask)
        self.model_s = asyncio.get_running_loop().time()
        self.config = with_context(self.config, self.model)
        for warning in await asyncio.to_thread(check_model, self.config, self.model):
            self.progress(f"warning: {self.config.model}: {warning}")
        reference = await asyncio.to_thread(read_reference, self.model)
        self.config = with_load_time(self.config, reference)
        self.versions = version_memory(self.config, reference, self.run_folder, self._kept)
        self.versions.check()
        self.progress(f"weights: {self.versions}")
        if sizes := device_sizes(self.config, self.model, reference, placement_for(self.config.workers)):
            self.progress(f"sizes: {sizes}")
        self.config = with_sizes(self.config, sizes)
        state = self.state
        if state is not None:
            state.check_settings(self.config)
            with writable(RUN_FOLDER_SETTING, self.run_folder):
                store = self.run_folder / WEIGHTS_FOLDER / VERSIONS_FOLDER
                await asyncio.to_thread(state.bring_back_versions, store)

    async def build(self) -> Runtime:
        """Builds everything around the core. Nothing is connected yet."""
        config, state, model, stack = self.config, self.state, self.model, self.stack
        routing = required_routing(config, model)
        store = await asyncio.to_thread(store_of, self.run_folder, model, config, self._kept)
        await asyncio.to_thread(write_gpus, store.root, placement_for(config.workers), config.workers)
        is_new, on_gpus = state is None or state.found.is_new, config.workers.device.startswith("cuda")
        if is_new and not on_gpus:
            canary = await first_canary(config, model, self.progress)
            if canary is not None:
                await asyncio.to_thread(store.keep_canary, 0, canary)
        tokenizer = await asyncio.to_thread(ChatTokenizer, model, cache_of(config))
        vocab_size = store.reference.vocab_size
        check = PromptCheck(config, tokenizer=tokenizer, vocab_size=vocab_size, routing=routing)
        seed = config.rollout.seed
        source = await asyncio.to_thread(
            resolve_prompts,
            config.prompts,
            tokenizer,
            seed,
            check=check.well_formed,
            progress=self.progress,
            longest_tokens=config.rollout.max_tokens,
        )
        evaluated = await asyncio.to_thread(evaluation_prompts, config, tokenizer, check)
        recorder = await self._recorder(store, source.reward)
        verifier = await stack.enter_async_context(verifying(config, source, model))
        group_filter = await stack.enter_async_context(filtering(config))
        journal = Journal()
        if state is not None:
            journal = journal_of(config, state, self.storage)
            stack.push_async_callback(journal.close)
        runtime = Runtime(
            config,
            feed=PromptFeed(config, source, check, journal),
            verifier=verifier,
            group_filter=group_filter,
            store=store,
            snapshots=self.run_folder / SNAPSHOTS_FOLDER,
            recorder=recorder,
            journal=journal,
            versions=state.versions if state is not None else None,
            storage=self.storage,
            routing=routing,
        )
        stack.push_async_callback(runtime.close)
        logging.getLogger("dora").addHandler(runtime.status.warnings)
        stack.callback(logging.getLogger("dora").removeHandler, runtime.status.warnings)
        if is_new and on_gpus:
            runtime.core.spawn(compare_later(config, model, partial(store.canary, 0), self.progress))
        parts = (runtime.core, runtime.store, runtime.recorder, runtime.telemetry, runtime.evaluating)
        self.evaluations = OwnEvaluations(config, *parts, evaluated)
        runtime.trainers.published = self.evaluations.at
        if config.service.traces:
            await stack.enter_async_context(tracing(runtime, config))
        return runtime

    async def _recorder(self, store: WeightStore, reward: str) -> Recorder | None:
        """Opens the record, and checks that it belongs to the state."""
        config, state = self.config, self.state
        if state is None:
            return await recorder_of(config, store, self.stack, False)
        function = config.reward.function or reward
        content = await asyncio.to_thread(content_of, config, self.model, function)

        async def bound(recorder: Recorder | None) -> Recorder | None:
            with writable(STATE_SETTING, state.folder):
                return await bind(config, state, recorder, content)

        return await recorder_of(config, store, self.stack, not state.found.is_new, bound)

    async def open(self, runtime: Runtime, launcher: OwnLauncher) -> None:
        """Opens the gRPC server, at first only for workers of an earlier incarnation, and starts the workers."""
        config, state, stack = self.config, self.state, self.stack
        restored = None
        if state is not None:
            stood = state.found.durable
            orphaned = {*self.orphaned, *runtime.hosts.expect(stood.hosts, stood.host_epoch, self.tokens)}
            elsewhere = ran_on(state.found.requests) - launcher.names(config.workers.count)
            restored = runtime.resume(state.found, orphaned | elsewhere)
        secret = b"" if state is None else bytes.fromhex(state.identity.kv_secret)
        snapshots = self.run_folder / SNAPSHOTS_FOLDER
        audit = None if state is None else Audit(state.folder)
        of_sessions = b"" if state is None else bytes.fromhex(state.identity.session_secret)
        services = services_of(runtime, self.model, snapshots, self.tokens, secret, of_sessions)
        called = serving(config, services, runtime.incarnation, self.tokens, audit)
        self.address = await stack.enter_async_context(called)
        if state is not None:
            with writable(STATE_SETTING, state.folder):
                state.remember(address=self.address, token=self.tokens.of[Role.OWNER], place=state.place)
            runtime.hosts.worker_counts.scaled = self._scaled
        if config.service.metrics:
            exporter = Exporter(runtime, self.run_folder, config.model)
            served = serving_metrics(config.service.metrics, exporter, http_tls_of(config), self.tokens)
            self.metrics = await stack.enter_async_context(served)
        self.position = lambda: position_of(runtime)
        runtime.hosts.begin(launcher, self.run_folder, self.tokens)
        relay_host, oldest = config.kv.host or local_host(self.address), runtime.incarnation.resumed.retired
        runtime.hosts.open_relay(relay_host, oldest, contexts_of(config))
        stack.push_async_callback(asyncio.to_thread, runtime.hosts.close_relay)
        runtime.status.tier = self.tier
        # agents end, or wait for the next start
        stack.callback(runtime.hosts.close if state is None else runtime.hosts.suspend)
        stack.push_async_callback(launcher.close)  # called twice: workers must end before the services that they call
        launcher.open()
        launcher.scale(config.workers.count)
        await runtime.restore(restored)
        if state is not None and not state.identity.has_begun:
            with writable(STATE_SETTING, state.folder):
                state.remember(has_begun=True)
        if self.evaluations is not None:
            self.evaluations.at(runtime.core.state.window.newest)

    def _scaled(self, workers: int) -> None:
        assert self.state is not None
        with self.storage.tidying(STATE):
            self.state.remember(workers=workers)

    def follow_token(self, rotated: Callable[[ServiceHandle], None]) -> asyncio.Task[None]:
        """Follows the file of the owner's token; a state folder remembers the newest."""
        state, service = self.state, self.config.service

        def changed() -> None:
            if state is not None:
                with self.storage.tidying(STATE):
                    state.remember(token=self.tokens.of[Role.OWNER])
            rotated(self.handle)

        file = Path(service.token_file)
        return asyncio.create_task(follow_token(file, self.tokens, service.token_overlap_s, changed))


@contextlib.asynccontextmanager
async def tracing(runtime: Runtime, config: Config) -> AsyncIterator[None]:
    from dora.orchestrator.tracing.spans import Spans  # of an extra

    async with tracer_of(config.service) as tracer:
        spans = Spans(tracer, runtime.core.state, config.model)
        runtime.core.traces = spans
        try:
            yield
        finally:
            runtime.core.traces = None
            spans.close()


def position_of(runtime: Runtime) -> dict[str, int]:
    """Returns the step that is being filled, and the newest version."""
    window = runtime.core.state.window
    return {"step": window.step, "version": window.newest}


def journal_of(config: Config, state: StateFolder, storage: Storage) -> Journal:
    def report_fault(error: OSError | None) -> None:
        if error is None:
            storage.works(STATE)
        else:
            storage.failed(STATE, error)

    found, sizes = state.found, Sizes(compacts=not config.service.keep_events)
    log = Log(
        state.folder / LOG_FOLDER,
        found.durable,
        number=found.number,
        position=found.position,
        compaction=found.compaction,
        sizes=sizes,
        fault=report_fault,
    )
    return Journal(log, keeps_events=config.service.keep_events)


async def tier_of(
    config: Config, run_folder: Path, storage: Storage, stack: contextlib.AsyncExitStack
) -> TierServer | None:
    """Starts the server of the shared KV tier. Returns None if the configuration has no tier."""
    if config.kv.tier == "none":
        return None
    tier = TierServer(config.kv, chunk_tokens_of(config.workers.block_tokens), run_folder, storage)
    stack.push_async_callback(tier.close)
    tier.start()
    return tier
