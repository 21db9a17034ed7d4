"""Checks a configuration as a start would, without starting an engine or leaving anything behind.

Each check is the function that a start itself calls, in the order of ``dora.orchestrator.main.serve``.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.core.policies import check_live
from dora.errors import InvalidValue
from dora.host.placement import Placement, placement_of
from dora.models import context_tokens, made_model, unwritable_cache
from dora.orchestrator.hosts.tier_server import check_tier
from dora.orchestrator.model_check import check_model
from dora.orchestrator.plugins import load_strategies
from dora.orchestrator.recovery.begin_from import check_from
from dora.orchestrator.recovery.state_folder import check_state
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.scoring import filtering, verifying
from dora.orchestrator.services.server import check_address
from dora.orchestrator.setup import (
    cache_of,
    check_engine,
    check_record,
    check_run_folder,
    routing_wanted,
    shared_memory,
    with_context,
)
from dora.orchestrator.version_memory import version_memory
from dora.prompts import ChatTokenizer, PromptSource, resolve_prompts
from dora.system.files import try_folder
from dora.weights.reference import read_reference

NOT_CHECKED: Final = "a start or `dora prepare {model}` must make it first: its prompts are not checked"

Said = Callable[[str, str], None]  # the subject of a check, and its result


async def run_preflight(config: Config, said: Said) -> None:
    """Raises InvalidValue for the first setting that a start would refuse, with the same message."""
    load_strategies()
    check_live(config.balance, config.window)
    said("policy", f"{config.balance.policy}, window {config.window.size}")
    check_engine(config)
    vocab_size = 0
    workers = config.workers
    placement = placement_of(workers.device, for_trainer=workers.gpus_for_trainer)
    placement.check(workers.count, workers.ranks)
    said("workers", f"{workers.count}, engine {workers.engine}, on {_devices(placement)}")
    said("KV tier", await check_tier(config))
    config = await asyncio.to_thread(check_from, config)
    model = await asyncio.to_thread(made_model, config.model, cache_of(config))
    if model is None:
        await asyncio.to_thread(_check_cache, config)
        said("model", NOT_CHECKED.format(model=config.model))
    else:
        config, vocab_size = await _check_model(config, model, said)
    await asyncio.to_thread(check_state, config)
    said("state folder", config.service.state or "none")
    await asyncio.to_thread(check_run_folder, config)
    said("run folder", config.service.run_folder or "a new one in shared memory")
    await asyncio.to_thread(check_record, config)
    said("record", config.record or "none")
    source = await _check_prompts(config, model, vocab_size, said) if model is not None else None
    await _check_functions(config, model, source, said)
    await check_address(config)
    said("address", config.service.listen)
    said("token", "as given" if config.service.token else "a new one at the start")


def _devices(placement: Placement) -> str:
    return ", ".join(f"{gpu.model} ({gpu.uuid})" for gpu in placement.gpus) or "cpu"


def _check_cache(config: Config) -> None:
    """Raises InvalidValue if the model cannot be put into the cache."""
    try:
        try_folder(cache_of(config))
    except OSError as error:
        allowed = f"a model that can be prepared ({unwritable_cache(error)})"
        raise InvalidValue("--model", config.model, allowed) from error


async def _check_model(config: Config, model: Path, said: Said) -> tuple[Config, int]:
    """Returns the configuration with the model's context, and the size of its vocabulary."""
    config = with_context(config, model)
    routing_wanted(config, model)
    for warning in await asyncio.to_thread(check_model, config, model):
        said("model", f"warning: {warning}")
    reference = await asyncio.to_thread(read_reference, model)
    context = context_tokens(model)
    longest = f", contexts of up to {context:,} tokens" if context is not None else ""
    said("model", f"{model}, {len(reference.tensors):,} tensors{longest}")
    run_folder = Path(config.service.run_folder or shared_memory())
    memory = await asyncio.to_thread(version_memory, config, reference, run_folder)
    memory.check()
    said("weights", str(memory))
    return config, reference.vocab_size


async def _check_prompts(config: Config, model: Path, vocab_size: int, said: Said) -> PromptSource:
    tokenizer = await asyncio.to_thread(ChatTokenizer, model, cache_of(config))
    routing = routing_wanted(config, model)
    check = PromptCheck(config, tokenizer=tokenizer, vocab_size=vocab_size, routing=routing)
    source = await asyncio.to_thread(
        resolve_prompts, config.prompts, tokenizer, config.rollout.seed, check=check.well_formed
    )
    first = await asyncio.to_thread(source.at, 0)
    begins = f", the first has {len(first.token_ids):,} tokens" if first is not None else ""
    said("prompts", f"{config.prompts.source}{begins}")
    return source


async def _check_functions(config: Config, model: Path | None, source: PromptSource | None, said: Said) -> None:
    """Loads the reward function and the filter in a process each. ``source`` None: its reward is unknown."""
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": 1})})
    if source is not None or config.reward.function:
        given = source or PromptSource(config.prompts.source, "", lambda index: None)
        async with verifying(config, given, model) as verifier:
            said("reward", verifier.spec)
    async with filtering(config):
        said("filter", config.selection.filter or "none")
