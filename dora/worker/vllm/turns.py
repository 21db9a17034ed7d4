"""The turns of a vLLM engine's requests: each begins as a request to vLLM, is sampled, and ends or is extended."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

import numpy as np

from dora.data.types import FinishReason, RequestSpec, TokenDelta
from dora.kvtransfer.snapshot import KvSnapshot
from dora.worker.reservation import Reservation
from dora.worker.stop_strings import StopStrings, StopWatch
from dora.worker.vllm.device.port import Device
from dora.worker.vllm.requests import Made, sampling_of, to_vllm
from dora.worker.vllm.views import EngineRequest

_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}


class Turns:
    def __init__(self, core: Any, device: Device, stops: Sequence[int], stop_strings: StopStrings) -> None:
        """``stops`` are the tokens that end a response."""
        self._core = core
        self._device = device
        self._stops = stops
        self._stop_strings = stop_strings
        self._by_engine_id: dict[str, EngineRequest] = {}
        self._serial = count(1)

    def make(self, request: RequestSpec) -> Made:
        """Prepares the present turn, without this engine's state."""
        turn, begin = request.turn(), request.turn_begin
        core_request = to_vllm(turn, self.next_engine_id(request.request_id), self._stops)
        watch = self._stop_strings.watch(replace(turn, output_token_ids=(), logprobs=()))
        made = Made(self._core.preprocess_add_request(core_request)[0], watch, self._device, begin)
        made.restore_outputs(turn.output_token_ids)
        return made

    def live_of(self, request: RequestSpec, made: Made) -> EngineRequest:
        made.restore_outputs(request.output_token_ids[request.turn_begin :])
        live = EngineRequest(request, made.engine_id, outputs=list(request.output_token_ids))
        live.logprobs.extend(request.logprobs)
        self._by_engine_id[live.engine_id] = live
        return live

    def start(
        self, request: RequestSpec, made: Made, snapshot: KvSnapshot | None, reservation: Reservation | None
    ) -> None:
        """Gives the request to vLLM, with its KV if a snapshot has it."""
        engine_id, scheduler = made.engine_id, self._core.scheduler
        if snapshot is not None:
            scheduler.connector.offer(engine_id, snapshot)
        if snapshot is not None and reservation is not None:
            scheduler.bring(engine_id, reservation, snapshot.ahead)
        if request.keeps:
            scheduler.keeps.add(engine_id)
        self._follow(engine_id, request, made.watch)
        if request.inputs:
            scheduler.begin_turn(engine_id, request.pending)
        if request.kept:
            scheduler.add_kept(made.core_request)
        else:
            self._core.add_request(made.core_request)

    def extend(self, live: EngineRequest, request: RequestSpec, after: int) -> bool:
        """Continues a kept request after this many outputs; ``request`` has the environment tokens. Returns False, and
        changes nothing, if its KV cannot be cut there.
        """
        turn, begin = request.turn(), request.turn_begin
        sampling = sampling_of(turn, self._stops)
        sampling.extra_args = self._device.resume_arguments((), array("i", turn.prompt_token_ids), begin)
        if after < len(live.outputs):
            if not self._core.scheduler.cut(live.engine_id, len(request.prompt_token_ids) + after):
                return False
            live.begin_segment()
        self._follow(live.engine_id, request, self._stop_strings.watch(turn))
        live.request, live.outputs, live.logprobs = request, list(request.output_token_ids), list(request.logprobs)
        self._core.scheduler.extend(live.engine_id, request.output_token_ids[after:], sampling, request.pending)
        return True

    def _follow(self, engine_id: str, request: RequestSpec, watch: StopWatch | None) -> None:
        """Tells the scheduler what ends the turn, and the drafter what precedes it."""
        scheduler = self._core.scheduler
        scheduler.watches.pop(engine_id, None)
        if watch is not None:
            scheduler.watches[engine_id] = watch
        if scheduler.drafter is not None:
            scheduler.drafter.begin(engine_id, request)

    def forget(self, live: EngineRequest) -> None:
        del self._by_engine_id[live.engine_id]

    def delta(self, output: Any) -> tuple[EngineRequest, TokenDelta]:
        """Enters new tokens of a request. If they end its turn and it keeps its KV, it is kept."""
        live, scheduler = self._by_engine_id[output.request_id], self._core.scheduler
        first_token = len(live.outputs)
        logprobs = [float(row[0]) for row in output.new_logprobs.logprobs]
        live.outputs.extend(output.new_token_ids)
        live.logprobs.extend(logprobs)
        finish_reason = None if output.finish_reason is None else _FINISH[str(output.finish_reason)]
        owed = _of_prompt(output) if live.request.prompt_logprobs and first_token == live.request.turn_begin else b""
        stop = "" if finish_reason == "stop" else scheduler.stops.get(live.engine_id, "")
        if stop:
            finish_reason = "stop"
        if finish_reason is not None and live.request.keeps:
            live.request = replace(live.request, kept=True)
            if output.finish_reason is None:  # vLLM has ended the other turns itself
                scheduler.keep(live.engine_id)
        return live, TokenDelta(
            request_id=live.request.request_id,
            version=live.request.version,
            first_token=first_token,
            token_ids=tuple(output.new_token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            stop=stop,
            routed_experts=scheduler.routed_experts.get(live.engine_id, b""),
            prompt_logprobs=owed,
        )

    def next_engine_id(self, name: str) -> str:
        """Returns a unique id: the runner may still know a request of this name that was removed a moment ago."""
        return f"{next(self._serial)}-{name}"


def _of_prompt(output: Any) -> bytes:
    """Returns the logprobs of a prompt's tokens but the first; of a prompt of one token vLLM may report none."""
    found = output.new_prompt_logprobs_tensors
    return b"" if found is None else np.asarray(found.logprobs[:, 0], "<f4").tobytes()
