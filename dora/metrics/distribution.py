"""The declaration of a histogram, and bounds that several have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

# Six bounds a decade from a millisecond to 1,000 s: a quantile is read to within a fifth of its value.
LATENCY_BOUNDS_S: Final = (
    *(round(factor * 10.0**decade, 6) for decade in range(-3, 3) for factor in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    1000.0,
)
BRIEF_BOUNDS_S: Final = tuple(factor * 10.0**decade for decade in range(-4, 1) for factor in (1, 2, 5))  # to 5 s
LONG_BOUNDS_S: Final = tuple(factor * 10.0**decade for decade in range(-2, 4) for factor in (1, 2, 5))  # to 5,000 s


@dataclass(frozen=True, slots=True)
class Distribution:
    """Describes a histogram. All ``values`` of its ``label`` are shown from the start."""

    name: str
    meaning: str
    bounds: Sequence[float]
    label: str = ""
    values: Sequence[str] = ()

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        labels = [self.label] if self.label else []
        made = Histogram(self.name, self.meaning, labels, registry=registry, buckets=self.bounds)
        for value in self.values:
            made.labels(value)
        return made
