"""An engine's histograms: what a worker measures, what a service takes of it, and vLLM's own bounds."""

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dora.data import engine_times as of
from dora.data.types import TokenDelta
from dora.errors import InvalidValue
from dora.metrics.text import HistogramText
from dora.orchestrator.rollout.worker_checks import checked_tokens
from dora.rpc import dora_pb2 as pb
from dora.worker.times import SENT_EVERY_S, EngineTimes
from tests.refusals import refused


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def delta(request_id: str, tokens: int, ends: Any = None) -> TokenDelta:
    return TokenDelta(request_id, 0, 0, (1,) * tokens, (-1.0,) * tokens, ends)


def counted(message: pb.EngineTimes, of_one: of.EngineHistogram) -> tuple[int, float]:
    (found,) = [each for each in message.histograms if each.name == of_one.name]
    return sum(found.buckets), found.sum


def test_a_request_and_its_next_turn_are_measured() -> None:
    clock = Clock()
    times = EngineTimes(clock)
    assert times.message(has_work=False) is None
    times.began("a", 7)
    times.began("moved", 0)  # it came with its KV
    clock.now_s = 2.0
    times.sampled([delta("a", 1), delta("moved", 1), delta("unknown", 1)])
    clock.now_s = 3.0
    times.sampled([delta("a", 2, "stop"), delta("moved", 1)])
    times.forget("moved")
    message = times.message(has_work=False)
    assert message is not None
    assert counted(message, of.FIRST_TOKEN) == (1, 2.0) and counted(message, of.TOKEN) == (2, 2.0)
    assert counted(message, of.REQUEST) == (1, 3.0) and counted(message, of.DECODE) == (1, 1.0)
    assert counted(message, of.PROMPT) == (1, 7.0) and counted(message, of.GENERATION) == (1, 3.0)
    assert dict(message.ended) == {"stop": 1} and message.prompt_tokens == 7
    times.began("a", 4)
    clock.now_s = 3.5
    times.sampled([delta("a", 1, "length")])
    assert times.message(has_work=True) is None, "it was sent just before"
    clock.now_s += SENT_EVERY_S
    message = times.message(has_work=True)
    assert message is not None and counted(message, of.FIRST_TOKEN) == (2, 2.5)
    assert dict(message.ended) == {"stop": 1, "length": 1} and times.message(has_work=False) is None


def test_a_message_is_small_whatever_was_measured() -> None:
    clock, chance = Clock(), random.Random(0)
    times = EngineTimes(clock)
    for number in range(5000):
        times.began(str(number), chance.randrange(1, 10**6))
        for _ in range(3):
            clock.now_s += chance.expovariate(0.1)
            times.sampled([delta(str(number), 1)])
        times.sampled([delta(str(number), 1, "stop")])
    message = times.message(has_work=False)
    assert message is not None and message.ByteSize() < 1024
    checked_tokens(pb.WorkerReport(times=message), 1, 1, 1)


@pytest.mark.parametrize(
    ("times", "field"),
    [
        (pb.EngineTimes(histograms=[pb.Histogram(name="other", buckets=[1])]), "times.histograms"),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[0] * 20)] * 2), "times.histograms"),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[0] * 19)]), of.TOKEN.name),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[0] * 10**5)]), of.TOKEN.name),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[2**64 - 1] * 20)]), of.TOKEN.name),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[0] * 20, sum=-1)]), "sum"),
        (pb.EngineTimes(histograms=[pb.Histogram(name=of.TOKEN.name, buckets=[0] * 20, sum=float("nan"))]), "sum"),
        (pb.EngineTimes(ended={"other": 1}), "times.ended"),
        (pb.EngineTimes(ended={"stop": 2**64 - 1}), "times"),
        (pb.EngineTimes(prompt_tokens=2**64 - 1), "times"),
    ],
)
def test_a_service_refuses_others(times: pb.EngineTimes, field: str) -> None:
    with refused(InvalidValue, field=field):
        checked_tokens(pb.WorkerReport(times=times), 1, 1, 1)


def test_the_text_is_what_prometheus_reads() -> None:
    counts, labels = [1, 0, 2, *([0] * 16), 3], ('a"b\\c\n%d', "7")
    text = HistogramText(of.TOKEN.name, of.TOKEN.meaning, of.TOKEN.bounds, ("model_name", "engine"))
    (family,) = text_string_to_metric_families(text.of([(labels, counts, 2.5)]).decode())
    assert family.type == "histogram" and len(family.samples) == 22
    assert all((each.labels["model_name"], each.labels["engine"]) == labels for each in family.samples)
    found = {each.labels.get("le", each.name): each.value for each in family.samples}
    assert [found["0.01"], found["0.025"], found["0.05"], found["80.0"], found["+Inf"]] == [1, 1, 3, 3, 6]
    assert found[f"{of.TOKEN.name}_count"] == 6 and found[f"{of.TOKEN.name}_sum"] == 2.5


def test_names_and_bounds_are_those_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "v1" / "metrics"
    source = (folder / "buckets.py").read_text()
    for name, bounds in (
        ("TIME_TO_FIRST_TOKEN_BUCKETS", of.FIRST_TOKEN_BOUNDS),
        ("INTER_TOKEN_LATENCY_BUCKETS", of.TOKEN_BOUNDS),
        ("REQUEST_LATENCY_BUCKETS", of.REQUEST_BOUNDS),
    ):
        found = re.search(rf"^{name}[^=]*= \(([^)]*)\)", source, re.MULTILINE)
        assert found is not None
        assert [float(each) for each in found[1].split(",") if each.strip()] == list(bounds)
    loggers = (folder / "loggers.py").read_text()
    assert all(f'name="{each.name}"' in loggers for each in of.HISTOGRAMS)
