"""The paged KV cache on the device: per layer one flat array of token slots for K and one for V.

Knows slots, not requests: which slot belongs to which token is written in `req_to_token`. Page 0 is padding, as in
SGLang's pools and vLLM's null block, so a padded row of a captured graph has somewhere harmless to write.

What a step reads is what the pool holds, its own tokens included: where codes are stored (`KVFormat`), a token's keys
are rounded once, and every query sees the rounded ones, also in the step that wrote them. So a prompt in one chunk, in
several, or found in the prefix cache gives the same logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from core.device.huge_pages import zeros_in_huge_pages
from core.device.recorder import Recorder
from core.memory.kv_format import PLAIN, KVFormat


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """What one attention layer caches per token: `num_kv_heads` keys of `k_dim` and values of `v_dim` elements.

    `layer_id` is the model's own number and may have gaps (layers that share another layer's KV, recurrent layers).
    `v_in_k`: the values are the first `v_dim` elements of the keys, as in MLA latents, and are not stored again.
    """

    layer_id: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    v_in_k: bool = False
    window: int | None = None
    """How many keys a query sees at most, its own included; None: its own and all before it."""
    chunk: int | None = None
    """Instead, how many keys the chunks of a sequence have beyond which no query sees. All of them stay in the pool."""

    def __post_init__(self) -> None:
        assert self.layer_id >= 0, self
        assert self.window is None or self.window >= 1, self
        assert self.chunk is None or (self.chunk >= 1 and self.window is None), self
        assert min(self.num_kv_heads, self.k_dim, self.v_dim) >= 1, self
        assert not self.v_in_k or self.v_dim <= self.k_dim, self

    @property
    def elements(self) -> int:
        """Elements, not bytes, stored for one token."""
        return self.num_kv_heads * (self.k_dim + (0 if self.v_in_k else self.v_dim))

    @property
    def scales(self) -> int:
        """Scales of one token, where codes are stored: one for each key and each value."""
        return self.num_kv_heads * (1 if self.v_in_k else 2)


class KVPool:
    """Slots of `num_pages` pages plus padding page 0, for every layer of `layers`. Forward stream only.

    Slot of a token = page * page_size + offset, with page >= 1. Slots 0..page_size-1 take the writes of padded rows.
    Everything starts at zero, so a slot that was never written reads as finite numbers. `layers` is empty for a model
    of recurrent layers only: its pages are then numbers without storage.

    `dtype` is that of keys and values as they are written and as attention computes with them; `format` says how they
    are stored.
    """

    def __init__(
        self,
        layers: Sequence[KVLayerSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "kv",
        format: KVFormat = PLAIN,
    ) -> None:
        assert len({spec.layer_id for spec in layers}) == len(layers), "layer ids must differ"
        assert num_pages >= 1, num_pages
        assert page_size >= 1, page_size
        assert dtype.is_floating_point, dtype
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.name = name
        self.format = format
        self.recorder: Recorder | None = None
        self._k = {spec.layer_id: self._slots(spec.num_kv_heads, spec.k_dim) for spec in layers}
        self._v = {
            spec.layer_id: self._k[spec.layer_id][..., : spec.v_dim]
            if spec.v_in_k
            else self._slots(spec.num_kv_heads, spec.v_dim)
            for spec in layers
        }
        self._shared = {spec.layer_id for spec in layers if spec.v_in_k}
        scaled = [] if format.codes is None else layers
        self._k_scales = {spec.layer_id: self._scales(spec.num_kv_heads) for spec in scaled}
        self._v_scales = {
            spec.layer_id: self._k_scales[spec.layer_id] if spec.v_in_k else self._scales(spec.num_kv_heads)
            for spec in scaled
        }

    @property
    def num_slots(self) -> int:
        """Slots per layer, padding page included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        return self.bytes_per_token_for(self.layers, self.dtype, self.format)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, padding page included."""
        return self.num_slots * self.bytes_per_token

    @staticmethod
    def bytes_per_token_for(layers: Iterable[KVLayerSpec], dtype: torch.dtype, format: KVFormat = PLAIN) -> int:
        """Bytes per token of a pool not yet built, scales included: what sizing by free memory divides by."""
        each, scale = format.element(dtype).itemsize, format.scale_bytes
        return sum(spec.elements * each + spec.scales * scale for spec in layers)

    def k(self, layer_id: int) -> torch.Tensor:
        """[num_slots, num_kv_heads, k_dim]: the keys of `layer_id`, or their codes. KeyError for a layer that caches
        nothing."""
        return self._k[layer_id]

    def v(self, layer_id: int) -> torch.Tensor:
        """[num_slots, num_kv_heads, v_dim]: the values of `layer_id`; a view of its keys where those hold them."""
        return self._v[layer_id]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is stored, each [num_slots, heads, dim], layer after layer."""
        return [*self._k.values(), *(v for layer, v in self._v.items() if layer not in self._shared)]

    @property
    def storage(self) -> list[torch.Tensor]:
        """All that it holds of memory: `tensors`, and scales where codes are stored."""
        return [*self.tensors, *self._k_scales.values(), *self._v_scales.values()]

    def v_in_k(self, layer_id: int) -> bool:
        """Whether the values of `layer_id` are the beginnings of its keys."""
        return layer_id in self._shared

    def k_scales(self, layer_id: int) -> torch.Tensor | None:
        """[num_slots, num_kv_heads], contiguous: the scales of the keys' codes; None where no codes are stored."""
        return self._k_scales.get(layer_id)

    def v_scales(self, layer_id: int) -> torch.Tensor | None:
        """[num_slots, num_kv_heads], contiguous: those of the values; the same ones where keys hold the values."""
        return self._v_scales.get(layer_id)

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys [T, num_kv_heads, k_dim] and values [T, num_kv_heads, v_dim] of T tokens at `slots`, int64[T].

        Slots may repeat only within the padding page, where it does not matter which write is last. `k` and `v` may be
        strided views.
        """
        keys, values = self._k[layer_id], self._v[layer_id]
        assert slots.dtype == torch.int64, slots.dtype
        assert k.shape[1:] == keys.shape[1:], (layer_id, tuple(k.shape), tuple(keys.shape))
        assert v.shape[1:] == values.shape[1:], (layer_id, tuple(v.shape), tuple(values.shape))
        assert k.shape[0] == v.shape[0] == slots.shape[0], (k.shape[0], v.shape[0], slots.shape[0])
        assert k.dtype == v.dtype == self.dtype, (k.dtype, v.dtype, self.dtype)
        if self.recorder is not None:
            self.recorder.wrote(self.name, slots)
        self._put(keys, self._k_scales.get(layer_id), slots, k)
        # Shared values are a view of the keys, which the line above has written.
        if layer_id not in self._shared:
            self._put(values, self._v_scales.get(layer_id), slots, v)

    def read(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, num_kv_heads, k_dim] and values [n, num_kv_heads, v_dim] at `slots`, int64[n], as numbers."""
        keys = self._get(self._k[layer_id], self._k_scales.get(layer_id), slots)
        if layer_id in self._shared:
            return keys, keys[..., : self._v[layer_id].shape[-1]]
        return keys, self._get(self._v[layer_id], self._v_scales.get(layer_id), slots)

    def _get(self, stored: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        found = stored.index_select(0, slots)
        if scales is None:
            return found
        assert self.format.codes is not None, "they have scales"
        return self.format.codes.decode(found, scales.index_select(0, slots), self.dtype)

    def _put(self, to: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        codes = self.format.codes
        if codes is not None:
            assert scales is not None, "codes have scales"
            numbers, by = codes.encode(numbers)
            scales.index_copy_(0, slots, by)
        to.index_copy_(0, slots, numbers)

    def _slots(self, heads: int, dim: int) -> torch.Tensor:
        return zeros_in_huge_pages((self.num_slots, heads, dim), self.format.element(self.dtype), self.device)

    def _scales(self, heads: int) -> torch.Tensor:
        assert self.format.codes is not None, "numbers as they are have no scales"
        return zeros_in_huge_pages((self.num_slots, heads), self.format.codes.scale, self.device)
