"""The environment of child processes: an allow-list, what the user names, and what DORA states.

Nothing else is inherited. Credentials stay out, and so do variables that change an engine or an interpreter, such as
the ``VLLM_PORT`` that an orchestrator of containers sets for a service called ``vllm``.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

# Whether vLLM runs batch-invariant: 0 or 1. Its kernels read it when they are imported.
BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
PAGE_TOKEN: Final = "DORA_PAGE_TOKEN"  # with which a front's page follows the service's status
HANDED: Final = "DORA_SECRETS_FILE"  # the number of an open file with secrets
SECRETS: Final = ("DORA_TOKEN", PAGE_TOKEN)  # never passed on, whatever is named
# Where things are, who runs it, which words it uses, and where Python finds modules.
INHERITED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR", "TEMP", "TMP"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONPLATLIBDIR"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUTF8"),
)
DEVICES: Final = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
)
DOWNLOADS: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HF_*", "HUGGINGFACE_*", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
# Variables that may change what an engine or a function does: a report names those that are left out.
NOTABLE: Final = (
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NCCL_*", "GLOO_*", "UCX_*", "NIXL_*", "NVIDIA_*", "HIP_*", "ROCR_*", "HSA_*"),
    *("VLLM_*", "TORCH*", "PYTORCH_*", "TRITON_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "LMCACHE_*", "GRPC_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*", "MALLOC_*", "PYTHON*", "LD_*"),
    *("*_PROXY", "*_proxy", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "DORA_*"),
)
OWN: Final = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}  # set by DORA itself, where nobody else has


def child_environment(
    passed: Iterable[str] = (), stated: Mapping[str, str] | None = None, parent: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the variables for a child process.

    ``passed`` has names beside the allow-list, where ``*`` stands for any text. ``stated`` overrides what is inherited
    from ``parent``, by default this process's environment.
    """
    allowed = (*INHERITED, *passed)
    source = os.environ if parent is None else parent
    inherited = {name: value for name, value in source.items() if _matches(name, allowed) and name not in SECRETS}
    return {**inherited, **(stated or {})}


def without_secrets() -> dict[str, str]:
    """Returns this process's variables except the secrets, for a command that examines its own surroundings."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def taken(name: str) -> str:
    """Returns a secret variable, and removes it from this process: ``/proc/PID/environ`` does not show it either."""
    value = os.environ.pop(name, "")
    begin, end = map(
        int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49]
    )  # proc(5): env_start, _end
    block, before = b"\0" + ctypes.string_at(begin, end - begin), f"\0{name}=".encode()
    if (at := block.find(before)) >= 0:
        first = at + len(before)
        ctypes.memset(begin + first - 1, 0, block.find(b"\0", first) - first)
    return value


def handed(secrets: Mapping[str, str]) -> int:
    """Returns a file with secrets for a child process, which gets it open, and its number as ``HANDED``."""
    descriptor = os.memfd_create("secrets")
    os.write(descriptor, json.dumps(dict(secrets)).encode())
    return descriptor


def take_handed() -> None:
    """Takes the secrets that this process's parent has handed as its own variables."""
    if number := os.environ.pop(HANDED, ""):
        os.environ.update(json.loads(os.pread(int(number), 1 << 16, 0)))
        os.close(int(number))


def left_out(child: Mapping[str, str], parent: Mapping[str, str] | None = None) -> list[str]:
    """Returns the notable variables of this process that ``child`` lacks, or has with another value; sorted."""
    source = os.environ if parent is None else parent
    return sorted(
        name
        for name, value in source.items()
        if child.get(name) != value and _matches(name, NOTABLE) and name not in SECRETS and OWN.get(name) != value
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
