"""A step between its launch on the device and the arrival of its results on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from core.batch.result import NO_ROWS, Accepted, Exhausted, LogprobResult, ScoredPrompts, StepResult, VectorResult
from core.batch.schedule_batch import ScheduleBatch
from core.device.checks import DEVICE_CHECKS
from core.device.event import Event
from core.device.recorder import Recorder
from core.device.timer import Mark
from core.executor.sampling_step import SampledRows
from core.executor.scorer import Scores
from core.executor.step_lanes import StepLanes
from core.sampling.sampler import SampleOutput
from core.speculation.verification import Outcome

SAMPLED, RESULTS = "sampled", "results"
"""Names of a step's outputs for a `Recorder`, on the device and on the host; their places are step ids."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Work handed to the device. The tensors stay referenced until `copy_done`, because the copy stream reads them."""

    batch: ScheduleBatch
    host: SampleOutput
    counts: torch.Tensor
    """`DeviceChecks.snapshot`, int64: one counter per device check, then one violation flag per decode row."""
    copy_done: Event
    """Fires when `host`, `counts` and `vectors` can be read."""
    began: Mark
    """Where the step's work begins on the forward stream."""
    ended: Mark
    """Where it ends there, copies to the host excluded."""
    previous_end: Mark | None
    """`ended` of the step before; None for the first step."""
    device_refs: tuple[object, ...]
    recorder: Recorder | None
    sampled: SampledRows
    vectors: torch.Tensor | None = None
    """float32[E, H] on the host: embeddings of the step; None without any, or without memory for them."""
    exhausted: Exhausted = NO_ROWS
    """Owners of rows, embedded ones included, for which there was too little memory."""
    lanes: StepLanes | None = None
    """The step's lanes; None while no recording runs."""
    drafting: tuple[Mark, Mark] | None = None
    """Where the making of drafts begins and ends on the forward stream; None where none are wanted."""
    verdict: Outcome | None = None
    """What became of drafts; None in a step that verified none. `host` then has an entry for each of its places."""
    scores: Scores | None = None
    """Of prompt tokens, on the host; None without any, or without memory for them."""

    def result(self) -> StepResult:
        """Wait for the copies and turn them into the result. Blocks, so with overlap the event loop never calls it."""
        self.copy_done.synchronize()
        batch, host = self.batch, self.host
        if self.lanes is not None:
            self.lanes.write(self.began, self.ended)
        if self.recorder is not None:
            self.recorder.read(RESULTS, (batch.step_id,))
        idle = 0.0
        if self.previous_end is not None and not batch.after_idle:
            idle = max(0.0, self.began.seconds_since(self.previous_end))
        tokens, non_finite, logprobs = host.tokens.numpy(), host.non_finite.numpy(), _logprobs(host)
        accepted, verdict = self._accepted(), self.verdict
        if verdict is not None:
            kept, starts = verdict.kept, verdict.starts
            tokens, logprobs = tokens[kept], None if logprobs is None else logprobs.of(kept)
            non_finite = np.logical_or.reduceat(non_finite & kept, starts)
        return StepResult(
            step_id=batch.step_id,
            rows=batch.sample_rows,
            generations=batch.sample_generations,
            tokens=tokens,
            non_finite=non_finite,
            logprobs=logprobs,
            assert_counts=self.counts.numpy()[: len(DEVICE_CHECKS)],
            busy=self.ended.seconds_since(self.began),
            idle=idle,
            vectors=self._vectors(),
            grammar_status=self.sampled.status,
            exhausted=self.exhausted,
            was_split=self.sampled.was_split,
            violated=self._violated(),
            accepted=accepted,
            drafting=0.0 if self.drafting is None else self.drafting[1].seconds_since(self.drafting[0]),
            has_prompts=batch.num_extend > 0,
            scored=self._scored(),
        )

    def _accepted(self) -> Accepted | None:
        """How far the rows came, in a step that the plan let verify drafts; it may have found none."""
        spec, verdict = self.batch.spec, self.verdict
        if spec is None or not self.batch.verifies:
            return None
        if verdict is None:
            ones = np.ones(len(spec.drafts), np.int64)
            return Accepted(ones, ones - 1, spec.drafts + 1)
        return Accepted(verdict.counts, verdict.proposed, spec.drafts + 1)

    def _violated(self) -> npt.NDArray[np.bool_] | None:
        """bool[S]: sampled rows whose relayed input was wrong; None if there is none."""
        decodes = self.counts.numpy()[len(DEVICE_CHECKS) :]
        if not decodes.any():
            return None
        samples = len(self.batch.sample_indices)
        # Decode rows come last in a batch, and all of them sample.
        violated = np.zeros(samples, np.bool_)
        violated[samples - len(decodes) :] = decodes
        return violated

    def _scored(self) -> ScoredPrompts | None:
        if self.batch.scoring is None or self.scores is None:
            return None
        values, top_ids, top_values = (each.numpy() for each in self.scores)
        return ScoredPrompts(self.batch.scoring, LogprobResult(values, top_ids, top_values))

    def _vectors(self) -> VectorResult | None:
        pooling = self.batch.pooling
        if pooling is None or self.vectors is None:
            return None
        return VectorResult(pooling.rows, pooling.generations, self.vectors.numpy())


def _logprobs(host: SampleOutput) -> LogprobResult | None:
    if host.logprobs is None:
        return None
    chosen = None if host.chosen is None else host.chosen.numpy()
    if host.top_ids is None or host.top_values is None:
        nothing = np.empty((len(host.logprobs), 0))
        return LogprobResult(host.logprobs.numpy(), nothing.astype(np.int64), nothing.astype(np.float32), chosen)
    return LogprobResult(host.logprobs.numpy(), host.top_ids.numpy(), host.top_values.numpy(), chosen)
