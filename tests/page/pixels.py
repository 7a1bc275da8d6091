"""What is on the canvas of the lanes, pixel by pixel, and what should be there by the event that it shows."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.types.lanes import EMIT, INTAKE, PLAN, PUBLISH, RESULTS, SUBMIT
from tests.page.browser import Tab

INK_OF_PHASE = {RESULTS: "take", INTAKE: "take", PLAN: "plan", SUBMIT: "plan", PUBLISH: "tell", EMIT: "tell"}
BANDS = {"scheduler": (0, 34), "device": (40, 86), "copy": (92, 108)}
"""Top and bottom of each lane, in points."""

_PICTURE = """(() => {
  const canvas = document.getElementById("lanes");
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  let text = "";
  for (let at = 0; at < data.length; at += 8192) text += String.fromCharCode(...data.slice(at, at + 8192));
  return {pixels: btoa(text), width: canvas.width, height: canvas.height, points: canvas.clientWidth};
})()"""

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Picture:
    """uint8[height, width, 3] of the canvas, `scale` pixels to a point, and the colours by their names in the page."""

    pixels: npt.NDArray[np.uint8]
    scale: float
    inks: dict[str, Colour]

    def colour(self, lane: str, x: float) -> Colour:
        """At `x` points from the left, above the middle of the lane, where no word stands."""
        top, bottom = BANDS[lane]
        row, column = int((top + (bottom - top) / 5) * self.scale), min(int(x * self.scale), self.pixels.shape[1] - 1)
        red, green, blue = self.pixels[row, column].tolist()
        return red, green, blue

    def shares(self, lane: str) -> dict[str, float]:
        """Of the same row of the lane, the share of each ink; steps of either colour are `device`."""
        row = self.pixels[int((BANDS[lane][0] + (BANDS[lane][1] - BANDS[lane][0]) / 5) * self.scale)]
        found = {name: float((row == np.asarray(ink, np.uint8)).all(axis=1).mean()) for name, ink in self.inks.items()}
        found["device"] += found.pop("device-odd")
        return found


async def picture(tab: Tab) -> Picture:
    """What the canvas shows now."""
    told = await tab.run(_PICTURE)
    inks = await tab.run("Object.fromEntries(INKS.map((name) => [name, inks[name]]))")
    shape = (told["height"], told["width"], 4)
    pixels = np.frombuffer(base64.b64decode(told["pixels"]), np.uint8).reshape(shape)[:, :, :3]
    return Picture(pixels, told["width"] / told["points"], {name: colour(text) for name, text in inks.items()})


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
    lanes = {name: list(zip(*[iter(event["timeline"][name])] * 4, strict=True)) for name in BANDS}
    shown = lanes["device"][-steps:]
    begin, end = shown[0][0], shown[-1][0] + shown[-1][1]
    points = seen.pixels.shape[1] / seen.scale
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
