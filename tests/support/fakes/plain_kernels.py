"""The kernels of a fused decoder written out in PyTorch: what each gives, and a decoder without Triton's interpreter.

They take what the operators take, and round where these say that they round.
"""

from __future__ import annotations

import pytest
import torch

from core.memory.kv_e4m3 import encode
from core.models.native.reading import ACTIVATIONS


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, kind: int) -> torch.Tensor:
    """Float32: the norm of the last dimensions of x, as many as `weight` has elements for, or of the last one."""
    wide = x.float()
    if kind & 2:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    found = scaled.to(weight.dtype).float() * weight.float()
    return found + bias.float() if kind & 4 else found


def add_norm(
    x: torch.Tensor,
    added: list[torch.Tensor],
    out: torch.Tensor | None,
    read: torch.Tensor | None,
    other: torch.Tensor | None,
    weights: list[torch.Tensor],
    eps: list[float],
    kinds: list[int],
    factor: float,
) -> None:
    """See `core.models.fused.residual.add_norm`."""
    states = x
    if added:
        assert out is not None and len(added) <= 2
        parts = [normed(added[0], *weights[:2], eps[0], kinds[0]).to(x.dtype)] if kinds[0] else [added[0]]
        parts = [part * factor for part in [*parts, *added[1:]]]
        states = x + (parts[0] if len(parts) == 1 else parts[0] + parts[1])
        out.copy_(states)
    for place, target in ((1, read), (2, other)):
        assert (target is not None) == bool(kinds[place]), "norms have a place to write to"
        if target is not None:
            pair = weights[2 * place : 2 * place + 2]
            target.copy_(normed(states, pair[0], pair[1], eps[place], kinds[place]))


def enter_heads(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    temperature: torch.Tensor | None,
    norms: list[torch.Tensor],
    eps: list[float],
    layout: list[int],
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """See `core.models.fused.heads.enter_heads`."""
    from core.models.fused.heads import HeadLayout

    it = HeadLayout(*layout)
    q, k, v = (each.transpose(0, 1) for each in it.split(qkv))
    kinds, steps = (it.q_kind, it.k_kind), (it.q_step, it.k_step)
    for place, (heads, kind, step) in enumerate(zip((q, k), kinds, steps, strict=True)):
        weight, bias = (each.view(-1, it.dim) if step else each for each in norms[2 * place : 2 * place + 2])
        found = heads
        if it.turns_first:
            found = turned(found, cos, sin, positions, it.half, bool(it.neighbours))
        if kind:
            given = found.flatten(1) if it.whole else found
            flat = (weight.reshape(-1), bias.reshape(-1)) if it.whole else (weight, bias)
            found = normed(given, *flat, eps[place], kind).to(qkv.dtype).view(heads.shape)
        if not it.turns_first:
            found = turned(found, cos, sin, positions, it.half, bool(it.neighbours))
        if temperature is not None and place == 0:
            found = (found.float() * last_line(temperature, positions)[:, None, None]).to(qkv.dtype)
        heads.copy_(found)
    for pool, scales, numbers in ((keys, k_scales, k), (values, v_scales, v)):
        if scales is None:
            pool.index_copy_(0, slots, numbers)
        else:
            codes, exponents = encode(numbers)
            pool.index_copy_(0, slots, codes)
            scales.index_copy_(0, slots, exponents)


def last_line(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Lines of `table` at `positions`, its last one beyond its end."""
    return table.index_select(0, positions.clamp(0, len(table) - 1))


def turned(
    heads: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    half: int,
    neighbours: bool,
) -> torch.Tensor:
    """[T, H, D]: the first 2 * half elements of each head turned; products rounded to the type of the tables."""
    if cos is None or sin is None:
        return heads
    c, s = (last_line(table, positions)[:, None] for table in (cos, sin))
    first, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    low, high = (first[..., ::2], first[..., 1::2]) if neighbours else (first[..., :half], first[..., half:])

    def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() * b.float()).to(c.dtype).float()

    pair = (times(low, c) - times(high, s), times(high, c) + times(low, s))
    both = torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)
    return torch.cat([both.to(heads.dtype), rest], -1)


def activate(into: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """See `core.models.fused.gate.activate`."""
    width = out.shape[1]
    opened = ACTIVATIONS[activation](into[:, :width])
    out.copy_(opened * into[:, width:] if into.shape[1] == 2 * width else opened)


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """Let fused decoders of this process compute by what is written here."""
    patch.setattr("core.models.fused.residual.add_norm", add_norm)
    patch.setattr("core.models.fused.layer.enter_heads", enter_heads)
    patch.setattr("core.models.fused.layer.activate", activate)
