"""Arguments of vLLM's engines that a user passes through (``workers.engine_args``), and those that are DORA's own."""

import ast
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from dora.errors import InvalidValue, one_of

FIELD: Final = "workers.engine_args"
_LISTED_BY: Final = "vllm serve --help=all"
_SETTINGS: Final = {
    "model": "model",
    "dtype": "workers.dtype",
    "max_model_len": "workers.max_model_len_tokens",
    "max_num_seqs": "workers.slots",
    "block_size": "workers.block_tokens",
    "kv_cache_dtype": "workers.kv_dtype",
    "quantization": "workers.quantisation",
    "gpu_memory_utilization": "workers.gpu_memory_utilisation",
    "kv_cache_memory_bytes": "workers.kv_tokens",
    "num_gpu_blocks_override": "workers.kv_tokens",
    "tensor_parallel_size": "workers.tensor_parallel",
    "pipeline_parallel_size": "workers.pipeline_parallel",
    "data_parallel_size": "workers.count",
    "enable_return_routed_experts": "workers.router_replay",
}
_REASONS: Final = {
    "the engine is DORA's: its ranks, scheduler and KV connector": (
        "distributed_executor_backend",
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "kv_transfer_config",
        "hf_overrides",
        "disable_log_stats",
    ),
    "weights come with each version": ("load_format", "weight_transfer_config", "enable_lora"),
    "engines know token ids alone": ("tokenizer", "tokenizer_mode", "skip_tokenizer_init"),
    "KV that arrives counts as a cached prefix": ("enable_prefix_caching",),
    "a request has one state": ("mamba_cache_mode", "mamba_block_size"),
    "a request that is frozen has nothing in flight": ("async_scheduling",),
    "a step samples one token of a request": ("speculative_config",),
    "trajectories carry the model's own logprobs": ("logprobs_mode",),
}
OWNED: Final[Mapping[str, str]] = {
    **{name: f"{setting} sets it" for name, setting in _SETTINGS.items()},
    **{name: reason for reason, names in _REASONS.items() for name in names},
}
# They change what a block of KV holds, or how it rounds: engines that differ in one exchange no KV.
IDENTIFYING: Final = (
    "attention_backend",
    "attention_config",
    "compilation_config",
    "enable_expert_parallel",
    "enforce_eager",
    "max_num_batched_tokens",
)


def identifying(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that belong to an engine's fingerprint."""
    return {name: arguments[name] for name in IDENTIFYING if name in arguments}


def check_owned(arguments: Iterable[str], owned: Mapping[str, str] = OWNED) -> None:
    """Raises InvalidValue for an argument that DORA sets itself, with the reason."""
    for name in arguments:
        if name in owned:
            raise InvalidValue(FIELD, name, f"left out: {owned[name]}")


def check_known(arguments: Iterable[str], known: Collection[str]) -> None:
    """Raises InvalidValue for an argument that vLLM does not have, with those of a similar name."""
    for name in arguments:
        if known and name not in known:
            raise InvalidValue(FIELD, name, one_of(name, known, listed_by=_LISTED_BY))


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises InvalidValue for a dtype of KV that the installed vLLM does not have."""
    known = installed_kv_dtypes()
    if kv_dtype and known and kv_dtype not in known:
        raise InvalidValue("workers.kv_dtype", kv_dtype, f"empty, or of the installed vLLM: {', '.join(known)}")


def installed_kv_dtypes() -> list[str]:
    """Returns the dtypes of KV of the installed vLLM, which is not imported; none without one."""
    for each in _installed("config", "cache.py"):
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "CacheDType":
            names = [node.value for node in ast.walk(each.value) if isinstance(node, ast.Constant)]
            return [str(name) for name in names if name != "auto"]
    return []


def _installed(*parts: str) -> list[ast.stmt]:
    found = find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    file = Path(places[0], *parts) if places else None
    return ast.parse(file.read_text(encoding="utf-8")).body if file is not None and file.is_file() else []


def installed_arguments() -> list[str]:
    """Returns the names of the arguments of the installed vLLM, which is not imported; none without one."""
    for each in _installed("engine", "arg_utils.py"):
        if isinstance(each, ast.ClassDef) and each.name == "EngineArgs":
            fields = [node.target for node in each.body if isinstance(node, ast.AnnAssign)]
            return [field.id for field in fields if isinstance(field, ast.Name)]
    return []
