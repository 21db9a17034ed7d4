"""The largest accepted difference between a recomputed and a recorded logprob, by weights and engines.

docs/gpus.md has the table.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from dora.data.run_record import ROLLOUT_FILE, VERSIONS_FOLDER
from dora.data.types import PLAIN_NUMERICS, EngineNumerics
from dora.errors import InvalidValue
from dora.weights.reference import read_header, weight_files

QUANTISATIONS: Final = ("", "int8", "fp8")
HALF: Final = frozenset({"BF16", "F16"})
DTYPES: Final = ("float32", "bfloat16")


class Tolerance(NamedTuple):
    """The largest accepted absolute difference of a logprob, and the rule that it comes from."""

    atol: float
    rule: str


FLOAT32: Final = Tolerance(1e-3, "float32 weights and engines")  # measured between vLLM and transformers: 5e-5
BFLOAT16_WEIGHTS: Final = Tolerance(0.2, "bfloat16 weights")
BFLOAT16_ENGINES: Final = Tolerance(0.2, "bfloat16 engines")
INT8_ENGINES: Final = Tolerance(0.1, "int8 engines")  # measured: 0.05; rounding differences near a half change integers
# Not measured against an engine. A step of fp8 is up to a sixteenth of the value, of int8 a 127th of the largest.
FP8_ENGINES: Final = Tolerance(0.5, "fp8 engines")
KV_ENGINES: Final = Tolerance(0.5, "KV in low precision")  # measured: 0.2 in fp8 on a CPU; recomputed in float32

INVARIANT: Final = "bit for bit, whatever runs beside a request (workers.batch_invariant)"
BY_DEVICE: Final = "bit for bit on CPUs with workers.threads = 1; elsewhere up to rounding, which depends on the batch"


def numerics_of(weights: Path) -> EngineNumerics:
    """Returns what the record of a version says of the engines that sampled it. Older records have less.

    Raises InvalidValue for values of a newer DORA.
    """
    file = weights / ROLLOUT_FILE
    if not file.is_file():
        return PLAIN_NUMERICS
    where = f"{VERSIONS_FOLDER}/{weights.name}/{ROLLOUT_FILE}"
    try:
        tree: Any = json.loads(file.read_text())
        found = EngineNumerics(**tree)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(where, repr(error), 'JSON written by a service: {"quantisation": "int8"}') from error
    for name, allowed in (("quantisation", QUANTISATIONS), ("dtype", DTYPES), ("batch_invariant", (False, True))):
        if not tree or getattr(found, name) not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise InvalidValue(f"{where}: {name}", getattr(found, name), f"{listed}; a newer DORA may have written it")
    if not isinstance(found.kv_dtype, str):
        raise InvalidValue(f"{where}: kv_dtype", found.kv_dtype, "a text")
    return found


def tolerance_of(weights: Path, numerics: EngineNumerics) -> Tolerance:
    """Returns the largest tolerance that the weights, or a choice of the engines, need."""
    dtypes = {tensor.dtype for file in weight_files(weights) for tensor in read_header(weights / file).values()}
    applied = [FLOAT32]
    if numerics.quantisation:
        applied.append(FP8_ENGINES if numerics.quantisation == "fp8" else INT8_ENGINES)
    if numerics.kv_dtype:
        applied.append(KV_ENGINES)
    if numerics.dtype == "bfloat16":
        applied.append(BFLOAT16_ENGINES)
    if dtypes & HALF:
        applied.append(BFLOAT16_WEIGHTS)
    return max(reversed(applied), key=lambda each: each.atol)


def exactness_of(numerics: Iterable[EngineNumerics]) -> str:
    """Returns how a moved request's logits compare with an unmoved one's. Its KV, seed and positions are exact."""
    found = tuple(numerics)
    return INVARIANT if found and all(each.batch_invariant for each in found) else BY_DEVICE
