"""vLLM's scheduler, in which a request can be held, and may begin with outputs.

A held request is in no queue: vLLM's model runner takes a request that is not scheduled out of its batch and keeps its
state, so taking it up again goes on bitwise. It keeps its blocks and its slot, so it can always be taken up again.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from dora.engine_patches.exact_resume import resumed_outputs


class HoldingScheduler(Scheduler):
    """Used by class, as ``scheduler_cls``. ``reprefilled_tokens``: tokens whose KV was computed a second time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, Request] = {}
        self.reprefilled_tokens = 0
        self._reserved = 0

    def reserve_slots(self, count: int) -> None:
        """Keeps so many slots for requests that are to come with their KV."""
        self._reserved = count
        self._count_slots()

    def hold(self, request_id: str) -> None:
        """Takes a request out of its queue, with its blocks and its slot."""
        request = self.requests[request_id]
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
            self.deferred_waiting.discard(request)
        self.held[request_id] = request
        self._count_slots()

    def take_up(self, request_id: str) -> None:
        """Undoes ``hold``."""
        request = self.held.pop(request_id)
        if request.status == RequestStatus.RUNNING:
            self.running.append(request)
        else:
            self.waiting.prepend_request(request)
        self._count_slots()

    def add_request(self, request: Request) -> None:
        outputs = resumed_outputs(request.sampling_params.extra_args)
        if outputs:
            request.append_output_token_ids(outputs)
            request.prefill_stats = None  # they describe prompts; with outputs vLLM's own assertions would not hold
        super().add_request(request)
        if self.connector.is_offered(request.request_id):  # it goes before those that have no KV
            self.waiting.remove_request(request)
            offered = map(self.connector.is_offered, [each.request_id for each in self.waiting])
            place = next((index for index, is_offered in enumerate(offered) if not is_offered), len(self.waiting))
            self.waiting.insert(place, request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.held.pop(request.request_id, None)
        self._count_slots()
        return finished

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        arrived = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request_id in arrived:
            if self.requests[request_id].num_output_tokens > 0:
                # All but the last sampled token had KV before: on another engine, or here before a preemption.
                self.reprefilled_tokens += output.num_scheduled_tokens[request_id] - 1
        return output

    def running_count(self) -> int:
        """Requests with a slot: scheduled or held."""
        return len(self.running) + self._held_running()

    def waiting_count(self) -> int:
        """Requests without a slot: queued or held."""
        queued: int = self.get_request_counts()[1]
        return queued + len(self.held) - self._held_running()

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        if self.connector.is_offered(request.request_id):
            # Its own KV comes with it: a neighbour's, equal but for rounding, must not take its place.
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        return super()._get_local_prefix_cache_hit(request)

    def _held_running(self) -> int:
        return sum(request.status == RequestStatus.RUNNING for request in self.held.values())

    def _count_slots(self) -> None:
        self.max_num_active_reqs = self.max_num_running_reqs - self._held_running() - self._reserved
