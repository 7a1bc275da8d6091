"""A model of which each rank of a pipeline has some layers: what `core.models.hf.backend` serves, in two halves.

Rank 0 begins a step, by its own layers, and ends it when hidden states come back from the last rank; other steps may
begin in between. The other ranks compute a step when its states come in.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.base import ModelSpec, Progress
from core.models.config import CheckpointConfig
from core.models.hf.backend import TransformersModel, prove_module, refuse_by_class
from core.models.hf.module_tree import load_module, read_configuration
from core.models.hf.packed_attention import PackedContext
from core.models.hf.recurrent import StateContext
from core.models.hf.self_check import CheckResult
from core.models.stages.ring import Ring
from core.models.stages.stage import Away, Phase, Stage


class StagedModel(TransformersModel):
    """What both kinds have."""

    def __init__(
        self,
        module: PreTrainedModel,
        spec: ModelSpec,
        context: PackedContext,
        states: StateContext | None,
        stage: Stage,
    ) -> None:
        super().__init__(module, spec, context, states)
        self.stage = stage


class FirstStage(StagedModel):
    """That of rank 0: it has the embedding, the first layers, and what makes logits."""

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> Any:
        """Compute this rank's layers and send what they made. Returns what `end` takes; never waits."""
        self.enter(batch)
        stage = self.stage
        stage.phase, stage.wanted = Phase.BEGIN, _wanted(batch)
        try:
            self._call.logits(self._context.cache, batch.input_ids, batch.positions, batch.last_indices)
        except Away:
            return stage.coming
        finally:
            stage.phase, stage.wanted = Phase.WHOLE, None
        raise AssertionError("a pass ends where the last layer of this rank does")

    @torch.inference_mode()
    def end(self, batch: ForwardBatch, coming: Any) -> torch.Tensor:
        """float32[S, vocab_size]: logits of a step that was begun. Waits for the other ranks, if it wants any logits.

        Raises RuntimeError once one of them is gone.
        """
        if coming is None:
            return torch.empty(0, self.spec.vocab_size, device=batch.input_ids.device)
        wanted, ids, positions, last = _wanted(batch), batch.input_ids, batch.positions, batch.last_indices
        if wanted is not None:
            ids, positions, last = ids[wanted], positions[wanted], torch.arange(len(wanted), device=ids.device)
        stage = self.stage
        stage.phase, stage.coming = Phase.END, coming
        self._call.begin(batch)
        try:
            logits = self._call.logits(self._context.cache, ids, positions, last).float()
        finally:
            stage.phase, stage.coming = Phase.WHOLE, None
        self._call.give(batch)
        return logits

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`: both halves, one behind the other."""
        return self.end(batch, self.begin(batch))


class LaterStage(StagedModel):
    """That of another rank. Its logits are ones: no tokens are made of them."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size], once this rank's layers have computed the step, whose states it waits for.

        Raises RuntimeError once the rank that sends them is gone.
        """
        self.enter(batch)
        self.stage.wanted = _wanted(batch)
        # Tokens are known to rank 0. A model whose layers read them too fails its proof by this, and is refused.
        ids = torch.zeros_like(batch.input_ids)
        try:
            self._call.logits(self._context.cache, ids, batch.positions, batch.last_indices)
        finally:
            self.stage.wanted = None
        self._call.give(batch)
        return torch.ones(1, device=batch.input_ids.device).expand(len(batch.last_indices), self.spec.vocab_size)


class StageProof:
    """See `Part`: rank 0 judges the logits, which are made of the work of all."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def told(self) -> str:
        """See `Part`."""
        return f" with pipeline_parallel {self._stage.ring.size}"

    def judged(self, result: CheckResult) -> CheckResult:
        """What rank 0 found."""
        passed, error, tolerance = self._stage.ring.agree([float(result.passed), result.error, result.tolerance])
        return CheckResult(bool(passed), error, tolerance)

    def model(
        self, module: PreTrainedModel, spec: ModelSpec, context: PackedContext, states: StateContext | None
    ) -> StagedModel:
        """See `Part`. Raises ModelLoadError where ranks have layers of different kinds."""
        ring = self._stage.ring
        # What the first rank plans for the layers that it has must do for those of all others, and so must its proof.
        if not ring.all_equal(_kinds(spec)):
            raise ModelLoadError(
                f"pipeline_parallel {ring.size} is not possible with {module.config.model_type!r}: "
                "its ranks would have layers of different kinds"
            )
        made = FirstStage if self._stage.is_first else LaterStage
        return made(module, replace(spec, stages=ring.size), context, states, self._stage)


def load_staged(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress, ring: Ring
) -> TransformersModel:
    """Load the layers of this rank, and prove all of them together; every rank of `ring` calls it at the same time.

    Raises ModelLoadError, on rank 0 with the model type and what is wrong, in one line.
    """
    hf_config = read_configuration(checkpoint)
    refuse_by_class(hf_config, checkpoint.model_type)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    stage = Stage(ring)
    cut = stage.cutting(found[0] if isinstance(found, tuple | list) else found)
    try:
        module = load_module(checkpoint, config, device, progress, auto=cut, beside=stage.elsewhere)
    except ModelLoadError as error:
        if type(error.__cause__) is not AttributeError:
            raise
        # As where a model looks at its layers while it is made (Falcon H1).
        kind = checkpoint.model_type
        reason = f"it asks more of its layers than to compute ({error.__cause__})"
        raise ModelLoadError(f"pipeline_parallel {ring.size} is not possible with {kind!r}: {reason}") from error
    return prove_module(module, checkpoint, config, progress, StageProof(stage))


def _wanted(batch: ForwardBatch) -> torch.Tensor | None:
    """Whose states come back: of the tokens whose logits are wanted, or of all where the step pools them (None)."""
    return None if batch.wants_hidden else batch.last_indices


def _kinds(spec: ModelSpec) -> int:
    """A number for the kinds of windows, and for whether there are recurrent states."""
    told = repr((sorted({(str(each.window), str(each.chunk)) for each in spec.kv_layers}), bool(spec.state_layers)))
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7])
