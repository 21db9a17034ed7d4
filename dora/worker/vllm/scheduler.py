"""vLLM's scheduler, extended: a request can be held or kept, may start with outputs, and may bring its own blocks.

A held request is in no queue: vLLM's model runner removes an unscheduled request from its batch and keeps its state, so
the request continues bitwise when it is taken up. It keeps its blocks and slot, so it can always be taken up.

A kept request, whose turn has ended, is in no queue either. The runner forgets it, so it has no slot; vLLM still knows
its blocks and computed tokens. It continues by vLLM's own way to update a session (``_update_request_as_session``).

Blocks that were reserved and written before their request arrived appear to vLLM as a hit of its prefix cache: vLLM
gives them to the request and asks the connector only for later tokens. Blocks shared with another request from the same
worker appear the same way.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from dora.worker.drafting.drafter import Drafter
from dora.worker.prefixes import Prefixes
from dora.worker.reservation import Reservation
from dora.worker.stop_strings import StopWatch
from dora.worker.vllm.checkpoints import Checkpoints
from dora.worker.vllm.cut import cut_blocks
from dora.worker.vllm.routing import Fed, RoutingRows


class HoldingScheduler(Scheduler):
    """Passed by class, as ``scheduler_cls``. ``reprefilled_tokens`` counts tokens whose KV was computed twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connector.emptied = self.kv_cache_manager.coordinator.single_type_managers
        self.held: dict[str, Request] = {}
        self.kept: dict[str, Request] = {}
        self.keeps: set[str] = set()  # requests that are kept when a turn ends
        self.prefixes = Prefixes(self)
        self.reprefilled_tokens = 0
        self.preemptions = 0
        self.checkpoints: Checkpoints | None = None  # set once the engine has started, where layers keep a state
        self.routing: RoutingRows | None = None  # set once the engine has started, where routing is kept
        self.drafter: Drafter | None = None  # set once the engine has started, where it speculates
        self._verified: dict[str, list[int]] = {}  # drafts of the last step
        self.watches: dict[str, StopWatch] = {}  # of requests with stop strings
        self.stops: dict[str, str] = {}  # of the last step: stop strings that its tokens completed
        self.routed_experts: dict[str, bytes] = {}  # of the last step: rows of the tokens fed to sample its tokens
        self._reserved = 0
        self._pending: dict[str, int] = {}  # by request with earlier turns: environment tokens of its turn's beginning
        self._had: dict[str, int] = {}  # by request that was cut: the tokens before the cut that had KV
        self._brought: dict[str, list[Any]] = {}  # by request: blocks that it brings, and those after them
        self._ahead: dict[str, int] = {}  # how many of these are written
        self._unknown: dict[str, int] = {}  # the same of requests that have them, until the prefix cache knows them

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def free_blocks(self) -> int:
        """Returns the free blocks, less one that each request with a slot may need next."""
        self.prefixes.sweep()
        return int(self._pool.get_num_free_blocks()) - self.running_count()

    def take_blocks(self, count: int) -> list[int]:
        """Takes blocks that belong to no request; they must be given back or brought."""
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def give_back(self, reservation: Reservation) -> None:
        self.prefixes.keep(reservation.offered)
        self.unpin(reservation.own_ids)
        self.prefixes.give_up(reservation.prefix)
        self.prefixes.sweep()

    def bring(self, request_id: str, reservation: Reservation, ahead: int) -> None:
        """Attaches a reservation's blocks to a request that is about to be added; the first ``ahead`` have its KV."""
        if reservation.own_ids:
            self.prefixes.keep(reservation.offered)
            self.pin(reservation.shared_ids)
            self.prefixes.give_up(reservation.prefix)
            self._brought[request_id], self._ahead[request_id] = self._blocks(reservation.block_ids), ahead

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch(self._blocks(block_ids))

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks(self._blocks(reversed(block_ids)))

    def holders(self, block_id: int) -> int:
        return int(self._pool.blocks[block_id].ref_cnt)

    def brought(self, request_id: str) -> list[int]:
        """Returns the blocks with KV of a request that was not scheduled yet."""
        brought = self._brought.get(request_id, [])
        return [block.block_id for block in brought[: self._ahead.get(request_id, 0)]]

    def reserve_slots(self, count: int) -> None:
        """Reserves slots for requests that will arrive with their KV."""
        self._reserved = count
        self._count_slots()

    def hold(self, request_id: str) -> None:
        """Removes a request from its queue; it keeps its blocks and slot."""
        request = self.requests[request_id]
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        elif request_id not in self.kept:
            self.waiting.remove_requests([request])
            self.kv_holding_waiting.remove_requests([request])
            self.deferred_waiting.discard(request)
        self.held[request_id] = request
        self._count_slots()

    def take_up(self, request_id: str) -> None:
        request = self.held.pop(request_id)
        if request.status == RequestStatus.RUNNING:
            self.running.append(request)
        elif request_id not in self.kept:
            (self.kv_holding_waiting if self._holds_kv_blocks(request) else self.waiting).prepend_request(request)
        self._count_slots()

    def keep(self, request_id: str) -> None:
        """Ends the turn of a running request and keeps it."""
        request = self.requests[request_id]
        self.running.remove(request)
        self._keep(request)

    def add_kept(self, request: Request) -> None:
        """Adds a kept request that brings its KV, and gives it blocks if there is room."""
        self.requests[request.request_id] = self.kept[request.request_id] = request
        snapshot = self.connector.offered(request.request_id)
        blocks, own_tokens = self._own_blocks(request.request_id)
        left_tokens = snapshot.kv_tokens - own_tokens
        if left_tokens // self.block_size + 1 > self.free_blocks():
            return
        cache = self.kv_cache_manager
        if cache.allocate_slots(request, 0, own_tokens, blocks, num_external_computed_tokens=left_tokens) is None:
            return
        self.connector.update_state_after_alloc(request, cache.get_blocks(request.request_id), left_tokens)
        request.num_computed_tokens = snapshot.kv_tokens
        self._has_blocks(request.request_id)

    def begin_turn(self, request_id: str, pending: int) -> None:
        """Notes that a request has earlier turns, and its environment tokens, which have no KV yet."""
        self._pending[request_id] = pending

    def cut(self, request_id: str, tokens: int) -> bool:
        """Drops the tokens of a kept request from ``tokens`` on, with their KV. Returns False, and changes nothing, if
        the KV before them is not there: it waits for blocks, a window has left it behind, or no state is so early.
        """
        request = self.kept[request_id]
        self.prefixes.sweep()  # what it holds alone is not shared
        had = min(request.num_computed_tokens, tokens)
        kv_tokens, states = had, self.checkpoints
        if states is not None and had < request.num_computed_tokens:
            kv_tokens = states.nearest(request_id, had)
        if states is None or kv_tokens < request.num_computed_tokens:
            kv_tokens = cut_blocks(self.kv_cache_manager, request_id, kv_tokens) if kv_tokens else 0
        if not kv_tokens:
            return False
        if states is not None and kv_tokens < request.num_computed_tokens:
            states.restore(request_id, kv_tokens, self.kv_cache_manager.get_block_ids(request_id))
        if request_id in self._unknown:
            self._unknown[request_id] = min(self._unknown[request_id], kv_tokens // self.block_size)
        del request._all_token_ids[tokens:]
        del request.prompt_token_ids[tokens - 1 :]  # ``extend`` gives the last one again
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.num_computed_tokens = kv_tokens
        self._had[request_id] = had
        return True

    def extend(self, request_id: str, given_token_ids: Sequence[int], sampling: Any, pending: int) -> None:
        """Continues a kept request by a next turn. ``pending`` is the length of the given run that it begins with."""
        request = self.kept.pop(request_id)
        new = [request.all_token_ids[-1], *given_token_ids]
        computed_tokens, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens - 1
        update = StreamingUpdate(None, new, sampling.max_tokens, request.arrival_time, sampling)
        self._update_request_as_session(request, update)
        request.skip_reading_prefix_cache = request.get_skip_reading_prefix_cache()  # of this turn's sampling
        request.num_computed_tokens = computed_tokens  # 0: its KV waits for blocks
        request.stop_reason = None
        self.begin_turn(request_id, pending)
        self._enqueue_waiting_request(request)
        self._put_offered_first(request)

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.request_id not in self.keeps:
            return super()._handle_stopped_request(request)
        self._keep(request)
        return False

    def _keep(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        # A draft may have gone on beyond the turn's end.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.spec_token_ids = []
        self.finished_req_ids.add(request.request_id)  # so the runner forgets it
        self.kept[request.request_id] = request
        self._note_state(request, at_end=True)

    def _note_state(self, request: Request, *, at_end: bool) -> None:
        states, request_id, tokens = self.checkpoints, request.request_id, request.num_computed_tokens
        if states is not None and states.is_due(request_id, tokens, at_end=at_end):
            states.note(request_id, tokens, self.kv_cache_manager.get_block_ids(request_id))

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._pending.pop(request.request_id, None)
        self._had.pop(request.request_id, None)
        self.kept.pop(request.request_id, None)
        self.keeps.discard(request.request_id)
        if self.checkpoints is not None:
            self.checkpoints.forget(request.request_id)
        self.watches.pop(request.request_id, None)
        if self.drafter is not None:
            self.drafter.forget(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._put_offered_first(request)

    def _put_offered_first(self, request: Request) -> None:
        if self.connector.is_offered(request.request_id):  # it precedes requests without KV
            self.waiting.remove_request(request)
            offered = map(self.connector.is_offered, [each.request_id for each in self.waiting])
            place = next((index for index, is_offered in enumerate(offered) if not is_offered), len(self.waiting))
            self.waiting.insert(place, request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.held.pop(request.request_id, None)
            self._free_brought(request.request_id)
        self._count_slots()
        return finished

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._make_known()
        self.prefixes.sweep()
        self._draft()
        output = super().schedule(throttle_prefills)
        if self.drafter is not None:
            self.drafter.scheduled(output.total_num_scheduled_tokens)
        arrived = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request_id in arrived:
            self._has_blocks(request_id)
            request, had = self.requests[request_id], self._had.pop(request_id, 0)
            without_kv = request.num_tokens - had if had else self._without_kv(request)
            if without_kv:  # the others had KV before: on another engine, or here before a preemption
                self.reprefilled_tokens += max(0, output.num_scheduled_tokens[request_id] - without_kv)
        has_slots = self.max_num_active_reqs > 0
        if has_slots and not (output.total_num_scheduled_tokens or self.running or self.held):
            self._give_up_kv()
        self.connector.join()
        return output

    def _draft(self) -> None:
        """Drafts tokens of running requests. No draft takes a block that another request may need in this step."""
        if self.drafter is None:
            return
        decoding = [each for each in self.running if each.num_computed_tokens == each.num_tokens - 1]
        for request in decoding:
            request.spec_token_ids = []
        can_pay = self.drafter.begin_step(len(decoding))
        if not can_pay or (self.waiting and len(self.running) < self.max_num_active_reqs):  # a prompt may need the room
            return
        spare, left = self.free_blocks(), self.max_num_scheduled_tokens - len(self.running)
        drafts = self.drafter.drafts({each.request_id: self._draft_room(each) for each in decoding})
        for request in decoding:
            draft = drafts.get(request.request_id, [])[:left]
            tail = -request.num_tokens % self.block_size
            blocks = -(-max(0, len(draft) - tail) // self.block_size) * len(self.kv_cache_config.kv_cache_groups)
            if blocks > spare:
                draft, blocks = draft[:tail], 0
            spare, left = spare - blocks, left - len(draft)
            request.spec_token_ids = draft

    def _draft_room(self, request: Request) -> int:
        """Returns how many drafted tokens the request can still use beside one that is sampled."""
        left = self.max_model_len - request.num_tokens
        return min(left, int(request.max_tokens) - request.num_output_tokens) - 1

    def _has_blocks(self, request_id: str) -> None:
        """Notes that a request holds its blocks by itself, so that those that it brought need no other holder."""
        if request_id in self._brought:
            self._unknown[request_id] = self._ahead.pop(request_id)
            for block in self._brought.pop(request_id):
                block.ref_cnt -= 1  # the request has its own part in each now, so none becomes free

    def _without_kv(self, request: Request) -> int:
        """Returns how many last tokens of a resumed request never had KV: the last sampled one, and those given since.

        Returns 0 if it has sampled nothing yet.
        """
        if request.num_output_tokens:
            return 1
        return self._pending[request.request_id] + 1 if request.request_id in self._pending else 0

    def _give_up_kv(self) -> None:
        """Frees the blocks of the last waiting request that has some, so that waiting requests cannot block each other.

        Its tokens are computed again.
        """
        if self.kv_holding_waiting:
            request = list(self.kv_holding_waiting)[-1]
            self.kv_holding_waiting.remove_request(request)
            self._free_request_blocks(request)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            self.preemptions += 1
            self.waiting.add_request(request)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self.stops.clear()
        self._verified = scheduler_output.scheduled_spec_decode_tokens
        fed: list[Fed] = []
        if self.routing is not None:  # now: requests that this step ends give their blocks back
            fed = [*self._fed(scheduler_output, model_runner_output, self.routing.group)]
        for request_id in self.keeps & scheduler_output.num_scheduled_tokens.keys() if self.checkpoints else ():
            self._note_state(self.requests[request_id], at_end=False)
        found = super().update_from_output(scheduler_output, model_runner_output)
        if self.routing is not None:
            new = {each.request_id: len(each.new_token_ids) for batch in found.values() for each in batch.outputs}
            kept = [each._replace(end=each.end + new[each.name]) for each in fed if each.name in new]
            self.routed_experts = self.routing.of(kept)
        return found

    def _update_request_with_output(self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        watch = self.watches.get(request.request_id)
        for count, token_id in enumerate(new_token_ids, 1):
            if watch is not None and (stop := watch.completed_by(token_id)):
                self.stops[request.request_id] = stop
                del new_token_ids[count:]
                break
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if self.drafter is not None:
            self.drafter.sampled(request.request_id, new_token_ids, len(self._verified.get(request.request_id, ())))
        return new_token_ids, stopped

    def _fed(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, group: int) -> Iterator[Fed]:
        """Yields the fed tokens of requests with new ones, up to the first of these. The first has the whole prompt,
        wherever its KV is from.
        """
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests.get(request_id)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]] if output.sampled_token_ids else ()
            if request is not None and len(sampled):
                held = request.num_tokens  # prompt and outputs so far
                without_kv = self._without_kv(request)
                first = held - without_kv if without_kv else 0
                block_ids = self.kv_cache_manager.get_block_ids(request_id)[group]
                yield Fed(request_id, block_ids, first, held - 1)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)
        self.preemptions += 1
        self.prefixes.sweep()  # its blocks are needed now

    def running_count(self) -> int:
        """The number of requests with a slot: scheduled or held."""
        return len(self.running) + self._held_running()

    def waiting_count(self) -> int:
        """The number of requests without a slot: queued or held."""
        queued: int = self.get_request_counts()[1]
        return queued + len(self.held.keys() - self.kept) - self._held_running()

    def waiting_with_kv_count(self) -> int:
        """The number of queued requests with their KV, in blocks or offered."""
        offered = self.connector.offered_count() - sum(map(self.connector.is_offered, self.kept))
        return len(self.kv_holding_waiting) + int(offered)

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        if self.connector.is_offered(request.request_id):
            # Its own KV arrives with it. A neighbour's KV, equal except for rounding, must not replace it.
            return *self._own_blocks(request.request_id), 0, False
        return super()._get_local_prefix_cache_hit(request)

    def _own_blocks(self, request_id: str) -> tuple[Any, int]:
        """Returns the blocks that a request brings, and their tokens, and frees the remaining ones."""
        if request_id not in self._brought:
            return self.kv_cache_manager.empty_kv_cache_blocks, 0
        brought, ahead = self._brought[request_id], self._ahead[request_id]
        self._pool.free_blocks(reversed(brought[ahead:]))
        del brought[ahead:]
        return self.kv_cache_manager.create_kv_cache_blocks((brought,)), ahead * self.block_size

    def _free_brought(self, request_id: str) -> None:
        self._pool.free_blocks(reversed(self._brought.pop(request_id, [])))
        self._ahead.pop(request_id, None)

    def _blocks(self, block_ids: Iterable[int]) -> list[Any]:
        blocks = self._pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def _make_known(self) -> None:
        """Enters brought blocks into the prefix cache, for later requests and preemptions; not in the first step."""
        for request_id, ahead in self._unknown.items():
            (manager,) = self.kv_cache_manager.coordinator.single_type_managers
            blocks = manager.req_to_blocks.get(request_id)
            if blocks:  # it has not ended meanwhile
                known = next((place for place, block in enumerate(blocks[:ahead]) if block.block_hash is None), ahead)
                group = manager.kv_cache_group_id
                self._pool.cache_full_blocks(self.requests[request_id], blocks, known, ahead, self.block_size, group)
        self._unknown.clear()

    def _held_running(self) -> int:
        return sum(request.status == RequestStatus.RUNNING for request in self.held.values())

    def _count_slots(self) -> None:
        self.max_num_active_reqs = self.max_num_running_reqs - self._held_running() - self._reserved
