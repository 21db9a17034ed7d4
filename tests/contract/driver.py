"""Drives one engine for the contract suite: collects what requests produce and checks that nothing is told twice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dora.data.types import FinishReason, RequestSpec, SamplingParams
from dora.errors import Conflict
from dora.kvtransfer.codec import closing_of, head_of, opening_of, parts_of, round_of, snapshot_of
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.snapshot import KvSnapshot
from dora.worker.engine import RolloutEngine
from dora.worker.reservation import Reservation

MAX_MODEL_LEN_TOKENS = 256
KV_TOKENS = 1024
SLOTS = 8
ROUNDING = 1e-4  # of a logprob whose KV was computed in another order

VersionFolder = Callable[[int], Path]  # a version's weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=40, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=0.8,
    seed=12,
    top_p=0.9,
    top_k=30,
    min_p=0.01,
    max_tokens=40,
    min_tokens=10,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    stop_token_ids=(5, 6, 7),
)
SAMPLINGS = (GREEDY, SAMPLED, EVERYTHING)
FILLING = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN_TOKENS, ignore_eos=True)
FILLER_TOKENS = 212  # of a prompt: a block more after thirteen steps


@dataclass
class Response:
    """The output of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""
    routed_experts: list[int] = field(default_factory=list)  # bytes of its rows
    # each time that they came: the first token that they came with, and the logprobs
    prompt_logprobs: list[tuple[int, list[float]]] = field(default_factory=list)


