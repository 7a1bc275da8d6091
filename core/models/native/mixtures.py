"""How a mixture chooses its experts and what stands between their products: found by trying the modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from core.models.native.parts import Clamp, Matrix, Norm, Router
from core.models.native.reading import ALIKE, NotDense, activation_name, plain_norm, read_norm

TOKENS = 128
"""Tried with a router."""

ROUTER_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the greatest weight."""

FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""What routers call the number that all weights are multiplied by."""

DIFFERENT_CHOICES = 0.05
"""Share of the tokens tried that may go elsewhere: where two experts are equally good, the order of a sort decides."""


@dataclass(frozen=True, slots=True)
class RouterProduct:
    """What a router multiplies states with: `weight` [E, C] of any type that `torch.nn.functional.linear` takes."""

    weight: Any
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """How many experts there are."""
        return int(self.weight.shape[0])


def router_product(router: Any, hidden: int) -> RouterProduct:
    """The product of a module that has one parameter of `hidden` columns. Raises NotDense."""
    found = [each for each in router.parameters() if each.dim() == 2 and each.shape[1] == hidden]
    if len(found) != 1:
        raise NotDense(f"its {type(router).__name__} is not one product")
    return RouterProduct(found[0].detach(), getattr(router, "bias", None))


@torch.inference_mode()
def router_norm(router: Any) -> Norm | None:
    """What `router` norms states by, times the scale that follows (Gemma 4); None if it has no norm."""
    if not hasattr(router, "norm"):
        return None
    hidden = next(each.shape[1] for each in router.parameters() if each.dim() == 2)
    norm = read_norm(router.norm, hidden)
    scale = router.scale.detach().float() * float(router.scalar_root_size)
    return norm._replace(weight=norm.weight * scale)


@torch.inference_mode()
def read_router(router: Any, matrix: Matrix, dtype: torch.dtype, correction: torch.Tensor | None) -> Router:
    """What `router` computes with `matrix`; `correction` is that of the module around it. Raises NotDense."""
    hidden = matrix.weight.shape[1]
    given = router_product(router, hidden)
    spread = float(given.weight.float().std()) * hidden**0.5
    x = (torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(0)) * (2.0 / (spread or 1.0))).to(dtype)
    own = router_norm(router)
    read = x if own is None else plain_norm(own, x).to(dtype)
    takes = len(inspect.signature(router.forward).parameters)
    logits, weights = _dense(_asked(router, x, *((correction,) if takes > 1 else ())))
    rounded = functional.linear(read.to(given.weight.dtype), given.weight, given.bias)
    # A router that norms says probabilities, not logits.
    alike = own is not None or torch.equal(logits.to(rounded.dtype), rounded)
    rounds = rounded.dtype != torch.float32 and alike
    wide = functional.linear(read.float(), given.weight.float(), None if given.bias is None else given.bias.float())
    for candidate in _candidates(router, matrix, correction, rounds):
        off = (plain_weights(candidate, rounded.float() if rounds else wide) - weights).abs().amax(-1)
        good = off <= ROUTER_TOLERANCE[dtype] * float(weights.abs().max())
        if float(good.float().mean()) >= 1.0 - DIFFERENT_CHOICES:
            return candidate
    raise NotDense(f"its {type(router).__name__} chooses experts in another way")


def _asked(router: Any, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """What `router` says of x [n, C]; some take sequences, [1, n, C]. Raises NotDense if it chooses nothing."""
    try:
        found: tuple[torch.Tensor, ...] = router(x, *others)
    except ValueError:
        found = router(x[None], *others)
    if not isinstance(found, tuple):
        raise NotDense(f"its {type(router).__name__} leaves the choice of experts to what is around it")
    return found


def _dense(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and float32[n, E] weights, from a router that gives logits, weights and experts, or weights and logits.

    Up to transformers 5.22 some give the experts first.
    """
    if len(found) == 2:
        return found[1], found[0].float()
    logits, weights, experts = found if found[0].is_floating_point() else found[::-1]
    return logits, torch.zeros(logits.shape).scatter_(1, experts, weights.float())


