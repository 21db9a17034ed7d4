"""Timings of a running engine: plain data between the worker that measures them and the fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

ClockName = Literal["wall", "cpu"]  # real time, or the thread's own time on a core


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """The time of a step, out of several, in which ``running`` requests decoded one token each."""

    running: Annotated[int, "requests that decoded one token each"]
    kv_tokens: Annotated[float, "total of their cached tokens"]
    step_s: Annotated[float, "time of the step"]


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One step that computed the KV of ``prompt_tokens`` for ``running`` new requests and their first tokens."""

    running: Annotated[int, "new requests"]
    prompt_tokens: Annotated[int, "total of their prompt tokens"]
    step_s: Annotated[float, "time of the step"]


@dataclass(frozen=True, slots=True)
class DraftSample:
    """The time of a step in which ``running`` requests decoded, and ``drafted`` tokens of each were verified."""

    running: Annotated[int, "requests that decoded"]
    drafted: Annotated[int, "drafted tokens of each, hardly any of which were accepted"]
    kv_tokens: Annotated[float, "total of their cached tokens"]
    step_s: Annotated[float, "time of the step"]


@dataclass(frozen=True, slots=True)
class MixedRequest:
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and how many of them one token chooses."""

    total: Annotated[int, "experts in a layer"]
    per_token: Annotated[int, "experts that one token is sent to"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """All measurements of one engine. Times except the wall times are means of the steps that count."""

    slots: int
    decode: tuple[DecodeSample, ...]
    prefill: tuple[PrefillSample, ...]
    mixed: tuple[MixedRequest, ...]  # run with at most ``slots`` at once; the next replaces a finished one
    mixed_s: float  # of this workload
    mixed_wall_s: tuple[float, ...]  # of each of its runs, including other load of the machine
    wall_s: float  # of the whole measurement
    experts: Experts | None = None  # of the model, if it is a mixture of them
    clock: ClockName = "wall"  # of the steps, and of mixed_s
    engines: int = 1  # timed at the same time; all times are means over them
    drafts: tuple[DraftSample, ...] = ()  # none of an engine that verifies no drafts


def measurement_of(tree: Mapping[str, Any]) -> Measurement:
    return Measurement(
        **{
            **tree,
            "decode": tuple(DecodeSample(**sample) for sample in tree["decode"]),
            "prefill": tuple(PrefillSample(**sample) for sample in tree["prefill"]),
            "mixed": tuple(MixedRequest(**request) for request in tree["mixed"]),
            "mixed_wall_s": tuple(tree["mixed_wall_s"]),
            "drafts": tuple(DraftSample(**sample) for sample in tree["drafts"]),
        }
    )


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """The mean of engines that were timed at the same time on the same grid and mixed workload.

    Each point has the mean time, rather than all times: the fit of relative errors would favour the faster engines.
    """
    first = measurements[0]
    return replace(
        first,
        decode=tuple(
            DecodeSample(each[0].running, fmean(s.kv_tokens for s in each), fmean(s.step_s for s in each))
            for each in zip(*(measurement.decode for measurement in measurements), strict=True)
        ),
        prefill=tuple(
            replace(each[0], step_s=fmean(sample.step_s for sample in each))
            for each in zip(*(measurement.prefill for measurement in measurements), strict=True)
        ),
        drafts=tuple(
            replace(each[0], kv_tokens=fmean(s.kv_tokens for s in each), step_s=fmean(s.step_s for s in each))
            for each in zip(*(measurement.drafts for measurement in measurements), strict=True)
        ),
        mixed_s=fmean(each.mixed_s for each in measurements),
        mixed_wall_s=tuple(map(fmean, zip(*(each.mixed_wall_s for each in measurements), strict=True))),
        wall_s=max(each.wall_s for each in measurements),
        engines=len(measurements),
    )
