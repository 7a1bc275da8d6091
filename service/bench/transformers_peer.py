"""`transformers` as a contender: `generate` on one left-padded batch, which is how it is mostly used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from service.bench.peer import Emit, PeerRequest

PADDING = 3
"""Any token id: masked places do not count."""


class _Watch(StoppingCriteria):
    """Called by `generate` after each step: emits the new token of each request that is not complete. Stops nothing."""

    def __init__(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        self._requests, self._emit, self._step = requests, emit, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        newest = input_ids[:, -1].tolist()
        for request, token in zip(self._requests, newest, strict=True):
            if self._step < request["max_new"]:
                self._emit(request["id"], token)
        self._step += 1
        return torch.zeros(len(newest), dtype=torch.bool)


class TransformersPeer:
    """The model of `model_dir` in `dtype` (a name of torch), quantised to int8 at load as this server does it.

    For int4 it has no product on a CPU without other packages, and runs the floats.
    """

    def __init__(self, model_dir: str, dtype: str, quantization: str = "none") -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
        if quantization == "int8":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(self._model, Int8WeightOnlyConfig())
        # As with `ignore_eos` here: an output ends by length alone.
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        """Generate for all of `requests` in one left-padded batch; calls `emit(id, token)` after each step.

        The batch runs until its longest output is complete.
        """
        length = max(len(request["prompt"]) for request in requests)
        ids = torch.full((len(requests), length), PADDING)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, length - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, length - len(request["prompt"]) :] = 1
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(request["max_new"] for request in requests),
            do_sample=False,
            pad_token_id=PADDING,
            stopping_criteria=[_Watch(requests, emit)],
        )

    def close(self) -> None:
        """No-op: nothing runs between calls."""
