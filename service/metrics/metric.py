"""The description of a metric, without its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `field` is the `EngineStats` attribute that it shows; empty for a figure that the service makes."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    field: str = ""

    @property
    def exported(self) -> str:
        """The name as scraped."""
        return self.name + ("_total" if self.kind == "counter" else "")
