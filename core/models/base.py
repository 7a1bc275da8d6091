"""The interface of a model: its measures (`ModelSpec`), and one forward pass over the paged KV pool (`Model`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.memory.companion import DeviceCompanion, Writes
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.recurrent.state_pool import StateLayerSpec
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.models.lora.slots import LORA, LoraWrites
from core.types.vision_spec import VisionSpec

NO_COMPANIONS: Mapping[str, DeviceCompanion] = MappingProxyType({})

Progress = Callable[[str, float], None]
"""Called with the name of a load stage and the fraction of it that is done, 0..1, on the loading thread."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Measures of a loaded model; all that pools, sampler and scheduler need to know of it."""

    name: str
    """Name for clients unless another is configured: the last part of the checkpoint's path."""
    architecture: str
    vocab_size: int
    """Width of the logits. A tokenizer may know fewer ids."""
    context_length: int
    """Tokens of the longest sequence that the model can hold."""
    dtype: torch.dtype
    """Of weights, activations and KV pool. Logits are float32 whatever this says."""
    kv_layers: tuple[KVLayerSpec, ...]
    """Layer ids ascend and may have gaps."""
    eos_token_ids: tuple[int, ...] = ()
    """All below `vocab_size`: `min_tokens` forbids them by their place in the logits."""
    bos_token_id: int | None = None
    state_layers: tuple[StateLayerSpec, ...] = ()
    """Recurrent layers, by ascending layer id. A model has one or a KV layer, unless it takes whole prompts."""
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Fields of `SamplingParams` that the checkpoint recommends."""
    hidden_size: int = 0
    """Width of the hidden states in `ForwardBatch.hidden`; 0 for a model that sets none and so cannot embed."""
    quantization: str = ""
    """How the weights are quantised; empty for plain weights of `dtype`."""
    encoder: EncoderSpec | None = None
    """Set for an encoder-decoder; all other fields then describe its decoder."""
    vision: VisionSpec | None = None
    """Set for a model that sees images."""
    state_of_layers: int = 0
    """Layers whose states a step can ask for, by numbers 0 to this one (`HiddenRequest.layers`); 0 for none."""
    whole_prompts: bool = False
    """Whether tokens also see what comes after them: a prompt is computed in one step, and nothing is cached of it."""
    multiplied: int = 0
    """Elements of the matrices that each of its tokens is multiplied by, for a model that takes whole prompts."""
    token_types: int = 1
    """Types of tokens that an encoder tells apart: its prompts have ids below this times `vocab_size`."""
    capturable: bool = False
    """Whether `forward`, apart from the attention backend, reads only device tensors and shapes: in decode steps, and
    unless there are recurrent layers or an encoder in all steps."""

    stages: int = 1
    """How many processes have layers of the model, of these kinds and at most as many: these are those of the first."""

    def __post_init__(self) -> None:
        assert self.vocab_size >= 1, self.vocab_size
        assert self.context_length >= 2, self.context_length
        assert all(0 <= token < self.vocab_size for token in self.eos_token_ids), (self.eos_token_ids, self.vocab_size)
        assert self.kv_layers or self.state_layers or self.whole_prompts, "a model that keeps nothing needs no pool"

    @property
    def reach(self) -> int | None:
        """How many of the newest tokens a logit depends on; None for all.

        Windows add up over the layers, since a layer passes on what it saw in its own window. A layer without a window,
        or with a recurrent state, makes it all tokens.
        """
        windows = [layer.window for layer in self.kv_layers]
        if self.state_layers or None in windows:
            return None
        return self.stages * sum(window for window in windows if window is not None)


class LabelHead(Protocol):
    """What a checkpoint puts on its model to judge texts. Used by the forward thread."""

    @property
    def count(self) -> int:
        """How many labels there are."""
        ...

    def label(self, hidden: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """float32[E, count]: the numbers of E sequences, of which each has tokens `start:end` of `hidden`, [T, H].

        Of a sequence that came in chunks these are the tokens of the last one.
        """
        ...


class Model(Protocol):
    """A loaded model. Used by one forward thread only, like everything it writes to."""

    @property
    def spec(self) -> ModelSpec:
        """The model's measures, which never change after loading."""
        ...

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Give the model the pools that later batches refer to, and the backend that it must attend through.

        Called before the first `forward`, and again if the engine is rebuilt around the same weights.
        """
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits of the tokens at `batch.last_indices`, in that order.

        Writes the KV of all T tokens, also when S is 0 (a chunk in the middle of a prompt). The next call may reuse the
        returned memory.
        """
        ...


def hooks_layers(writes: Writes) -> bool:
    """Whether a step with these companion writes runs adapter hooks in the layers, which most captured graphs lack."""
    adapters = writes.get(LORA)
    return isinstance(adapters, LoraWrites) and bool(adapters.groups)
