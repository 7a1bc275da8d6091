"""The classification head of a causal checkpoint: one linear layer over the state of an input's last token.

transformers has a class for each model type that puts such a head on the model. What that class does with the hidden
states is not read but tried, at load: its own `forward` runs over drawn states in place of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from safetensors import safe_open
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from core.errors import ModelLoadError
from core.models.base import ModelSpec
from core.models.config import CheckpointConfig
from core.models.weights import check_weight_files

TRIED_TOKENS: Final = 5
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of the largest number. The class and this multiply the same numbers, of one row or of several."""


class LinearHead:
    """A `core.models.base.LabelHead` that reads the last token alone, so that a prompt may come in chunks."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight`: [L, H]; `bias`: [L]."""
        self._weight, self._bias = weight, bias

    @property
    def count(self) -> int:
        """How many labels there are."""
        return int(self._weight.shape[0])

    def label(self, hidden: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """float32[E, L]: for each E the numbers of the tokens that end before its place in `ends`. `hidden`: [T, H]."""
        last = torch.stack([hidden[end - 1] for end in ends])
        return functional.linear(last.to(self._weight.dtype), self._weight, self._bias).float()


def head_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """What names of weights begin with that a judge's checkpoint has beside those of the causal model.

    Raises ModelLoadError where transformers has no such class.
    """
    return modules_beside(_class_for(config), config)


def modules_beside(model_class: Any, config: PreTrainedConfig) -> tuple[str, ...]:
    """What names of weights begin with that `model_class` has beside its base model."""
    return tuple(f"{name}." for name in _head_modules(_without_memory(model_class, config)))


def load_head(
    checkpoint: CheckpointConfig, config: PreTrainedConfig, spec: ModelSpec, device: torch.device
) -> LinearHead:
    """Read the head of `checkpoint`, whose labels are known, and try it against the class of transformers.

    `spec`: of the causal model below it. Raises ModelLoadError, which names the model type and what is wrong.
    """
    labels, kind = checkpoint.labels, checkpoint.model_type
    assert labels is not None, "a checkpoint without labels has no head"
    if not spec.hidden_size:
        raise ModelLoadError(f"model type {kind!r} is not supported with labels: it gives no hidden states to judge by")
    whole = _without_memory(_class_for(config), config)
    modules = _head_modules(whole)
    if len(modules) != 1 or not isinstance(linear := next(iter(modules.values())), torch.nn.Linear):
        listed = ", ".join(modules) or "nothing"
        raise ModelLoadError(
            f"model type {kind!r} is not supported with labels: its head is not one linear layer but {listed}"
        )
    name = next(iter(modules))
    wanted = {f"{name}.{part}": tuple(tensor.shape) for part, tensor in linear.named_parameters()}
    tensors = {key: found.to(device, spec.dtype) for key, found in _read(checkpoint, wanted)}
    head = LinearHead(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
    if head.count != len(labels.names):
        raise ModelLoadError(f"{checkpoint.path} has {len(labels.names)} labels and a head for {head.count}")
    _try(head, whole, tensors, spec, kind)
    return head


def _class_for(config: PreTrainedConfig) -> Any:
    """The class of transformers for `config` with a head."""
    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if found is None:
        raise ModelLoadError(
            f"model type {config.model_type!r} is not supported with labels: transformers has no such class for it"
        )
    return found


def _without_memory(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        made: PreTrainedModel = model_class(config).eval()
    return made


def _head_modules(whole: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The modules beside the model itself that have weights, by name."""
    return {
        name: module
        for name, module in whole.named_children()
        if module is not whole.base_model and any(True for _ in module.parameters())
    }


def _read(checkpoint: CheckpointConfig, wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    left = dict(wanted)
    for shard in check_weight_files(checkpoint.path).shards:
        with safe_open(shard, "pt") as file:
            for name in left.keys() & set(file.keys()):
                tensor, shape = file.get_tensor(name), left.pop(name)
                if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                    raise ModelLoadError(
                        f"{shard}: {name} must be plain numbers {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
                    )
                yield name, tensor
    if left:
        raise ModelLoadError(f"{checkpoint.path} has no weights {min(left)} for its labels")


def _try(
    head: LinearHead, whole: PreTrainedModel, tensors: dict[str, torch.Tensor], spec: ModelSpec, kind: str
) -> None:
    """Raise ModelLoadError unless the class makes the same of drawn states as `head` does."""
    device = next(iter(tensors.values())).device
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TRIED_TOKENS, spec.hidden_size, generator=generator).to(device, spec.dtype)
    pad = whole.config.get_text_config().pad_token_id
    ids = torch.full((1, TRIED_TOKENS), 1 if pad == 0 else 0, device=device)
    base: Any = whole.base_model
    base.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)
    try:
        whole.load_state_dict(tensors, strict=False, assign=True)
        with torch.inference_mode():
            expected = whole(input_ids=ids, use_cache=False).logits[0].float()
    except Exception as error:
        raise ModelLoadError(f"model type {kind!r} is not supported with labels: {error}") from error
    found = head.label(states[0], (0,), (TRIED_TOKENS,))[0]
    if found.shape != expected.shape or (found - expected).abs().max() > TOLERANCE[spec.dtype] * expected.abs().max():
        raise ModelLoadError(
            f"model type {kind!r} is not supported with labels: its head does more than a linear layer"
        )
