"""The arguments and environment of a host's processes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config import KvConfig, WorkersConfig
from dora.host.launcher import LOCAL, prefix_of
from dora.system.environment import BATCH_INVARIANT
from dora.tls import Tls

WORKER_MODULE: Final = "dora.worker"
POOL_MODULE: Final = "dora.pool"
WAIT_OPTION: Final = "--wait"  # of a worker: its arguments come on stdin after its engine is imported


def pool_id_of(host: str) -> str:
    return f"{prefix_of(host)}pool-0"


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Addresses and folders that a host's processes need. ``folder`` is the host's own run folder, or the service's if
    empty.

    ``kv_host`` is their address for other hosts, detected if empty. ``kv_tier`` is the address of the shared KV tier,
    empty if there is none.
    """

    address: str  # the service's
    model: Path
    host: str = LOCAL
    folder: str = ""
    kv_host: str = ""
    kv_tier: str = ""
    device: str = "cpu"  # the kind of the host's devices
    tls: Tls | None = None  # of the host


def worker_argv(config: WorkersConfig, worker_id: str, context: LaunchContext) -> list[str]:
    options = {
        "--orchestrator": context.address,
        "--worker-id": worker_id,
        "--host": context.host,
        "--engine": config.engine,
        "--model": str(context.model),
        "--device": context.device,
        "--slots": config.slots,
        "--kv-tokens": config.kv_tokens,
        "--block-tokens": config.block_tokens,
        "--max-model-len-tokens": config.max_model_len_tokens,
        "--dtype": config.dtype,
        "--tensor-parallel": config.tensor_parallel,
        "--pipeline-parallel": config.pipeline_parallel,
        "--gpu-memory-utilisation": config.gpu_memory_utilisation,
        "--state-mb": config.state_mb,
        "--load-timeout-s": config.load_timeout_s,
        **({"--engine-args": json.dumps(config.engine_args)} if config.engine_args else {}),
        **({"--quantisation": config.quantisation} if config.quantisation else {}),
        **({"--kv-dtype": config.kv_dtype} if config.kv_dtype else {}),
        **_speculation(config),
        **({"--host-folder": context.folder} if context.folder else {}),
        **({"--kv-host": context.kv_host} if context.kv_host else {}),
        **({"--kv-tier": context.kv_tier} if context.kv_tier else {}),
    }
    chosen = {"--router-replay": config.router_replay, "--batch-invariant": config.batch_invariant}
    flags = [name for name, is_chosen in chosen.items() if is_chosen]
    return ["-m", WORKER_MODULE, *(str(part) for option in options.items() for part in option), *flags]


def _speculation(config: WorkersConfig) -> dict[str, str | int]:
    if config.speculation == "off":
        return {}
    return {"--speculation": config.speculation, "--history-mb": config.history_mb}


def pool_argv(config: KvConfig, pool_id: str, context: LaunchContext) -> list[str]:
    options = {
        "--orchestrator": context.address,
        "--pool-id": pool_id,
        "--host": context.host,
        "--memory-mb": config.pool_mb,
        "--spill-mb": config.spill_mb,
        **({"--spill-folder": config.spill_folder} if config.spill_folder else {}),
        **({"--host-folder": context.folder} if context.folder else {}),
        **({"--kv-host": context.kv_host} if context.kv_host else {}),
    }
    return ["-m", POOL_MODULE, *(str(part) for option in options.items() for part in option)]


def is_started_so(name: str, argv: Sequence[str]) -> bool:
    """Returns whether these are the arguments with which a host starts the worker or pool of this name."""
    modules = {WORKER_MODULE: "--worker-id", POOL_MODULE: "--pool-id"}
    option = next((modules[part] for part in argv if part in modules), None)
    if option is None or WAIT_OPTION in argv:  # that one's arguments are not seen
        return option is not None
    return option in argv and argv[argv.index(option) + 1 :][:1] == [name]


def worker_environment(config: WorkersConfig, token: str, tls: Tls | None = None) -> dict[str, str]:
    """Fixes the number of threads and vLLM's mode before numpy, torch and vLLM load, and carries the token, which other
    users cannot read here, and the names of the host's TLS files.
    """
    threads = str(config.threads)
    return {
        "DORA_TOKEN": token,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        BATCH_INVARIANT: str(int(config.batch_invariant)),
        **(tls.environment() if tls is not None else {}),
    }
