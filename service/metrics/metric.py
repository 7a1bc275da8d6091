"""What is known of a metric before it has a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `field` names the `EngineStats` attribute it shows, empty if it is derived or kept by the service."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    field: str = ""

    @property
    def exported(self) -> str:
        """The name as scraped."""
        return self.name + ("_total" if self.kind == "counter" else "")
