"""What the sampler's quick paths do not do, counted: a busy machine changes nothing of it.

Drawing a number per logit and sorting whole rows is what the textbook does (softmax and multinomial, a sort for top-p);
beside that the sampler was two to three times as fast when both were timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.sampling.sampler import Sampler
from tests.unit.core.sampling.batches import CPU, Row, batch_of, places_of

ROWS, VOCAB = 32, 32_000
DRAWS = {"multinomial", "exponential_", "bernoulli_", "uniform_", "normal_", "rand", "randn"}
MAX_PASSES = 18
"""Over all logits, readings and writings together; 15 were counted."""


class _Touched(TorchDispatchMode):
    """Elements that operations read and write, by the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            name = func.__name__.partition(".")[0]
            tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
            self.by_name[name] = self.by_name.get(name, 0) + sum(each.numel() for each in tensors)
        return made


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (50, 0.9)], ids=["plain", "k", "k and p"])
def test_a_quick_path_neither_sorts_rows_nor_draws_per_logit(top_k: int, top_p: float) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = np.random.default_rng(0).random(ROWS)
    rows = [Row(logits[i], temperature=0.8, top_k=top_k, top_p=top_p, uniform=uniforms[i]) for i in range(ROWS)]
    batch, places = batch_of(rows), places_of(rows)
    sampler = Sampler(VOCAB, CPU)
    sampler.sample(logits.clone(), batch, places)
    with _Touched() as touched:
        sampler.sample(logits.clone(), batch, places)
    passes = sum(touched.by_name.values()) / (ROWS * VOCAB)
    print(f"{passes:.1f} passes over the logits: {touched.by_name}")
    assert not DRAWS & touched.by_name.keys()
    assert sum(touched.by_name.get(name, 0) for name in ("sort", "argsort")) < ROWS * VOCAB / 50
    assert touched.by_name.get("topk", 0) < ROWS * VOCAB / 5
    assert 3 < passes <= MAX_PASSES
