"""Proofs that something works on this machine's GPUs: files that ``dora doctor`` writes.

    ranks     engines of several ranks
    images    engines that read weights in the trainer's memory
    kv        requests whose KV goes from one GPU to another

Each proof names what was proven on, so another driver, GPU, vLLM, NIXL or DORA needs a proof of its own.
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from dora.host.placement import gpus
from dora.kvtransfer.transports.nixl_pair import nixl_package
from dora.models import default_cache
from dora.release import __version__

Kind = Literal["ranks", "images", "kv"]

DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def machine() -> dict[str, Any]:
    """Returns the facts that a proof holds for."""
    return {
        "dora": __version__,
        "vllm": _installed("vllm"),
        "torch": _installed("torch"),
        "nixl": _installed(nixl_package()),
        "driver": _driver(),
        "gpus": sorted({gpu.model for gpu in gpus()}),
    }


def proof_file(kind: Kind, folder: Path | None = None) -> Path:
    """Returns the file that proves ``kind`` on this machine, by default in the user's cache."""
    digest = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return (default_cache() if folder is None else folder) / "proofs" / f"{kind}-{digest}.json"


def write_proof(kind: Kind, found: dict[str, Any], folder: Path | None = None) -> Path:
    file = proof_file(kind, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "found": found}, indent=1) + "\n")
    return file


def _installed(name: str) -> str:
    try:
        return version(name) if name else ""
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        return DRIVER_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
