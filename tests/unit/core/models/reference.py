"""The plain way to get logits from a checkpoint: transformers alone, eager attention, one sequence, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from core.attention.registry import build_attention
from core.config import ModelConfig
from core.device.staging import Staging
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import Model
from core.models.loader import load_model
from tests.support.checkpoints import auto_of
from tests.support.fakes.paged_steps import PagedRows, Part

CPU = torch.device("cpu")


class PlainModel:
    """Answers what the packed model must answer."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.module: Any = (
            auto_of(AutoConfig.from_pretrained(directory))
            .from_pretrained(directory, dtype=dtype, attn_implementation="eager", local_files_only=True)
            .eval()
        )

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32[n, vocab] of one sequence of n tokens."""
        with torch.inference_mode():
            found: torch.Tensor = self.module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return found


class PackedRun:
    """A loaded model over pools of its own, fed with known token sequences, one per row.

    Slots of states are given out from the last one on.
    """

    def __init__(
        self,
        model: Model,
        sequences: dict[int, list[int]],
        *,
        page_size: int = 4,
        seed: int = 0,
        max_len: int = 64,
        format: KVFormat = PLAIN,
    ) -> None:
        self.model = model
        self.states: HybridReqToTokenPool | None = None
        self.sequences = {0: [0], **sequences}
        self.paged = PagedRows(
            model.spec.kv_layers,
            len(sequences),
            max_len,
            page_size=page_size,
            dtype=model.spec.dtype,
            seed=seed,
            format=format,
        )
        self.rebind()

    def rebind(self) -> None:
        """Bind the model to this run's pools, with a backend of its own."""
        layers, rows = self.model.spec.state_layers, len(self.sequences) - 1
        if layers:
            self.states = HybridReqToTokenPool(ReqToTokenPool(rows, 8, CPU), MambaPool(layers, rows, CPU))
        companions = {} if self.states is None else {STATES: self.states}
        self.model.bind(self.paged.pool, build_attention("auto", CPU), companions)

    def step(self, parts: Sequence[Part], num_extend: int, sample: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of the last token of each sampled part."""
        ids = [token for p in parts for token in self.sequences[p.row][p.prefix : p.prefix + p.extend]]
        self.enter(parts)
        return self.model.forward(self.paged.batch(parts, num_extend, ids, sample))

    def enter(self, parts: Sequence[Part]) -> None:
        """Give rows that begin a slot for their states."""
        if self.states is not None:
            fresh = np.array([part.row for part in parts if part.prefix == 0], np.int64)
            writes = StateWrites(fresh, len(self.sequences) - fresh, np.zeros(len(fresh), np.int64))
            self.states.begin(torch.tensor([part.row for part in parts]), writes, Staging(CPU))


def load(directory: Path, dtype: str = "float32") -> Model:
    """The packed model of `directory` on the CPU, as transformers computes it."""
    return load_model(ModelConfig(str(directory), dtype=dtype, native="off"), CPU)
