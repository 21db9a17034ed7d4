"""The turns of a fake engine's requests: how each begins, is sampled and ends."""

import numpy as np

from dora.data.types import FinishReason, RequestSpec, RoutingShape, TokenDelta
from dora.worker.fake.kv import FakeRequest
from dora.worker.fake.model import STOP_TOKEN_ID, FakeModel
from dora.worker.stop_strings import StopStrings, StopWatch


class FakeTurns:
    """Samples with a model. ``routed`` is the shape of the tokens' routed experts, or None if they carry none."""

    def __init__(
        self, model: FakeModel, stop_strings: StopStrings, max_model_len_tokens: int, routed: RoutingShape | None
    ) -> None:
        self._model = model
        self._stop_strings = stop_strings
        self._max_model_len_tokens = max_model_len_tokens
        self._routed = routed

    def begin(self, request: RequestSpec) -> tuple[int, list[int], list[float], StopWatch | None]:
        """Returns the length of the present turn if nothing ends it earlier, all outputs, their logprobs, and the watch
        for the turn's stop strings.
        """
        turn = request.turn()
        outputs, logprobs = list(request.output_token_ids), list(request.logprobs)
        return self._model.length(turn), outputs, logprobs, self._stop_strings.watch(turn)

    def sample(self, live: FakeRequest) -> TokenDelta:
        """Samples a token. The last one sampled, and given ones, get their KV first."""
        first = live.tokens - 1 - live.pending if live.outputs else 0
        owed = b""
        if live.owes_prompt:
            owed = np.asarray(self._model.score(live.token_ids), "<f4").tobytes()
        for token_id in live.from_token(live.kv_tokens):
            self._model.append_kv(live.kv, token_id)
        index, sampling = len(live.outputs), live.request.sampling
        in_turn = index + 1 - live.request.turn_begin
        ends = in_turn >= max(live.length, sampling.min_tokens) and not sampling.ignore_eos
        forbidden = sampling.stop_token_ids if in_turn < sampling.min_tokens else ()
        token_id, logprob = self._model.sample(
            live.request, live.kv, live.from_token(live.tokens - 1)[0], ends, forbidden
        )
        live.outputs.append(token_id)
        live.logprobs.append(logprob)
        reason = self._finish_reason(live)
        stop = live.watch.completed_by(token_id) if live.watch is not None and reason != "stop" else ""
        reason = "stop" if stop else reason
        routed = b""
        if self._routed is not None:  # the first token reports the whole prompt's
            routed = self._model.routed(live.kv, range(first, live.kv_tokens), self._routed)
        request = live.request
        return TokenDelta(
            request.request_id, request.version, index, (token_id,), (logprob,), reason, stop, routed, owed
        )

    def _finish_reason(self, live: FakeRequest) -> FinishReason | None:
        sampling, last = live.request.sampling, live.outputs[-1]
        if (last == STOP_TOKEN_ID and not sampling.ignore_eos) or last in sampling.stop_token_ids:
            return "stop"
        sampled = len(live.outputs) - live.request.turn_begin
        if sampled >= sampling.max_tokens or live.tokens >= self._max_model_len_tokens:
            return "length"
        return None
