"""The declaration of one metric, and its values."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

Source = TypeVar("Source")
Kind: TypeAlias = Literal["gauge", "counter", "histogram"]
Labelled: TypeAlias = Mapping[tuple[str, ...], float]  # values by those of the labels
Reading: TypeAlias = float | Labelled | None  # None: without a meaning now


@dataclass(frozen=True)
class DeclaredMetric(Generic[Source]):
    """Declares a gauge or counter. ``read`` takes its value, or its values by label, from a source."""

    name: str
    meaning: str
    read: Callable[[Source], Reading]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return "counter" if self.name.endswith("_total") else "gauge"

    def values(self, source: Source) -> Labelled | None:
        """Reads the metric. Returns None if it has no meaning now."""
        found = self.read(source)
        return found if found is None else dict(found) if isinstance(found, Mapping) else {(): found}


Family: TypeAlias = tuple[DeclaredMetric[Any], Labelled]  # a metric with its values at one moment


def families(declared: Iterable[DeclaredMetric[Source]], source: Source) -> Iterator[Family]:
    """Reads all metrics that have a meaning now."""
    for each in declared:
        if (values := each.values(source)) is not None:
            yield each, values
