"""What is on the canvas of the lanes, pixel by pixel, and what should be there by the event that it shows."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.lanes import EMIT, INTAKE, PLAN, PUBLISH, RESULTS, SUBMIT
from tests.contract.page.browser import Tab

INK_OF_PHASE = {RESULTS: "take", INTAKE: "take", PLAN: "plan", SUBMIT: "plan", PUBLISH: "tell", EMIT: "tell"}
ROWS = {"scheduler": 7, "device": 49, "copy": 95}
"""Points from the top at which a lane is looked at: above its middle, where words may stand."""

_PICTURE = """(() => {
  const canvas = document.getElementById("lanes");
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const scale = canvas.width / canvas.clientWidth;
  const row = (y) => btoa(String.fromCharCode(...pen.getImageData(0, Math.floor(y * scale), canvas.width, 1).data));
  return {rows: %s.map(row), scale};
})()"""

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Picture:
    """A row of each lane, uint8[width, 3], `scale` pixels to a point, and the colours by their names in the page."""

    rows: dict[str, npt.NDArray[np.uint8]]
    scale: float
    inks: dict[str, Colour]

    @property
    def points(self) -> float:
        """How wide it is."""
        return len(self.rows["device"]) / self.scale

    def colour(self, lane: str, x: float) -> Colour:
        """At `x` points from the left."""
        row = self.rows[lane]
        red, green, blue = row[min(int(x * self.scale), len(row) - 1)].tolist()
        return red, green, blue

    def shares(self, lane: str) -> dict[str, float]:
        """Of the lane's length, the share of each ink; steps of either colour are `device`."""
        row = self.rows[lane]
        found = {name: float((row == np.asarray(ink, np.uint8)).all(axis=1).mean()) for name, ink in self.inks.items()}
        found["device"] += found.pop("device-odd")
        return found


async def picture(tab: Tab) -> Picture:
    """What the canvas shows now."""
    told = await tab.run(_PICTURE % [*ROWS.values()])
    inks = await tab.run("Object.fromEntries(INKS.map((name) => [name, inks[name]]))")
    rows = (np.frombuffer(base64.b64decode(row), np.uint8).reshape(-1, 4)[:, :3] for row in told["rows"])
    return Picture(dict(zip(ROWS, rows)), told["scale"], {name: colour(text) for name, text in inks.items()})


def colour(text: str) -> Colour:
    """Of `#rrggbb`."""
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def contrast(one: Colour, other: Colour) -> float:
    """The ratio that WCAG 2 asks to be at least 4.5 for text."""

    def luminance(ink: Colour) -> float:
        parts = (part / 255 for part in ink)
        linear = [part / 12.92 if part <= 0.04045 else math.pow((part + 0.055) / 1.055, 2.4) for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def shown_event(tab: Tab, step: int) -> dict[str, Any]:
    """The newest event that the browser received for this step."""
    found: list[dict[str, Any]] = [event for event in map(json.loads, tab.events) if event["step"] == step]
    assert found, f"nothing was received about step {step}"
    return found[-1]


def misdrawn(seen: Picture, event: dict[str, Any], steps: int) -> tuple[int, list[str]]:
    """How many slices were wide enough to be looked at, and those that are not where and what they should be."""
    lanes = {name: list(zip(*[iter(event["timeline"][name])] * 4, strict=True)) for name in ROWS}
    shown = lanes["device"][-steps:]
    begin, end = shown[0][0], shown[-1][0] + shown[-1][1]
    points = seen.points
    looked, wrong = 0, []
    for lane, slices in lanes.items():
        for at, took, number, _ in slices if lane != "device" else shown:
            left, right = ((max(at, begin) - begin), (min(at + took, end) - begin))
            if (right - left) / (end - begin) * points < 2:
                continue
            looked += 1
            found = seen.colour(lane, (left + right) / 2 / (end - begin) * points)
            if lane == "device":
                wanted = seen.inks["device-odd" if number % 2 else "device"]
            else:
                wanted = seen.inks["copy" if lane == "copy" else INK_OF_PHASE[number]]
            if max(abs(one - other) for one, other in zip(found, wanted, strict=True)) > 2:
                wrong.append(f"{lane} {number} at {at}: {found}, not {wanted}")
    return looked, wrong
