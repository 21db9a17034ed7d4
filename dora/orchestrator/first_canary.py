"""The canary of version 0 of a user's model, which the workers must reproduce like that of a committed version."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.data.types import Canary
from dora.errors import InvalidValue
from dora.host.last_words import reason_in
from dora.models import NAMES
from dora.system.environment import child_environment
from dora.system.memory import available_bytes
from dora.weights.first_version import BAD_LOGPROBS, LACKS
from dora.weights.reference import DTYPE_BYTES, read_reference

MODULE: Final = "dora.weights.first_version"
IMPORT_S: Final = 10.0  # of torch and transformers
BYTES_A_SECOND: Final = 200e6  # of weights in float32 that are read, and computed with once


async def first_canary(config: Config, model: Path, progress: Callable[[str], None]) -> Canary | None:
    """Computes the canary with transformers. Returns None for a model of DORA's own, or if transformers cannot load the
    folder, which ``progress`` is told, as is the time that it takes. Raises InvalidValue if the folder lacks weights or
    gives logprobs that no model has.
    """
    if config.model in NAMES or not config.workers.count or config.workers.engine != "vllm":
        return None
    tensors = (await asyncio.to_thread(read_reference, model)).tensors
    needed = sum(4 * each.content_bytes // DTYPE_BYTES[each.dtype] for each in tensors)
    if 2 * needed > available_bytes():
        progress(f"warning: version 0 is not compared with transformers: that takes {2 * needed:,} bytes of memory")
        return None
    takes_s = IMPORT_S + needed / BYTES_A_SECOND
    progress(f"computing version 0 with transformers, to compare the workers with it: about {takes_s:.0f} s")
    stated = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE, str(model)),
        env=child_environment(stated=stated),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    reason = reason_in(errors.decode(errors="replace"))
    if process.returncode == LACKS:
        raise InvalidValue("--model", config.model, f"a folder with all weights; transformers misses {reason}")
    if process.returncode == BAD_LOGPROBS:
        raise InvalidValue("--model", config.model, f"a folder whose weights give finite logprobs ({reason})")
    if process.returncode:
        progress(f"warning: version 0 is not compared with transformers, which cannot load it: {reason}")
        return None
    found = json.loads(said.splitlines()[-1])
    for warning in found["warnings"]:
        progress(f"warning: {config.model}: {warning}")
    return Canary(tuple(found["token_ids"]), tuple(found["logprobs"]))
