"""Loads a model of which this engine has all but the experts, and some of those; `transformers` shares them out."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.base import ModelSpec, Progress
from core.models.config import CheckpointConfig
from core.models.experts.exchange import Exchange
from core.models.experts.shared_experts import ExpertLayers
from core.models.hf.backend import TransformersModel, prove_module, refuse_by_class
from core.models.hf.module_tree import load_module, read_configuration
from core.models.hf.packed_attention import PackedContext
from core.models.hf.recurrent import StateContext
from core.models.hf.self_check import CheckResult

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""By what names configurations tell how many there are."""
NAME = "slipstream"
"""Of `ExpertLayers.implementation` among what `transformers` can bring experts their tokens by."""


class JointModel(TransformersModel):
    """What serves: its forward passes are those of all engines, and `idle` is this one's part in a pass of others."""

    def __init__(
        self,
        module: PreTrainedModel,
        spec: ModelSpec,
        context: PackedContext,
        states: StateContext | None,
        layers: ExpertLayers,
    ) -> None:
        super().__init__(module, spec, context, states)
        self.idle = layers.idle


class JointProof:
    """See `Part`: all engines prove themselves at the same time, or none serves."""

    def __init__(self, layers: ExpertLayers) -> None:
        self._layers = layers

    @property
    def told(self) -> str:
        """See `Part`."""
        return " with expert_parallel"

    def judged(self, result: CheckResult) -> CheckResult:
        """The worst result of all engines, which check the same with the same tolerance."""
        # What is no number would be lost among those of the others.
        error = result.error if math.isfinite(result.error) else math.inf
        failed, error = self._layers.exchange.most([float(not result.passed), error])
        return CheckResult(not failed, error, result.tolerance)

    def model(
        self, module: PreTrainedModel, spec: ModelSpec, context: PackedContext, states: StateContext | None
    ) -> JointModel:
        """See `Part`."""
        return JointModel(module, spec, context, states, self._layers)


def load_joint(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress, exchange: Exchange
) -> TransformersModel:
    """Load this engine's part, and prove it; all engines of `exchange` call it at the same time.

    Raises ModelLoadError, with the model type and what is wrong, in one line.
    """
    hf_config = read_configuration(checkpoint)
    refuse_by_class(hf_config, checkpoint.model_type)
    refuse_by_experts(hf_config, exchange.size)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    auto = _experts_alone(found[0] if isinstance(found, tuple | list) else found)
    layers = ExpertLayers(exchange)
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import EPImplementationInterface

        EPImplementationInterface.register(NAME, layers.implementation)
        shards = DistributedConfig(tp_size=exchange.size, ep_size=exchange.size, ep_implementation=NAME)
    except (ImportError, TypeError) as error:
        raise ModelLoadError("expert_parallel is not possible: this release of transformers is too old") from error
    module = load_module(checkpoint, config, device, progress, auto=auto, distributed_config=shards)
    layers.arrange(module)
    return prove_module(module, checkpoint, config, progress, JointProof(layers))


def refuse_by_experts(hf_config: PreTrainedConfig, size: int) -> None:
    """Raises ModelLoadError where a model has no experts, or has some that `size` engines cannot share evenly."""
    text: Any = hf_config.get_text_config()
    if not getattr(text, "base_model_ep_plan", None):
        kind = hf_config.model_type
        raise ModelLoadError(f"expert_parallel is not possible: transformers shares out no experts of {kind!r}")
    for name in EXPERTS:
        # As its config.json calls them: others are names for the same.
        experts = vars(text).get(name)
        if isinstance(experts, int) and experts % size:
            raise ModelLoadError(
                f"expert_parallel is not possible with {size} engines: {name} is {experts}, no multiple of it"
            )


def _experts_alone(model_class: Any) -> Any:
    """A class like `model_class`, of a module tree of `transformers`, of which only experts are shared out."""

    def init(module: Any, *given: Any, **named: Any) -> None:
        model_class.__init__(module, *given, **named)
        # Rules for tensors give way to rules for experts, and may not be none: 5.24 refuses the empty plan.
        module._tp_plan = dict(module._ep_plan)

    # Its name and module: `transformers` looks conversions of weights up by them.
    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})
