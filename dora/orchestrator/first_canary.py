"""The canary of version 0 of a user's model, which the workers must reproduce like that of a committed version."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.data.types import Canary
from dora.errors import InvalidValue, NotFound
from dora.host.last_words import reason_in
from dora.models import NAMES
from dora.system.environment import child_environment
from dora.system.memory import available_bytes
from dora.weights.canary_bounds import bound_of, check_reproduced
from dora.weights.first_version import BAD_LOGPROBS, LACKS
from dora.weights.reference import DTYPE_BYTES, read_reference

MODULE: Final = "dora.weights.first_version"
IMPORT_S: Final = 10.0  # of torch and transformers
PERIOD_S: Final = 1.0
BYTES_A_SECOND: Final = 200e6  # of weights in float32 that are read, and computed with once


async def compare_later(
    config: Config, model: Path, canary_here: Callable[[], Canary | None], progress: Callable[[str], None]
) -> None:
    """Compares version 0 as its first worker has computed it, which ``canary_here`` returns once it has, with
    transformers. GPUs need not wait for that. Raises CanaryMismatch, and like ``first_canary``.
    """
    expected, workers = await first_canary(config, model, progress), config.workers
    if expected is None:
        return
    with suppress(NotFound):  # the version has been retired meanwhile
        while (found := await asyncio.to_thread(canary_here)) is None:  # noqa: ASYNC110  loads tell the store alone
            await asyncio.sleep(PERIOD_S)
        if found.token_ids != expected.token_ids:
            progress("warning: version 0 is not compared with transformers: its routers tie on the workers' tokens")
            return
        check_reproduced(0, found, expected, bound_of(workers.numerics))
        progress("version 0 was compared with transformers: the workers compute the same")


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
