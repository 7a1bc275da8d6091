"""Proves at load that an encoder-decoder computes the same packed, over cross pages, as it does plain.

The steps are those of `core.models.hf.self_check`; two inputs of different lengths are encoded with the first.
In 16 bits, where `self_check` asks what losing the context would do, the two requests swap their inputs instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.device.staging import Staging
from core.memory.companion import AdmissionFacts, DeviceCompanion
from core.memory.cross.cross_pages import CROSS, NO_PAGES, CrossPages
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import NO_COMPANIONS, Model, ModelSpec
from core.models.hf.self_check import LENGTHS, PAGE_SIZE, CheckResult, Reference, run_self_check
from core.types.audio_spec import AudioSpec

INPUT_LENGTHS = (9, 4)
"""Encoder tokens of the two requests, where it reads ids."""


@dataclass(frozen=True, slots=True)
class EncoderReference:
    """Two inputs, and what the plain model makes of fixed decoder tokens behind them."""

    inputs: tuple[torch.Tensor, ...]
    """int64[n] each, or sounds, float32[mels, frames]."""
    decoder: Reference
    lengths: tuple[int, ...] = INPUT_LENGTHS
    """Encoder tokens of each input."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.decoder.vocab_size


def plain_reference(
    model: PreTrainedModel, start_ids: tuple[int, ...], audio: AudioSpec | None = None
) -> EncoderReference:
    """Run `model` by its own forward, without any cache, over ids from all over the vocabulary, or over noise."""
    table: Any = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)

    def draw(lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        size = int(table.weight.shape[0])
        return tuple(torch.randint(size, (n,), generator=generator).to(model.device) for n in lengths)

    def logits(read: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        # Models that take padding for the end of an input must not find any: nothing here is padded.
        given = {"input_ids": read[None], "attention_mask": torch.ones_like(read)[None]}
        if audio is not None:
            given = {"input_features": read[None].to(model.dtype)}
        found: Any = model(**given, decoder_input_ids=said[None], use_cache=False)
        float_logits: torch.Tensor = found.logits[0].float()
        return float_logits

    inputs, ids, lengths = draw(INPUT_LENGTHS), draw(LENGTHS), INPUT_LENGTHS
    if audio is not None:
        noise = torch.randn(len(lengths), audio.mels, audio.frames, generator=generator).to(model.device)
        inputs, lengths = tuple(noise), (audio.positions, audio.positions)
    for said in ids:
        said[0] = start_ids[0]
    with torch.inference_mode():
        expected = tuple(logits(read, said) for read, said in zip(inputs, ids, strict=True))
        swapped = tuple(logits(read, said) for read, said in zip(reversed(inputs), ids, strict=True))
    return EncoderReference(inputs, Reference(ids, expected, swapped), lengths)


class FreeModel(Model, Protocol):
    """An encoder-decoder that can say what it would say if no id were forbidden, as the reference does."""

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """`forward`, before ids are forbidden."""
        ...


def check_encoder_decoder(
    model: FreeModel, reference: EncoderReference, attention: AttentionBackend | None = None
) -> CheckResult:
    """Run `model` over small pools of its own and compare with `reference`. Leaves those pools bound.

    `attention`: what it attends through, if that is not to be PyTorch's.
    """
    return run_self_check(_Encoding(model, reference), reference.decoder, attention)


class _Encoding:
    """The model as `run_self_check` wants it: brings the cross pages, and adds the inputs to the first step."""

    def __init__(self, model: FreeModel, reference: EncoderReference) -> None:
        self._model = model
        self._inputs, self._lengths = reference.inputs, reference.lengths
        device, rows = self._inputs[0].device, len(self._inputs)
        self._width = max(self._lengths) + 1
        self._requests = ReqToTokenPool(rows, self._width, device)
        self._host = CrossPages(sum(-(-each // PAGE_SIZE) for each in self._lengths) + 1, PAGE_SIZE, rows + 1)
        # Backwards, so that a row's pages are neither the first ones nor in order of rows.
        for row in range(rows, 0, -1):
            self._host.admitted(row, AdmissionFacts(0, NO_PAGES, 0, self._lengths[row - 1]))
        self._first = True

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        encoder = self.spec.encoder
        assert encoder is not None, "only encoder-decoders are checked here"
        pool = KVPool(encoder.cross_layers, self._host.allocator.num_pages, PAGE_SIZE, self.spec.dtype, kv_pool.device)
        self._cross = CrossPool(self._requests, pool, self._width)
        self._model.bind(kv_pool, attention, {CROSS: self._cross})

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.rows.cpu().numpy()
        writes = self._host.planned(rows, batch.prefix_lens_host, batch.extend_lens_host, NO_PAGES)
        self._cross.begin(batch.rows, writes, Staging(batch.rows.device))
        if self._first:
            if self.spec.encoder is not None and self.spec.encoder.audio is not None:
                batch.encoder_features = tuple(each.float().cpu().numpy() for each in self._inputs)
                batch.encoder_ids = torch.zeros(sum(self._lengths), dtype=torch.int64, device=batch.rows.device)
            else:
                batch.encoder_ids = torch.cat(self._inputs)
            batch.encoder_lens_host = np.array(self._lengths)
            self._first = False
        return self._model.logits(batch)
