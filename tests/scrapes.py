"""What a scrape of /metrics says, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """One scrape, by the names of families, without the `_total` of counters."""

    families: Mapping[str, Metric]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels; a KeyError where there is none."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    def labels(self) -> dict[str, set[str]]:
        """The labels of each name that can be asked for."""
        found: dict[str, set[str]] = {}
        for family in self.families.values():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    def values_of(self, label: str) -> set[str]:
        """Everything that a label says."""
        return {
            sample.labels[label]
            for family in self.families.values()
            for sample in family.samples
            if label in sample.labels
        }


def parse(text: str) -> Scrape:
    """Read the text format."""
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})


def scrape(client: httpx2.Client) -> Scrape:
    """Scrape the API of a client."""
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    return parse(response.text)