class Driver:
    """``responses`` holds every response, whole, across freezing, moving and resuming."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.responses: dict[str, Response] = {}

    def add(self, request: RequestSpec) -> None:
        self.engine.add(request)
        response = Response(list(request.output_token_ids), list(request.logprobs))
        if request.output_token_ids and request.request_id in self.responses:
            response.routed_experts = self.responses[request.request_id].routed_experts
        self.responses[request.request_id] = response

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for delta in self.engine.step():
                response = self.responses[delta.request_id]
                assert response.finish_reason is None
                assert delta.first_token == len(response.token_ids)
                assert delta.version == self.engine.version
                assert len(delta.logprobs) == len(delta.token_ids)
                response.token_ids += delta.token_ids
                response.logprobs += delta.logprobs
                response.routed_experts += delta.routed_experts
                response.finish_reason, response.stop = delta.finish_reason, delta.stop
                if delta.prompt_logprobs:
                    values = np.frombuffer(delta.prompt_logprobs, "<f4").tolist()
                    response.prompt_logprobs.append((delta.first_token, values))

    def finish(self) -> dict[str, Response]:
        while self.engine.has_work():
            self.step()
        return self.responses

    def unfinished(self) -> list[str]:
        return [name for name, response in self.responses.items() if response.finish_reason is None]

    def take_out(self, request_id: str) -> KvSnapshot:
        """Freezes, exports through the wire format, and removes."""
        self.engine.freeze(request_id)
        snapshot = self.engine.export(request_id)
        assert snapshot is not None
        copied = over_the_wire(snapshot)
        self.engine.remove(request_id)
        return copied

    def take_out_in_rounds(
        self, request_id: str, steps: int, rounds: int, reservation: Reservation | None = None
    ) -> KvSnapshot:
        """As the loop does it: full blocks ahead, ``steps`` steps apart, then the rest; through the wire format.

        They are written to the reservation as far as it takes them, and it learns what the request is.
        """
        engine = self.engine
        opening = opening_of(engine.layout, engine.request(request_id))
        read = None if reservation is None else reservation.begin(opening.raw)
        counts: list[int] = []
        bodies: list[bytes] = []
        ahead_bytes = 0
        for _ in range(rounds):
            full = engine.full_blocks(request_id, sum(counts))
            if full.end > sum(counts):
                counts.append(full.end - sum(counts))
                body = b"".join(parts_of(engine.layout, full.blocks, 0, counts[-1]))
                raw = np.frombuffer(body, np.uint8)
                if reservation is not None and not bodies and reservation.write(ahead_bytes, raw):
                    ahead_bytes += len(body)
                else:
                    bodies.append(body)
            self.step(steps)
        engine.freeze(request_id)
        snapshot = engine.export(request_id, sum(counts))
        assert snapshot is not None and counts and snapshot.ahead == sum(counts)
        left = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens) - sum(counts)
        assert left >= 1, "the tail is always copied while it is frozen"
        bodies.append(b"".join(round_of(snapshot, sum(counts))))
        head = opening.raw + closing_of(snapshot, opening, [*counts, left])
        found = snapshot_of(head, *bodies, ahead_bytes=ahead_bytes, opening=read)
        assert reservation is None or reservation.begun_with(found.request) is not None
        engine.remove(request_id)
        return found

    def preempt(self, request: RequestSpec) -> None:
        """Adds a request beside others that need more blocks than there are, and steps until it has lost its own.

        Nothing else may be held. The others, which came before it, are ``fillers``.
        """
        for index in range(SLOTS - 1):
            self._fill(index, FILLER_TOKENS)
            if self.engine.load().waiting:  # no room for one more
                self.drop(f"filler{index}")
                self._fill(index, FILLER_TOKENS // 5)
                if self.engine.load().waiting:  # nor for a small one, as each has a state
                    self.drop(f"filler{index}", f"filler{index - 1}")
                    for small in (index - 1, index):
                        self._fill(small, FILLER_TOKENS // 5)
                break
        self.add(request)
        self.step()
        while not self.is_preempted(request.request_id):
            assert self.responses[request.request_id].finish_reason is None, "it was never preempted"
            self.step()

    def is_preempted(self, request_id: str) -> bool:
        """Whether it has lost its blocks to others, as its engine says."""
        try:
            self.engine.full_blocks(request_id, 0)
        except Conflict as error:
            return error.why == "is preempted"
        return False

    def _fill(self, index: int, prompt_tokens: int) -> None:
        self.add(replace(make_request(index, FILLING, prompt_tokens), request_id=f"filler{index}"))
        self.step()

    @property
    def fillers(self) -> list[str]:
        return [name for name in self.responses if name.startswith("filler")]

    def drop(self, *request_ids: str) -> None:
        """Forgets requests, with what they have produced."""
        for request_id in request_ids:
            self.engine.remove(request_id)
            del self.responses[request_id]

    def resume(self, request: RequestSpec) -> None:
        """Adds a request again with the outputs it has produced here."""
        response = self.responses[request.request_id]
        outputs, logprobs = tuple(response.token_ids), tuple(response.logprobs)
        self.add(replace(request, output_token_ids=outputs, logprobs=logprobs))

    def clear(self) -> None:
        for request_id in self.responses:
            self.engine.remove(request_id)


def over_the_wire(snapshot: KvSnapshot) -> KvSnapshot:
    """The same snapshot, read from the bytes that travel."""
    return snapshot_of(head_of(snapshot), b"".join(round_of(snapshot)))


def make_request(
    index: int, sampling: SamplingParams = SAMPLED, prompt_tokens: int = 0, version: int = 1, **overrides: int
) -> RequestSpec:
    """A request of its own prompt: ``index`` names it and varies length, tokens and seed."""
    count = prompt_tokens or 5 + 9 * index % 60
    prompt = tuple(3 + (7 * position + 5 * index) % 61 for position in range(count))
    return RequestSpec(f"r{index}", version, prompt, replace(sampling, seed=sampling.seed + index, **overrides))


def mixed_requests(count: int) -> list[RequestSpec]:
    """Greedy, sampled, and sampled with everything, in turn."""
    return [make_request(index, SAMPLINGS[index % len(SAMPLINGS)]) for index in range(count)]


def run(engine: RolloutEngine, requests: Iterable[RequestSpec]) -> dict[str, Response]:
    """The responses of requests that are left alone."""
    driver = Driver(engine)
    for request in requests:
        driver.add(request)
    return driver.finish()


def farthest(found: dict[str, Response], expected: dict[str, Response]) -> float:
    """Largest difference of a logprob; the tokens must be the same."""
    assert {name: response.token_ids for name, response in found.items()} == {
        name: response.token_ids for name, response in expected.items()
    }
    return max(
        abs(ours - theirs)
        for name, response in found.items()
        for ours, theirs in zip(response.logprobs, expected[name].logprobs, strict=True)
    )
