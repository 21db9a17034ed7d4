"""Metrics as the text of a page for Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dora.metrics.declaration import Family

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def text_of(found: Iterable[Family], collectors: Sequence[Collector]) -> bytes:
    parts: list[str] = []
    for metric, values in found:
        name, labels = metric.name, metric.labels
        parts.append(f"# HELP {name} {_one_line(metric.meaning)}\n# TYPE {name} {metric.kind}\n")
        parts += [f"{name}{_shown(labels, each)} {float(value)!r}\n" for each, value in values.items()]
    return "".join(parts).encode() + generate_latest(_Families(_collected(collectors)))


@lru_cache(maxsize=8192)
def _shown(labels: Sequence[str], values: Sequence[str]) -> str:
    pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)]
    return f"{{{','.join(pairs)}}}" if pairs else ""


class HistogramText:
    """Writes the series of one histogram. prometheus-client takes eight times as long, which counts with 1,024 engines.

    ``labels`` names all but ``le``.
    """

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._head = f"# HELP {name} {meaning}\n# TYPE {name} histogram\n"
        ends = [str(bound) for bound in bounds] + ["+Inf"]
        self._form = "".join(f'{name}_bucket{{LABELS,le="{end}"}} %d\n' for end in ends)
        self._form += f"{name}_count{{LABELS}} %d\n{name}_sum{{LABELS}} %r\n"
        self._labels = tuple(labels)

    def of(self, series: Iterable[tuple[Sequence[str], Sequence[int], float]]) -> bytes:
        """Formats series of label values, the count of each bucket, and the sum."""
        parts = [self._head]
        for values, counts, total in series:
            shown = _shown(self._labels, tuple(values))[1:-1]
            counted = tuple(accumulate(counts))
            parts.append(self._form.replace("LABELS", shown.replace("%", "%%")) % (*counted, counted[-1], total))
        return "".join(parts).encode()


def _escaped(value: str) -> str:
    return _one_line(value).replace('"', r"\"")


def _one_line(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _collected(collectors: Sequence[Collector]) -> Iterator[Metric]:
    for collector in collectors:
        for metric in collector.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
