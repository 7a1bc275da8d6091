"""Builds table, loader and device side of an engine's adapters, and loads the adapters given at start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.config import LoraConfig
from core.device.staging import Staging
from core.engine.adapters.loader import AdapterLoader, Read
from core.engine.adapters.table import AdapterTable
from core.errors import InvalidRequest, ModelLoadError, SlipstreamError
from core.memory.companion import DeviceCompanion
from core.models.base import Model
from core.models.lora.checkpoint import AdapterLimits, read_adapter
from core.models.lora.packed import Adapter
from core.models.lora.recorded_hooks import Recordable
from core.models.lora.slots import LORA, AdapterSlots, LoraWrites, SlotWrite

if TYPE_CHECKING:
    from core.models.hf.backend import TransformersModel

FILE_SHARE = 2
"""A weights file may be this many times as large as all adapters on the device: float32 files for 16-bit models."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Loader, table and device side of the adapters. `companions` is empty when there can be no adapters."""

    loader: AdapterLoader
    companions: Mapping[str, DeviceCompanion] = field(default_factory=dict)

    @property
    def table(self) -> AdapterTable:
        """The loaded adapters, on the host."""
        return self.loader.table


def build_adapters(config: LoraConfig, model: Model, device: torch.device) -> Adapters:
    """Load every adapter given at start into its slot. They are pinned, because the operator named them.

    Called before the first step, so writing here is no second writer (law 2). Raises ModelLoadError when the model can
    have no adapters, and naming the adapter that cannot be loaded.
    """
    table = AdapterTable(config.max_bytes, enabled=config.enabled)
    if not config.enabled:
        return Adapters(AdapterLoader(table))
    # Imported here: it takes three seconds, which the load of a checkpoint has paid by now, and nothing else should.
    from core.models.hf.backend import TransformersModel

    if model.spec.whole_prompts:
        raise ModelLoadError(f"adapters of encoders are not supported, and {model.spec.architecture} is one")
    if model.spec.encoder is not None:
        raise ModelLoadError(f"adapters of encoder-decoders are not supported, and {model.spec.architecture} is one")
    if not isinstance(model, TransformersModel):
        raise ModelLoadError("adapters need a model that was loaded through transformers")
    staging, read = Staging(device), adapter_reader(config, model, device)
    for name, directory in config.adapters:
        try:
            table.load(name, read(Path(directory)), pinned=True)
        except SlipstreamError as error:
            told = error.violations[0].description if isinstance(error, InvalidRequest) else error.message
            raise ModelLoadError(f"adapter {name!r} from {directory}: {told}") from error
    writes = table.take_writes()
    slots = AdapterSlots(model.module, _recordable(config, model, writes))
    # As a step would begin, but without rows: the writes fill the slots.
    slots.begin(torch.empty(0, dtype=torch.int64, device=device), LoraWrites(slots=writes), staging)
    return Adapters(AdapterLoader(table, config.directory, read), {LORA: slots})


def _recordable(config: LoraConfig, model: TransformersModel, given: Sequence[SlotWrite]) -> Recordable:
    """Where adapters may come while serving, captured steps must be ready for any module."""
    named = frozenset(name for write in given if write.adapter is not None for name in write.adapter.places)
    return Recordable(model.spec.dtype, config.max_rank, None if config.directory is not None else named)


def reserved_bytes(config: LoraConfig, table: AdapterTable, device: torch.device) -> int:
    """Bytes of device memory to leave free for adapters to come; 0 on the CPU, where they take what the pools leave."""
    return config.max_bytes - table.used_bytes if config.directory is not None and device.type == "cuda" else 0


def adapter_reader(config: LoraConfig, model: Model, device: torch.device) -> Read:
    """How the directory of an adapter is read for `model`, which goes through the modules of transformers."""
    from core.models.hf.backend import TransformersModel

    assert isinstance(model, TransformersModel), "refused when the adapters were built"
    limits = AdapterLimits(config.max_rank, FILE_SHARE * config.max_bytes)
    pins = Staging(device).pins

    def read(directory: Path) -> Adapter:
        return read_adapter(directory, model.module, model.spec.dtype, limits, pin=pins)

    return read
