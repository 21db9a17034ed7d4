"""Drives one engine for the contract suite: collects what requests produce and checks that nothing is told twice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dora.kvtransfer.codec import head_of, round_of, snapshot_of
from dora.kvtransfer.snapshot import KvSnapshot
from dora.types import FinishReason, RequestSpec, SamplingParams
from dora.worker.engine import RolloutEngine

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


@dataclass
class Response:
    """What one request has produced so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""


class Driver:
    """``responses`` holds every response, whole, across freezing, moving and resuming."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.responses: dict[str, Response] = {}

    def add(self, request: RequestSpec) -> None:
        self.engine.add(request)
        self.responses[request.request_id] = Response(list(request.output_token_ids), list(request.logprobs))

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
                response.finish_reason, response.stop = delta.finish_reason, delta.stop

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
