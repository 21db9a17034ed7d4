"""The declaration of one metric, and its form for Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Source = TypeVar("Source")
Kind: TypeAlias = Literal["gauge", "counter", "histogram"]
Labelled: TypeAlias = Mapping[tuple[str, ...], float]  # values by those of the labels
Reading: TypeAlias = float | Labelled | None  # None: without a meaning now


@dataclass(frozen=True)
class DeclaredMetric(Generic[Source]):
    """A gauge or counter. ``read`` takes its value, or its values by label, from a source."""

    name: str
    meaning: str
    read: Callable[[Source], Reading]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return "counter" if self.name.endswith("_total") else "gauge"

    def family(self, source: Source) -> Metric | None:
        """Reads the metric; None: it has no meaning now."""
        found = self.read(source)
        if found is None:
            return None
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.meaning, labels=self.labels)
        values = found if isinstance(found, Mapping) else {(): float(found)}
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


def families(declared: Iterable[DeclaredMetric[Source]], source: Source) -> Iterator[Metric]:
    """Reads all metrics that have a meaning now."""
    for each in declared:
        if (family := each.family(source)) is not None:
            yield family
