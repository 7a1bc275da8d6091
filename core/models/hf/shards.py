"""Tensor parallelism by `transformers`: each rank loads its shard of each weight, or the model is refused by name."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from core.errors import ModelLoadError

HEADS = ("num_attention_heads", "num_key_value_heads")


def load_options(config: PreTrainedConfig, size: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` for one of `size` ranks; none where there is one. Raises as `check_heads`."""
    if size == 1:
        return {}
    check_heads(config, size)
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raises ModelLoadError where heads cannot be shared out evenly: a rank would compute parts of a head."""
    text: Any = config.get_text_config()
    for name in HEADS:
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise ModelLoadError(f"tensor_parallel {size} is not possible: {name} is {heads}, no multiple of it")


def check_shards(model: PreTrainedModel, size: int) -> None:
    """Raises ModelLoadError where only the vocabulary was shared out: every rank would compute every layer.

    `transformers` says nothing then (gpt_oss, LFM2 and Bamba are such).
    """
    if size == 1:
        return
    beside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    shared = (each for each in model.parameters() if id(each) not in beside)
    if not any(isinstance(each, DTensor) and each.to_local().shape != each.shape for each in shared):
        kind = model.config.model_type
        raise ModelLoadError(f"tensor_parallel {size} is not possible: transformers shares out no layer of {kind!r}")
