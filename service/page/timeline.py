"""The newest steps as three lanes, in as few numbers as a picture of them needs."""

from __future__ import annotations

from typing import Any

from core.types.lanes import Recording, Slice

STEPS = 64
"""Most steps of one picture. However fast they come, a picture costs the same."""

SECONDS = 5.0
"""Longest time that a picture shows."""

SCHEDULER_SLICES = 10 * STEPS
"""Newest slices of the scheduler that are looked at: a step has six or more, and a wake-up for nothing three."""

STEP, KIND = Slice._fields.index("step"), Slice._fields.index("kind")


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
    span = round((end - begin) * 1e6)
    return {
        "span": span,
        "scheduler": _flat(work, KIND, begin, span),
        "device": _flat(steps, STEP, begin, span),
        "copy": _flat(copies, STEP, begin, span),
    }


def _flat(slices: list[Slice], number: int, begin: float, span: int) -> list[int]:
    """What of the slices is in the picture, four numbers each; `number` is the field that the third one is."""
    found: list[int] = []
    for each in slices:
        at, end = round((each[0] - begin) * 1e6), round((each[1] - begin) * 1e6)
        if at < span and end > 0 and at < end:
            at, end = max(at, 0), min(end, span)
            found += (at, end - at, each[number], each[4])
    return found
