"""What a scrape says, for tests."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape: the value of each series, by its name and labels."""

    series: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def read(cls, text: str) -> Scrape:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    @property
    def names(self) -> set[str]:
        """Names of metrics, without the endings of a histogram's series."""
        found = {name for name, _ in self.series}
        histograms = {name.removesuffix("_bucket") for name in found if name.endswith("_bucket")}
        endings = {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}
        return (found - endings) | histograms

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series of a name that have these labels."""
        wanted = set(labels.items())
        found = [
            value for (each, has), value in self.series.items() if each == name and wanted <= has
        ]
        return sum(found)
