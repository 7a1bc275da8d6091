"""The newest steps as a picture of three lanes, in as few numbers as it needs."""

from __future__ import annotations

from typing import Any

from core.lanes import Recording, Slice

STEPS = 64
"""Most steps of one picture. However fast they come, a picture costs the same."""

SECONDS = 5.0
"""Longest time that a picture shows."""

SCHEDULER_SLICES = 10 * STEPS
"""Newest slices of the scheduler that are read: a step has six or more, and a wake-up without a step three."""


def timeline(recording: Recording | None) -> dict[str, Any]:
    """The last steps with results, from the begin of the first to the end of the last: `span` microseconds.

    Each lane is a flat list of four numbers for each slice: begin, duration, number and tokens. Begin and duration are
    in microseconds, from the picture's begin. The number is that of the step; in the scheduler's lane it is an index of
    `core.lanes.PHASES`. The scheduler's work after the last of these steps belongs to steps that are not shown.
    """
    steps = [] if recording is None else recording.forward.slices(recording.device_offset, STEPS)
    if recording is None or not steps:
        return {"span": 0, "scheduler": [], "device": [], "copy": []}
    work = recording.scheduler.slices(newest=SCHEDULER_SLICES)
    copies = recording.copy.slices(recording.device_offset, STEPS)
    end = steps[-1].end
    # The picture must not begin before the oldest slice that was read: the scheduler would seem idle there.
    earliest = max(end - SECONDS, work[0].begin if len(work) == SCHEDULER_SLICES else 0.0)
    begin = next((each.begin for each in steps if each.begin >= earliest), earliest)
    span = round((end - begin) * 1e6)
    return {
        "span": span,
        "scheduler": _flat(work, begin, span, kinds=True),
        "device": _flat(steps, begin, span),
        "copy": _flat(copies, begin, span),
    }


def _flat(slices: list[Slice], begin: float, span: int, *, kinds: bool = False) -> list[int]:
    """The parts of the slices that are in the picture, four numbers each; the third is the kind or the step."""
    found: list[int] = []
    for started, ended, step, kind, tokens in slices:
        at, end = round((started - begin) * 1e6), round((ended - begin) * 1e6)
        if at < span and end > 0 and at < end:
            at, end = max(at, 0), min(end, span)
            found += (at, end - at, kind if kinds else step, tokens)
    return found
