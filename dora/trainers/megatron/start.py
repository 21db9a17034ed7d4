"""Makes every rank's learner, from folders visible to all ranks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dora.errors import Conflict, DoraError, InvalidValue
from dora.trainers.checkpoint import position_of
from dora.trainers.megatron.architecture import Architecture, Built, build
from dora.trainers.megatron.layout import Place, begin
from dora.trainers.megatron.learner import MegatronLearner
from dora.trainers.megatron.options import MegatronConfig
from dora.trainers.megatron.part import Part
from dora.trainers.megatron.state import load_states
from dora.trainers.megatron.weights import load
from dora.trainers.ranks import Ranks
from dora.trainers.start import Start
from dora.weights.files import published_header
from dora.weights.reference import TensorHeader, check_tensors, read_reference


def make_learner(
    config: MegatronConfig, start: Start, ranks: Ranks, tensors: Sequence[TensorHeader] = ()
) -> MegatronLearner:
    """Makes one rank's learner. ``tensors`` are those that the service expects, known only to the leader.

    Raises Conflict if the model's tensors differ, InvalidValue for an unsupported model or layout, DoraError if
    Megatron is not installed.
    """
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise DoraError(f"Megatron-core is not installed ({error}): pip install megatron-core") from error
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _check_model(Path(start.weights), tensors)
    place = begin(config.layout, config.rank_timeout_s)
    part = Part(
        _loaded(config, start.weights, place), config.learner, distributed_optimizer=config.distributed_optimizer
    )
    if start.moments:
        checkpoint = Path(start.moments)
        load_states(part, checkpoint, values=position_of(checkpoint).step == start.step)
    return MegatronLearner(
        part,
        config.learner,
        ranks,
        step=start.step,
        reference=_loaded(config, start.reference, place) if start.reference else None,
        reference_version=start.reference_version,
        dtypes={header.name: header.dtype for header in tensors},
        scratch=config.scratch,
    )


def _loaded(config: MegatronConfig, folder: str, place: Place) -> Built:
    built = build(Architecture.of(Path(folder)), place, config.dtype, config.transformer)
    load(built, Path(folder))
    return built


def _check_model(folder: Path, tensors: Sequence[TensorHeader]) -> None:
    expected: dict[str, Any] = {header.name: header for header in tensors}
    found = {header.name: header for header in read_reference(folder).tensors}
    try:
        if expected:
            check_tensors({name: published_header(each, expected.get(name)) for name, each in found.items()}, tensors)
    except InvalidValue as error:
        raise Conflict("--model", str(folder), f"the service's model ({error})", "is another model") from error
