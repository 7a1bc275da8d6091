"""Lanes as a trace in the JSON format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

It is written piece by piece: one call that made megabytes of JSON would hold the interpreter, and so every stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from core.lanes import PHASES, SUBMIT, Slice

LANES = {
    "scheduler": "scheduler (event loop)",
    "launch": "launch (forward thread)",
    "forward": "forward (device)",
    "copy": "copy (device to host)",
}
EVENTS_PER_PIECE = 64
PROCESS = 1

Lanes = Mapping[str, Sequence[Slice]]


def chrome_trace(lanes: Lanes, began: float, about: Mapping[str, Any]) -> Iterator[bytes]:
    """The trace of `lanes`, in pieces. Lanes and `began` are in `time.monotonic` seconds; times are since `began`.

    `about` is written at its end, with the figures of `overlap`.
    """
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    events = _events(lanes, began)
    first = True
    while piece := list(islice(events, EVENTS_PER_PIECE)):
        text = json.dumps(piece, separators=(",", ":"))[1:-1]
        yield (text if first else "," + text).encode()
        first = False
    yield f'],"otherData":{json.dumps({**about, **overlap(lanes)})}}}'.encode()


def overlap(lanes: Lanes) -> dict[str, Any]:
    """Seconds of the scheduler's work, of the device's, and of the scheduler's work while the device computed.

    Submitting does not count as work: without overlap it is the step itself.
    """
    work = [(each.begin, each.end) for each in lanes["scheduler"] if each.kind != SUBMIT]
    steps = [(each.begin, each.end) for each in lanes["forward"]]
    return {
        "steps": len(steps),
        "scheduler_seconds": sum(end - begin for begin, end in work),
        "scheduler_seconds_beside_device": shared_seconds(work, steps),
        "device_seconds": sum(end - begin for begin, end in steps),
    }


def shared_seconds(one: Iterable[tuple[float, float]], other: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in an interval of both; the intervals of `one` do not overlap, nor do those of `other`."""
    shared, rest = 0.0, iter(sorted(other))
    current = next(rest, None)
    for begin, end in sorted(one):
        while current is not None:
            shared += max(0.0, min(end, current[1]) - max(begin, current[0]))
            if current[1] > end:
                break
            current = next(rest, None)
    return shared


def _events(lanes: Lanes, began: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "slipstream"}}
    for thread, (lane, title) in enumerate(LANES.items(), 1):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "args": {"sort_index": thread}}
        for each in lanes[lane]:
            name = PHASES[each.kind] if lane == "scheduler" else f"step {each.step}"
            begin, end = _micros(each.begin - began), _micros(each.end - began)
            arguments = {"step": each.step, "tokens": each.tokens}
            place = {"pid": PROCESS, "tid": thread}
            yield {"ph": "X", "name": name, "cat": lane, **place, "ts": begin, "dur": end - begin, "args": arguments}
            # An arrow from where a step is handed over to where it is computed.
            if lane == "scheduler" and each.kind == SUBMIT:
                yield {"ph": "s", "name": "step", "cat": "flow", **place, "ts": begin, "id": each.step}
            elif lane == "forward":
                yield {"ph": "f", "bp": "e", "name": "step", "cat": "flow", **place, "ts": begin, "id": each.step}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
