"""The newest steps as three lanes, in as few numbers as a picture of them needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from core.types.lanes import Recording, Slice

STEPS = 64
"""Most steps of one picture. However fast they come, a picture costs the same."""

SECONDS = 5.0
"""Longest time that a picture shows."""

SCHEDULER_SLICES = 1024
"""Newest slices of the scheduler that are looked at: a step has six or more, and every wake-up three."""


def timeline(recording: Recording | None) -> dict[str, Any]:
    """The last steps whose results are here; `span` is the microseconds from the first one's begin to the last one's end.

    Slices are begin, duration, number and tokens, one after another, in microseconds since the picture's begin. The
    number is that of the step; in the scheduler's lane it is an index of `core.types.lanes.PHASES`. What the scheduler
    did after the last of these steps belongs to steps that are not shown.
    """
    steps = [] if recording is None else recording.forward.slices(recording.device_offset, STEPS)
    if recording is None or not steps:
        return {"span": 0, "scheduler": [], "device": [], "copy": []}
    work = recording.scheduler.slices(newest=SCHEDULER_SLICES)
    copies = recording.copy.slices(recording.device_offset, STEPS)
    end = steps[-1].end
    # Before the oldest slice of a full look back, the scheduler would seem idle.
    earliest = max(end - SECONDS, work[0].begin if len(work) == SCHEDULER_SLICES else 0.0)
    begin = next((each.begin for each in steps if each.begin >= earliest), earliest)
    span = _micros(end - begin)
    return {
        "span": span,
        "scheduler": _flat(((each, each.kind) for each in work), begin, span),
        "device": _flat(((each, each.step) for each in steps), begin, span),
        "copy": _flat(((each, each.step) for each in copies), begin, span),
    }


def _flat(numbered: Iterable[tuple[Slice, int]], begin: float, span: int) -> list[int]:
    """What of the slices is in the picture, four numbers each."""
    found: list[int] = []
    for each, number in numbered:
        at, end = max(0, _micros(each.begin - begin)), min(span, _micros(each.end - begin))
        if at < end:
            found += (at, end - at, number, each.tokens)
    return found


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
