"""Proves at load that a model computes the same packed over paged KV as it does plain, one sequence at a time.

Two short sequences go through the four kinds of step: prefill together, a chunk on top of a prefix beside a decode row,
then decode in another order. A model that keeps something else per sequence, or has attention of its own, gives other
logits here, not in front of a user. Eight tokens cannot show a window of 4096: `core.models.hf.probe` proves those.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from core.attention.base import AttentionBackend
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.device.staging import Staging
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_pool import KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.recurrent.state_slots import StateWrites
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import Model, ModelSpec

PAGE_SIZE = 2
TABLE = ((0,) * 8, (6, 7, 12, 13, 2, 3, 10, 11), (14, 15, 4, 5, 8, 9, 0, 0))
"""Slots of row 0 (padding), of a row of eight tokens and of one of five, their pages shuffled."""
NUM_PAGES = 7
LENGTHS = (8, 5)

STEPS = (
    (((1, 0, 5), (2, 0, 3)), 2),
    (((1, 5, 2), (2, 3, 1)), 1),
    (((2, 4, 1), (1, 7, 1)), 0),
)
"""Per step the (row, prefix, tokens) of its parts, and how many of them are prefill segments."""

FRESH = StateWrites(np.array([1, 2]), np.array([2, 1]), np.array([0, 0]))
"""Both rows get a recurrent state slot, crosswise."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 5e-2
"""Errors are relative to the largest logit. In 16 bits two orders of summing differ by a percent or so, except where
rounding sends a token to another expert; then the error must stay well below what losing the context would do."""
CODED_TOLERANCE = 5e-3
"""Of float32 over codes. Measured at most 1e-6; a code that falls to the other side of a half is 1e-4 to 1e-3 of a
logit, and another row's page one or more."""
CONTEXT_SHARE = 0.25
"""How much of the effect of its whole context a token's error may reach, in 16 bits only."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`error` is the worst found, relative to the largest logit; `tolerance` what rounding explains."""

    passed: bool
    error: float
    tolerance: float

    @property
    def told(self) -> str:
        """What is wrong, as the end of a sentence."""
        if not math.isfinite(self.error):
            return "its logits are not finite, as where weights are not"
        return (
            f"packed and plain logits differ by {self.error:.2g} of the largest logit (at most {self.tolerance:g} is "
            "rounding)"
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """Two fixed sequences and what the model makes of them plain: `expected` with context, `alone` without any."""

    ids: tuple[torch.Tensor, ...]
    """int64[n] each."""
    expected: tuple[torch.Tensor, ...]
    """float32[n, vocab] each."""
    alone: tuple[torch.Tensor, ...]
    """float32[n, vocab] each, every token at its position as if it were the first."""
    rounds_activations: bool = False
    """Whether the last bit of a float decides about a step of eight bits; errors are then those of 16 bits."""

    calls_base: bool = True
    """Whether the logits are made from what the base model's own `forward` returns, which hooks can then see."""

    coded: bool = False
    """Whether keys were read from codes: the last bit of a float may decide about a step of one."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.expected[0].shape[1])


def plain_reference(model: PreTrainedModel, vocab_size: int, rounds_activations: bool = False) -> Reference:
    """Run `model` by its own forward, without any cache, over ids from all over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    device = model.device
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ids = tuple(torch.randint(vocab_size, (length,), generator=generator).to(device) for length in LENGTHS)

    def logits(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = {"position_ids": positions} if takes_positions else {}
        found: torch.Tensor = model(input_ids=tokens, use_cache=False, **places).logits.float()
        return found

    with torch.inference_mode(), _counting_calls(model) as calls:
        places = [torch.arange(len(row), device=device) for row in ids]
        expected = tuple(logits(row[None], place[None])[0] for row, place in zip(ids, places, strict=True))
        alone = tuple(logits(row[:, None], place[:, None])[:, 0] for row, place in zip(ids, places, strict=True))
    return Reference(ids, expected, alone, rounds_activations, calls_base=bool(calls))


@contextmanager
def _counting_calls(model: PreTrainedModel) -> Iterator[list[None]]:
    """A list that grows with every call of the base of `model`; OPT's, for one, is passed by."""
    calls: list[None] = []
    base: torch.nn.Module = getattr(model, "base_model", model)
    handle = base.register_forward_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


def coded_reference(model: Model, reference: Reference, format: KVFormat) -> Reference:
    """What `model` makes of the sequences of `reference` over a pool of codes, through PyTorch's attention.

    Codes cost more of a logit than a proof lets pass, so what reads them in other ways is compared with this. Leaves
    the pool bound.
    """
    rows: list[list[torch.Tensor]] = [[] for _ in reference.ids]
    pool = small_pool(model.spec, reference.ids[0].device, format)
    for parts, logits in islice(packed_steps(model, reference.ids, pool, TorchNativeAttention()), len(STEPS)):
        for (row, _, count), found in zip(parts, logits.split([each[2] for each in parts]), strict=True):
            assert len(found) == count, (row, count)
            rows[row - 1].append(found.clone())
    return replace(reference, expected=tuple(torch.cat(each) for each in rows), coded=True)


def run_self_check(
    model: Model, reference: Reference, attention: AttentionBackend | None = None, format: KVFormat = PLAIN
) -> CheckResult:
    """Run `model` over a small pool of its own and compare with `reference`. Leaves that pool bound.

    `attention`: what it attends through, if that is not to be PyTorch's. `format`: of the pool.
    """
    spec = model.spec
    half = reference.rounds_activations or spec.dtype.itemsize < 4
    tolerance = HALF_TOLERANCE if half else TOLERANCE[spec.dtype]
    if reference.coded and not half:
        tolerance = CODED_TOLERANCE
    scale = torch.stack([logits.abs().max() for logits in reference.expected]).max()
    passed, worst = True, 0.0
    pool = small_pool(spec, reference.ids[0].device, format)
    for parts, got in packed_steps(model, reference.ids, pool, attention or TorchNativeAttention()):
        want, alone = (
            torch.cat([source[row - 1][prefix : prefix + count] for row, prefix, count in parts])
            for source in (reference.expected, reference.alone)
        )
        errors = _relative(got - want, scale)
        good = errors <= tolerance
        if half:
            good |= errors <= CONTEXT_SHARE * _relative(want - alone, scale)
        # A wrong page or mask spoils most tokens of a step; in 16 bits a single one may be bad luck.
        passed = passed and (bool(good.float().mean() >= 0.5) if half else bool(good.all()))
        worst = max(worst, float(errors.nan_to_num(nan=torch.inf).max()))
    return CheckResult(passed, worst, tolerance)


def small_pool(spec: ModelSpec, device: torch.device, format: KVFormat = PLAIN) -> KVPool:
    """Room for the rows of `packed_steps`."""
    return KVPool(spec.kv_layers, NUM_PAGES, PAGE_SIZE, spec.dtype, device, format=format)


def packed_steps(
    model: Model, ids: Sequence[torch.Tensor], pool: KVPool, attention: AttentionBackend
) -> Iterator[tuple[Sequence[tuple[int, int, int]], torch.Tensor]]:
    """The parts of each step of the two sequences `ids`, int64[n], over `pool`, and the logits of all its tokens.

    Leaves the pool bound.
    """
    states = _states(model.spec, pool.device)
    model.bind(pool, attention, {} if states is None else {STATES: states})
    # The second round finds what the first left in the slots: a row that changes owners must start from nothing.
    for step, (parts, num_extend) in enumerate(STEPS if states is None else STEPS * 2):
        batch = _batch(parts, num_extend, ids, pool)
        if states is not None:
            states.begin(batch.rows, FRESH if step % len(STEPS) == 0 else None, Staging(pool.device))
        yield parts, model.forward(batch)


def _states(spec: ModelSpec, device: torch.device) -> HybridReqToTokenPool | None:
    """A state pool of two slots for a recurrent model."""
    if not spec.state_layers:
        return None
    return HybridReqToTokenPool(ReqToTokenPool(2, len(TABLE[0]), device), MambaPool(spec.state_layers, 2, device))


def _relative(differences: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The largest absolute entry per token, relative to the largest logit."""
    return differences.abs().amax(dim=-1) / scale


def _batch(
    parts: Sequence[tuple[int, int, int]], num_extend: int, ids: Sequence[torch.Tensor], pool: KVPool
) -> ForwardBatch:
    """One step that wants the logits of all its tokens."""
    device = pool.device
    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    prefix = np.array([p[1] for p in parts], np.int64)
    extend = np.array([p[2] for p in parts], np.int64)
    return ForwardBatch(
        mode=ForwardMode.of(num_extend, len(parts) - num_extend),
        input_ids=torch.cat([ids[row - 1][start : start + count] for row, start, count in parts]),
        positions=torch.cat([torch.arange(start, start + count, device=device) for _, start, count in parts]),
        rows=torch.tensor([p[0] for p in parts], device=device),
        seq_lens=torch.from_numpy(prefix + extend).to(device),
        out_cache_loc=torch.cat([table[row, start : start + count] for row, start, count in parts]).to(torch.int64),
        last_indices=torch.arange(int(extend.sum()), device=device),
        req_to_token=table,
        kv_pool=pool,
        num_extend=num_extend,
        prefix_lens_host=prefix,
        extend_lens_host=extend,
    )
