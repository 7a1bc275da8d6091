"""A cost over a size: its points, the exponent of its tail, and whether it bends upwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

TAIL = 3
"""Points at the end to which the exponent is fitted: at small sizes the fixed cost of a step hides the growth."""

NOISE = 0.12
"""A curve bends if its exponent exceeds the allowed one by more than this: 18 % of the cost at four times the size."""


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The least-squares slope of log cost over log size. Needs two points or more, all positive."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


@dataclass(slots=True)
class Curve:
    """Costs `name` in `unit` by size, which may grow as size ** `allowed`. `reason` is printed if the curve bends."""

    name: str
    unit: str
    allowed: float
    reason: str = ""
    points: dict[int, float] = field(default_factory=dict)

    @property
    def tail(self) -> float:
        """The fitted exponent of the last points."""
        sizes = sorted(self.points)[-TAIL:]
        return exponent(sizes, [self.points[size] for size in sizes]) if len(sizes) > 1 else 0.0

    @property
    def bends(self) -> bool:
        """Whether the tail grows faster than it may."""
        return self.tail > self.allowed + NOISE

    def verdict(self) -> str:
        """The text of the table's last column."""
        told = f"{self.tail:.2f} (may be {self.allowed:g})"
        return f"{told} **bends**" if self.bends else told


def table(title: str, size: str, curves: Sequence[Curve]) -> str:
    """A table in Markdown: a column for each size, a row for each curve, its exponent last.

    Below it are the reasons of curves that bend.
    """
    sizes = sorted({at for curve in curves for at in curve.points})
    lines = [f"**{title}**", "", f"| {size} | " + " | ".join(f"{at:,}" for at in sizes) + " | exponent of the tail |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for curve in curves:
        values = [shown(curve.points[at]) if at in curve.points else "" for at in sizes]
        lines.append(f"| {curve.name}, {curve.unit} | " + " | ".join(values) + f" | {curve.verdict()} |")
    lines += ["", *(f"{curve.name} bends: {curve.reason or 'NO REASON KNOWN'}" for curve in curves if curve.bends)]
    return "\n".join(lines).rstrip() + "\n"


def shown(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_json(curves: Sequence[Curve]) -> dict[str, object]:
    """Name of each curve -> its unit, points and exponent, and whether it bends; ready for `json.dumps`."""
    return {
        curve.name: {
            "unit": curve.unit,
            "points": {str(at): curve.points[at] for at in sorted(curve.points)},
            "exponent": round(curve.tail, 3),
            "bends": curve.bends,
        }
        for curve in curves
    }
