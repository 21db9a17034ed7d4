"""A sample in protobuf, as Tinker's client reads it."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from dora.agents.front.protocols.tinker import sample_pb2 as pb
from dora.agents.front.turns import RunningTurn

CONTENT_TYPE: Final = "application/x-protobuf"


def encoded_sample(turns: Sequence[RunningTurn], scored: int = 0) -> bytes:
    """Returns the sequences of turns that have ended, and the logprobs of the last ``scored`` tokens of their prompt,
    which came with the first one.
    """
    sample = pb.SampleResponse(sequences=map(_sequence, turns))
    if scored:
        values = np.array([np.nan, *turns[0].prompt_logprobs], "<f4")
        values[: len(values) - scored] = np.nan
        sample.prompt_logprobs = values.tobytes()
    return sample.SerializeToString()


def _sequence(turn: RunningTurn) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if turn.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
        tokens=np.asarray(turn.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(turn.logprobs, "<f4").tobytes(),
    )
