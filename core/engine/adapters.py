"""The adapters that an engine serves: loaded once at start, and known to requests by name.

Slot i + 1 holds the i-th configured adapter for as long as the engine lives, so a row's slot is a fact of its request
and needs no lifetime of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from core.config import LoraConfig
from core.device.staging import Staging
from core.errors import InvalidRequest, ModelLoadError
from core.memory.companion import DeviceCompanion
from core.models.base import Model
from core.models.lora.checkpoint import AdapterLimits, read_adapter
from core.models.lora.slots import LORA, NONE_SLOT, AdapterSlots, LoraWrites, SlotWrite
from core.models.transformers_backend import TransformersModel


class AdapterNames:
    """Names of the loaded adapters, as requests give them; the empty name is no adapter."""

    def __init__(self, names: Iterable[str]) -> None:
        self._slots = {"": NONE_SLOT, **{name: slot for slot, name in enumerate(names, start=1)}}

    def slot(self, name: str) -> int:
        """Slot of `name`. Raises InvalidRequest naming `adapter` when no such adapter is loaded."""
        if name not in self._slots:
            raise InvalidRequest.of("adapter", "no adapter of this name is loaded")
        return self._slots[name]

    def salt(self, name: str, salt: str) -> str:
        """The prefix-cache salt of a tenant's requests for `name`: KV of one adapter is wrong for every other.

        Names hold no NUL, so the first one ends the name, whatever the client's salt holds.
        """
        return f"{name}\0{salt}" if len(self._slots) > 1 else salt


NO_ADAPTERS = AdapterNames(())


def load_adapters(config: LoraConfig, model: Model, device: torch.device) -> Mapping[str, DeviceCompanion]:
    """Read every adapter and put it in its slot; empty when none is configured.

    Called before the first step exists, so writing here is no second writer. Raises ModelLoadError naming the adapter.
    """
    if not config.adapters:
        return {}
    if model.spec.encoder is not None:
        raise ModelLoadError(f"adapters of encoder-decoders are not supported, and {model.spec.architecture} is one")
    if not isinstance(model, TransformersModel):
        raise ModelLoadError("adapters need a model that was loaded through transformers")
    dtype, limits = model.spec.dtype, AdapterLimits(max_rank=config.max_rank)
    slots = AdapterSlots(model.module, len(config.adapters), config.max_rank, dtype)
    for slot, (name, directory) in enumerate(config.adapters, start=1):
        try:
            adapter = read_adapter(Path(directory), model.module, dtype, limits)
        except ModelLoadError as error:
            raise ModelLoadError(f"adapter {name!r} from {directory}: {error.message}") from error
        writes = LoraWrites(slots=(SlotWrite(slot, adapter),))
        slots.begin(torch.empty(0, dtype=torch.int64, device=device), writes, Staging(device))
    return {LORA: slots}
