"""Brings what a step has made to the host: in one transfer, on the copy stream, behind the step's publish event."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.device.event import Event
from core.device.recorder import Recorder
from core.device.streams import DeviceStreams
from core.executor.computed import Computed, Fetched
from core.executor.launched_step import RESULTS, SAMPLED
from core.executor.scorer import Scores
from core.executor.step_lanes import StepLanes
from core.sampling.sampler import SampleOutput
from core.speculation.verification import Outcome


@dataclass(frozen=True, slots=True)
class OnTheirWay:
    """What can be read on the host once `copy_done` has fired."""

    host: SampleOutput
    counts: torch.Tensor
    """As in `LaunchedStep`."""
    fetched: Fetched
    verdict: Outcome | None
    copy_done: Event


def fetch(
    streams: DeviceStreams,
    recorder: Recorder | None,
    step_id: int,
    sampled: SampleOutput,
    counted: torch.Tensor,
    done: Computed,
    outcome: Outcome | None,
    published: Event,
    lanes: StepLanes | None,
) -> OnTheirWay:
    """Bring tokens, what became of drafts, vectors, log probabilities and assert counters to the host."""
    copy_done = streams.new_event()
    with streams.on_copy():
        # All that is copied comes before `publish` in the forward stream, so the copies need not wait for `stash`.
        published.wait(streams.copy)
        if lanes is not None:
            lanes.copying(streams.mark())
        if recorder is not None:
            recorder.read(SAMPLED, (step_id,))
            recorder.wrote(RESULTS, (step_id,))
        always = (sampled.tokens, sampled.non_finite, counted)
        told = (sampled.logprobs, sampled.top_ids, sampled.top_values, sampled.chosen)
        maybe = (*told, done.vectors, *(() if done.scores is None else done.scores))
        some = (each for each in maybe if each is not None)
        arriving = iter(streams.fetch([*always, *some, *(() if outcome is None else outcome.on_device)]))
        tokens, non_finite, counts = (next(arriving) for _ in always)
        found = [None if each is None else next(arriving) for each in maybe]
        host = SampleOutput(tokens, non_finite, *found[: len(told)])
        vectors, *scores = found[len(told) :]
        fetched = Fetched(vectors, Scores(*scores) if scores else None)  # type: ignore[arg-type]  # none is None
        outcome = None if outcome is None else outcome.fetched(list(arriving))
        if lanes is not None:
            lanes.copied(streams.mark())
        copy_done.record(streams.copy)
    return OnTheirWay(host, counts, fetched, outcome, copy_done)
