"""What one step leaves on the device for the next: declared columns, one value per request row.

Columns are declared when the FutureMap is built, never guessed from the first payload that happens to arrive (which is
where SGLang's lazily initialised buffers went wrong). A speculative algorithm adds its columns here, by declaration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from core.invariants import check


@dataclass(frozen=True, slots=True)
class Column:
    """A row-indexed buffer of the FutureMap: [R, *tail]. `fill` is what an unwritten row holds."""

    name: str
    dtype: torch.dtype
    tail: tuple[int, ...] = ()
    fill: int | float = 0


OUTPUT_TOKENS = Column("output_tokens_buf", torch.int64, fill=-1)
"""The newest token of each row; -1 marks a row that was not written since it was last read."""

NEW_SEQ_LENS = Column("new_seq_lens_buf", torch.int64, fill=0)
"""Tokens of each row whose KV is in the pools after the last published step."""


@dataclass(frozen=True, slots=True)
class RelayPayload:
    """Values for n rows: `output_tokens` [n] or [n, 1], any integer dtype; `extras` [n, *tail] by column name."""

    output_tokens: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    def tokens_flat(self, rows: int) -> torch.Tensor:
        """int64[rows]; samplers differ in shape and dtype, the buffer does not (SGLang #25922)."""
        flat = self.output_tokens
        if flat.dim() != 1 or flat.dtype != torch.int64:
            flat = flat.view(-1).to(torch.int64)
        check("relay_payload_shape", flat.numel() == rows, tokens=flat.numel(), rows=rows)
        return flat
