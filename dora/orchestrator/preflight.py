"""Checks a configuration as a start would, without starting an engine or leaving anything behind.

Each check is the function that a start itself calls, in the order of ``dora.orchestrator.main.serve``.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.core.policies import check_live
from dora.data.record_run import SET_ASIDE
from dora.errors import InvalidValue
from dora.host.gpu_host import check_host, driver_number
from dora.host.placement import Placement
from dora.journal.log import Sizes
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.plane import local_host
from dora.models import context_tokens, made_model, unwritable_cache
from dora.orchestrator.device_sizes import device_sizes, on_paper, placement_for, trainer_command, with_sizes
from dora.orchestrator.first_canary import first_canary
from dora.orchestrator.guard import check_tls
from dora.orchestrator.hosts.tier_server import check_socket, check_tier
from dora.orchestrator.metrics.server import check_address as check_metrics
from dora.orchestrator.model_check import check_model
from dora.orchestrator.plugins import load_strategies
from dora.orchestrator.recovery.begin_from import check_from
from dora.orchestrator.recovery.binding import check_binding, content_of
from dora.orchestrator.recovery.state_folder import StateFolder, reading_state
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rotation import with_token
from dora.orchestrator.scoring import filtering, verifying
from dora.orchestrator.services.evaluation_series import evaluation_prompts
from dora.orchestrator.services.server import check_address
from dora.orchestrator.setup import (
    WEIGHTS_FOLDER,
    cache_of,
    check_engine,
    check_record,
    check_run_folder,
    lacking_room,
    required_routing,
    with_context,
)
from dora.orchestrator.tracing.export import check_traces
from dora.orchestrator.version_memory import version_memory
from dora.prompts.resolving import resolve_prompts
from dora.prompts.source import PromptSource
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc.roles import ServiceTokens
from dora.system.files import try_folder
from dora.weights.holds import VERSIONS_FOLDER
from dora.weights.reference import Reference, read_reference

NOT_CHECKED: Final = "a start or `dora prepare {model}` must make it first: prompts and state are not checked with it"

Said = Callable[[str, str], None]  # the subject of a check, and its result


async def run_preflight(config: Config, said: Said) -> None:
    """Raises InvalidValue for the first setting that a start would refuse, with the same message."""
    load_strategies()
    config = await asyncio.to_thread(with_token, config)
    check_live(config.balance, config.window)
    said("policy", f"{config.balance.policy}, window {config.window.size}")
    check_engine(config)
    check_traces(config.service)
    said("TLS", await asyncio.to_thread(check_tls, config))
    said("KV tier", await check_tier(config))
    await asyncio.to_thread(ServiceTokens, config.service.token)
    sizes = Sizes(compacts=not config.service.keep_events)
    with reading_state(config, sizes) as state:
        config = await asyncio.to_thread(check_from, config, state)
        if state is not None:
            config = state.carried_on(config)
        said("state folder", _described(config, state))
        said("token", "as given" if config.service.token else "a new one at the start")
        secret = state.identity.kv_secret if state is not None else ""
        run_folder = await asyncio.to_thread(check_run_folder, config, secret)
        if config.kv.tier != "none":
            check_socket(run_folder.resolve())
        said("run folder", config.service.run_folder or f"a new one in {_parent(run_folder, config)}")
        workers = config.workers
        placement = placement_for(workers)
        placement.check(workers.count, workers.ranks)
        said("workers", f"{workers.count}, engine {workers.engine}, on {_devices(placement)}")
        if placement.gpus and not on_paper(workers):
            read = await asyncio.to_thread(check_host, placement.gpus, workers.device)
            said("host", f"driver {driver_number(read.driver)}, {read.compiler}" if read else "")
        await _check_content(config, state, run_folder, said, placement)
    if command := trainer_command(placement, config.service.listen):
        said("trainer", command)
    await check_address(config)
    Listener(config.kv.host or local_host(config.service.listen)).close()
    said("address", config.service.listen)
    await check_metrics(config.service.metrics)
    said("metrics", config.service.metrics or "none")


def _described(config: Config, state: StateFolder | None) -> str:
    if state is None:
        return "none"
    newest = state.found.durable.newest
    return f"{state.folder}, " + ("new" if state.found.is_new else f"of a run at step {newest}")


def _parent(run_folder: Path, config: Config) -> Path:
    return run_folder.parent if config.service.state else run_folder


async def _check_content(
    config: Config, state: StateFolder | None, run_folder: Path, said: Said, placement: Placement
) -> None:
    """Checks the model, the state against it, prompts, record, reward and filter."""
    carries_on = state is not None and not state.found.is_new
    model = await asyncio.to_thread(made_model, config.model, cache_of(config))
    if model is None:
        await asyncio.to_thread(_check_cache, config)
        said("model", NOT_CHECKED.format(model=config.model))
        source = None
    else:
        config, reference = await _check_model(config, model, said)
        kept = 0 if state is None else len(state.found.durable.versions)
        memory = await asyncio.to_thread(version_memory, config, reference, run_folder, kept)
        if not on_paper(config.workers):
            memory.check()
        said("weights", str(memory))
        if sizes := device_sizes(config, model, reference, placement):
            said("sizes", str(sizes))
        config = with_sizes(config, sizes)
        if state is not None:
            state.check_settings(config)
            store = run_folder / WEIGHTS_FOLDER / VERSIONS_FOLDER
            await asyncio.to_thread(state.check_brings_back, store)
        if not on_paper(config.workers) and (warning := lacking_room(run_folder, memory.needed_bytes)):
            said("run folder", f"warning: {warning}")
        if not carries_on and not placement.gpus:  # on GPUs a start does that later
            await _check_first_version(config, model, said)
        source = await _check_prompts(config, model, reference.vocab_size, said)
    record = await asyncio.to_thread(check_record, config, carries_on)
    if state is not None and model is not None and source is not None:
        content = await asyncio.to_thread(content_of, config, model, config.reward.function or source.reward)
        against, surplus = check_binding(config, state, record, content)
        if against:
            said("record and state", f"the start carries on although {against}")
        if surplus is not None:
            said("record", f"the start moves its content from step {surplus} on to {SET_ASIDE}-N in it")
    said("record", config.record or "none")
    await _check_functions(config, model, source, said)


async def _check_first_version(config: Config, model: Path, said: Said) -> None:
    canary = await first_canary(config, model, lambda line: said("version 0", line))
    if canary is not None:
        said("version 0", f"{len(canary.logprobs)} logprobs of its canary by transformers, all finite")


def _devices(placement: Placement) -> str:
    return ", ".join(f"{gpu.model} ({gpu.uuid})" for gpu in placement.gpus) or "cpu"


def _check_cache(config: Config) -> None:
    try:
        try_folder(cache_of(config))
    except OSError as error:
        allowed = f"a model that can be prepared ({unwritable_cache(error)})"
        raise InvalidValue("--model", config.model, allowed) from error


async def _check_model(config: Config, model: Path, said: Said) -> tuple[Config, Reference]:
    config = with_context(config, model)
    required_routing(config, model)
    for warning in await asyncio.to_thread(check_model, config, model):
        said("model", f"warning: {warning}")
    reference = await asyncio.to_thread(read_reference, model)
    context = context_tokens(model)
    longest = f", contexts of up to {context:,} tokens" if context is not None else ""
    said("model", f"{model}, {len(reference.tensors):,} tensors{longest}")
    return config, reference


async def _check_prompts(config: Config, model: Path, vocab_size: int, said: Said) -> PromptSource:
    tokenizer = await asyncio.to_thread(ChatTokenizer, model, cache_of(config))
    routing = required_routing(config, model)
    check = PromptCheck(config, tokenizer=tokenizer, vocab_size=vocab_size, routing=routing)
    source = await asyncio.to_thread(
        resolve_prompts,
        config.prompts,
        tokenizer,
        config.rollout.seed,
        check=check.well_formed,
        progress=lambda line: said("prompts", line),
        longest_tokens=config.rollout.max_tokens,
    )
    first = await asyncio.to_thread(source.at, 0)
    evaluated = await asyncio.to_thread(evaluation_prompts, config, tokenizer, check)
    if evaluated:
        said(
            "evaluation", f"{len(evaluated):,} prompts of {config.evaluation.prompts}, every {config.evaluation.every}"
        )
    begins = f", the first has {len(first.token_ids):,} tokens" if first is not None else ""
    said("prompts", f"{config.prompts.source}{begins}")
    return source


async def _check_functions(config: Config, model: Path | None, source: PromptSource | None, said: Said) -> None:
    """Loads the reward function and the filter in a process each. If ``source`` is None, its reward is unknown."""
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": 1})})
    if source is not None or config.reward.function:
        prompts = source or PromptSource(config.prompts.source, "", lambda index: None)
        async with verifying(config, prompts, model) as verifier:
            said("reward", verifier.spec)
    async with filtering(config):
        said("filter", config.selection.filter or "none")
