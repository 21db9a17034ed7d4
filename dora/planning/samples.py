"""Timings of a running engine: plain data between the worker that takes them and the fit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """The time of a step, out of several, in which ``running`` requests decoded one token each."""

    running: int
    kv_tokens: float  # of all running requests
    step_s: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One step that computed the KV of ``prompt_tokens`` for ``running`` new requests and their first tokens."""

    running: int
    prompt_tokens: int  # of all of them
    step_s: float


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One request of a mixed workload."""

    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Experts:
    """What a mixture of experts has in a layer, and what one token chooses of it."""

    total: int
    per_token: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """All that was measured of one engine. Times but the wall times are those of a machine left alone, as estimated."""

    slots: int
    decode: tuple[DecodeSample, ...]
    prefill: tuple[PrefillSample, ...]
    mixed: tuple[MixedRequest, ...]  # run with at most ``slots`` at once, a finished one replaced by the next
    mixed_s: float  # of this workload
    mixed_wall_s: tuple[float, ...]  # of each of its runs, whatever else the machine did
    wall_s: float  # of the whole measurement