def _candidates(router: Any, matrix: Matrix, correction: torch.Tensor | None, rounds: bool) -> Iterator[Router]:
    own = [each for name, each in _tensors(router) if name.endswith("e_score_correction_bias")]
    added = own[0] if own else correction
    given = int(getattr(router, "num_group", None) or 1)
    factor = next((float(getattr(router, name)) for name in FACTORS if hasattr(router, name)), 1.0)
    jitter = float(getattr(router, "router_jitter_noise", 0.0) or 0.0)
    scales = getattr(router, "per_expert_scale", None)
    scorings = ("softmax", "sigmoid", "chosen", "sparsemixer")
    # Groups that are given need not be looked at (DeepSeek-V2-Lite).
    counts = sorted({given, 1}, reverse=True)
    for groups, scoring, renormalises, best in product(counts, scorings, (True, False), (2, 1)):
        if scoring == "sparsemixer" and renormalises:
            continue
        yield Router(
            matrix=matrix,
            correction=None if added is None else added.detach().float().reshape(-1),
            scoring=scoring,
            top_k=int(router.top_k if hasattr(router, "top_k") else router.config.top_k_experts),
            groups=groups,
            kept_groups=int(getattr(router, "topk_group", None) or 1) if groups > 1 else 1,
            best_of_group=best,
            renormalises=renormalises,
            factor=factor,
            jitter=jitter,
            rounds=rounds,
            scales=None if scales is None else scales.detach().float(),
        )


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def plain_weights(router: Router, logits: torch.Tensor) -> torch.Tensor:
    """float32[n, E]: the weight of every expert for every token, from float32 logits; 0 where it is not chosen."""
    if router.scoring == "sparsemixer":
        return _mixed(router, logits)
    scores = SCORES[router.scoring](logits)
    wanted = scores if router.correction is None else scores + router.correction
    if router.groups > 1:
        grouped = wanted.view(len(wanted), router.groups, -1)
        best = grouped.topk(min(router.best_of_group, grouped.shape[2])).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(router.kept_groups).indices, 1.0).bool()
        wanted = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = wanted.topk(router.top_k).indices
    weights = scores.gather(1, chosen)
    if router.scoring == "chosen":
        weights = weights.softmax(-1)
    if router.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    scales = 1.0 if router.scales is None else router.scales[chosen]
    return torch.zeros_like(logits).scatter_(1, chosen, weights * router.factor * scales)


SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "chosen": lambda logits: logits,
}
"""What is chosen by, from logits."""


def _mixed(router: Router, logits: torch.Tensor) -> torch.Tensor:
    left, found = logits.clone(), torch.zeros_like(logits)
    for _ in range(router.top_k):
        top, best = left.max(-1, keepdim=True)
        far = (top - logits) / logits.abs().maximum(top) > 2 * router.jitter
        shares = left.masked_fill(far, -torch.inf).softmax(-1)
        found.scatter_(1, best, shares.gather(1, best) * router.factor)
        left.scatter_(1, best, -torch.inf)
    return found


@dataclass(frozen=True, slots=True)
class Gating:
    """What experts do with the outputs of their first product: `parted` ones have gates first, else every other one."""

    activation: str
    clamp: Clamp | None
    parted: bool


@torch.inference_mode()
def read_gating(experts: Any) -> Gating:
    """What stands between the products of `experts`. Raises NotDense."""
    if not getattr(experts, "has_gate", True) or not hasattr(experts, "_apply_gate"):
        return Gating(activation_name(experts.act_fn), None, True)
    both = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 6
    got = experts._apply_gate(both)
    for parted, (gate, up) in ((True, both.chunk(2, -1)), (False, (both[:, ::2], both[:, 1::2]))):
        if hasattr(experts, "act_fn") and torch.allclose(got, experts.act_fn(gate) * up, atol=ALIKE):
            return Gating(activation_name(experts.act_fn), None, parted)
        if hasattr(experts, "alpha") and hasattr(experts, "limit"):
            clamp = Clamp(float(experts.alpha), float(experts.limit), 1.0)
            if torch.allclose(got, clamped(clamp, gate, up), atol=ALIKE):
                return Gating("silu", clamp, parted)
    raise NotDense(f"its {type(experts).__name__} have a gate of another kind")


def clamped(clamp: Clamp, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What `Clamp` says of `gate` and `up`, which are alike in shape."""
    gate = gate.clamp(max=clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up.clamp(-clamp.limit, clamp.limit) + clamp.offset)


def stacked(experts: Any, name: str, parted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[E, N, K] and [E, N] or None: a matrix of all `experts` and its bias, gates before what they multiply."""
    weight, bias = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
    # Only Llama 4 has experts without this attribute, and those are transposed.
    if getattr(experts, "is_transposed", True):
        weight = weight.transpose(1, 2)
    bias = None if bias is None else bias.detach()
    if not parted:
        weight = torch.cat((weight[:, ::2], weight[:, 1::2]), 1)
        bias = None if bias is None else torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
    return weight.contiguous(), bias
