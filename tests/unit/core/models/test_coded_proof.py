"""At start attention over codes is compared with their definition: bytes with bytes, outputs with a formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.base import AttentionBackend
from core.attention.registry import build_attention
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.config import EngineConfig, ExecutorConfig, ModelConfig
from core.device.streams import DeviceStreams
from core.engine import build
from core.errors import ConfigError
from core.memory.kv_e4m3 import FP8_E4M3
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_pool import KVPool
from core.models.attention_proof import prove_attention, prove_codes
from core.models.loader import load_model
from core.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes import plain_kernels
from tests.support.interpreted import quick_calls
from tests.support.native_cases import CASES
from tests.unit.core.attention.test_conformance import DEVICE
from tests.unit.core.attention.test_triton import interpreted, needs_triton

CPU = torch.device("cpu")
KINDS = ("llama", "gpt_oss", "gemma2", "llama4_text", "deepseek_v3", "lfm2")
"""Whole rows, windows with sinks, capped scores, chunks, latents, and states beside keys."""


class Stored(AttentionBackend):
    """Stores by a kernel of its own, then attends as PyTorch's does, but for what a test spoils."""

    def __init__(self) -> None:
        self._plain = TorchNativeAttention()

    @classmethod
    def why_not_stored(cls, format: KVFormat, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._plain.plan(self.seen(batch))

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        if not rest.pop("stored", False):
            self.store(self.batch.kv_pool, layer_id, self.batch.out_cache_loc, k.transpose(0, 1), v.transpose(0, 1))
        return self._plain.forward(layer_id, q, k, v, stored=True, **rest)

    def seen(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pool.write(layer, slots, k, v)
        self.behind(pool, layer, slots)

    def behind(self, pool: KVPool, layer: int, slots: torch.Tensor) -> None:
        """What goes wrong with what was stored."""


class OtherPage(Stored):
    """In decode steps one page of a row is another row's."""

    def seen(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is ForwardMode.DECODE:
            others = batch.req_to_token.roll(1, 0)
            batch.req_to_token = torch.cat([batch.req_to_token[:, :2], others[:, 2:4], batch.req_to_token[:, 4:]], 1)
        return batch


class OtherRow(Stored):
    """Behind a prefix another row's pages are read."""

    def seen(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.prefix_lens_host.any():
            batch.req_to_token = batch.req_to_token.roll(1, 0)
        return batch


class RoundsDown(Stored):
    """One code of one head is its smaller neighbour."""

    def behind(self, pool: KVPool, layer: int, slots: torch.Tensor) -> None:
        pool.v(layer)[slots[0], 0, 0] -= 1


class OtherScale(Stored):
    """The first key has twice its scale."""

    def behind(self, pool: KVPool, layer: int, slots: torch.Tensor) -> None:
        scales = pool.k_scales(layer)
        assert scales is not None
        scales[slots[0], 0] += 1


class OneSlotMore(Stored):
    """A slot is written that belongs to no token of this step."""

    def behind(self, pool: KVPool, layer: int, slots: torch.Tensor) -> None:
        free = next(slot for slot in range(pool.num_slots - 1, 0, -1) if slot not in slots.tolist())
        pool.k(layer)[free] += 1


class NeighboursScale(Stored):
    """Values are read by the scales of the slots before them; what is stored is right."""

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        found = super().forward(layer_id, q, k, v, **rest)
        scales = self.batch.kv_pool.v_scales(layer_id)
        if scales is None:
            return found
        kept = scales.clone()
        scales.copy_(scales.roll(1, 0))
        found = self._plain.forward(layer_id, q, k, v, **{**rest, "stored": True})
        scales.copy_(kept)
        return found


class NoWindow(Stored):
    """Reads what is out of sight."""

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        return super().forward(layer_id, q, k, v, **{**rest, "sliding_window": None})


class Broken(Stored):
    def plan(self, batch: ForwardBatch) -> None:
        raise ValueError("out of resource: shared memory\nRequired: 300000")


STORES, READS = (f"{what} in layer 0 of .* than fp8_e4m3 says" for what in ("stores other .*", "reads other numbers"))
FAULTS: dict[type[Stored], str] = {
    OtherPage: READS,
    OtherRow: READS,
    NeighboursScale: READS,
    RoundsDown: STORES,
    OtherScale: STORES,
    OneSlotMore: STORES,
    Broken: "cannot compute .* over fp8_e4m3: out of resource: shared memory",
}


def loaded(kind: str, directory: Path, dtype: str = "bfloat16", device: str = "cpu", **changes: Any) -> Any:
    path = make_checkpoint(kind, directory, seed=0, **changes)
    return load_model(ModelConfig(str(path), dtype=dtype, native="off"), torch.device(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_as_they_are_defined_are_proved(kind: str, dtype: str, tmp_path: Path) -> None:
    model = loaded(kind, tmp_path, dtype)
    for attention in (TorchNativeAttention(), Stored()):
        prove_codes(model, attention, FP8_E4M3)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_page_code_or_scale_ends_the_start(fault: type[Stored], tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"^attention by {fault.__name__} {FAULTS[fault]}.*auto serves") as caught:
        prove_codes(model, fault(), FP8_E4M3)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    prove_codes(model, fault(), PLAIN)


def test_a_window_that_is_not_heeded_ends_the_start(tmp_path: Path) -> None:
    model = loaded("mistral", tmp_path, sliding_window=4)
    prove_codes(model, Stored(), FP8_E4M3)
    with pytest.raises(ConfigError, match=READS):
        prove_codes(model, NoWindow(), FP8_E4M3)


@needs_triton
def test_a_decoder_that_writes_by_itself_is_proved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.models.fused.decoder import FusedDecoder

    plain_kernels.put_in_place(monkeypatch)
    model = loaded("llama", tmp_path)
    decoder = FusedDecoder(model.module, model.spec)
    decoder.reference = model.reference
    prove_codes(decoder, TorchNativeAttention(), FP8_E4M3)
    enter = plain_kernels.enter_heads

    def spoiled(*given: Any) -> None:
        enter(*given)
        *_, v_scales = given
        v_scales[given[4][-1]] = v_scales[given[4][-1]].roll(1) + 1

    monkeypatch.setattr("core.models.fused.layer.enter_heads", spoiled)
    with pytest.raises(ConfigError, match="stores other scales of values"):
        prove_codes(decoder, TorchNativeAttention(), FP8_E4M3)


def test_an_engine_starts_over_codes_with_attention_that_is_right_only(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof over numbers, which has no codes to find wrong, lets these backends pass."""
    directory = str(checkpoint_of("llama"))
    chosen = ModelConfig(directory, native="off", kv_cache_dtype="fp8_e4m3")
    config = EngineConfig(model=chosen, executor=ExecutorConfig(device="cpu"))
    model, tokenizer = load_model(chosen, CPU), Tokenizer.load(directory)
    for backend in (Stored, NeighboursScale):
        monkeypatch.setattr(build, "build_attention", lambda *_, backend=backend: backend())
        prove_attention(model, backend())
        if backend is Stored:
            build.assemble(config, model, tokenizer, DeviceStreams(CPU))
        else:
            with pytest.raises(ConfigError, match=READS):
                build.assemble(config, model, tokenizer, DeviceStreams(CPU))


@interpreted
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_interpreted_kernels_over_codes_are_proved(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own as they are, with scales of another slot in decode steps, and with a store that loses a bit."""
    from core.attention.triton import backend

    quick_calls(monkeypatch)
    model, device = loaded(kind, tmp_path, device=DEVICE), torch.device(DEVICE)
    prove_codes(model, build_attention("triton", device), FP8_E4M3)
    decode, store = backend.paged_decode, backend.store_kv
    with monkeypatch.context() as patch:
        patch.setattr(backend, "paged_decode", lambda *given: decode(*given[:-1], given[-1].roll(1, 0)))
        with pytest.raises(ConfigError, match="TritonAttention reads other numbers"):
            prove_codes(model, build_attention("triton", device), FP8_E4M3)

    def spoiled(keys: torch.Tensor, *rest: Any) -> None:
        store(keys, *rest)
        keys[rest[3][0], 0, 0] ^= 1

    monkeypatch.setattr(backend, "store_kv", spoiled)
    with pytest.raises(ConfigError, match="TritonAttention stores other codes of keys"):
        prove_codes(model, build_attention("triton", device), FP8_E4M3)


@interpreted
@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text"])
def test_interpreted_decoders_over_codes_are_proved(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused decoder's kernels leave the bytes of the format, turned in part or normed, and Triton's read them."""
    from core.models.fused import layer
    from core.models.fused.decoder import FusedDecoder

    quick_calls(monkeypatch)
    given = CASES[kind] | ({"sliding_window": 4} if kind == "gemma3_text" else {})
    model, device = loaded(kind, tmp_path, device=DEVICE, **given), torch.device(DEVICE)
    decoder = FusedDecoder(model.module, model.spec)
    decoder.reference = model.reference
    written: list[int] = []
    enter = layer.enter_heads
    monkeypatch.setattr(layer, "enter_heads", lambda *told: (enter(*told), written.append(len(told[0]))))
    prove_codes(decoder, build_attention("triton", device), FP8_E4M3)
    assert len(written) == 3 * len(model.spec.kv_layers), "in each step each layer wrote by its own kernel"
