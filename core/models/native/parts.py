"""What a decoder is made of, as `parts.h` takes it: named tuples of the same order."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Groups(NamedTuple):
    """Of four-bit weights: `scale` and `zero` [N, groups] of `size` inputs each; no zero means 8 everywhere. `order`,
    int64[K], says which input comes where in the weight."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    size: int
    order: torch.Tensor | None


class Matrix(NamedTuple):
    """A weight [N, K], by which its outputs are scaled [N] if it is int8, and its bias [N]; the decoder packs it.

    With `groups` it is uint8[N, K / 2], the even one of two inputs in the low bits."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    groups: Groups | None = None


class Norm(NamedTuple):
    """Norms groups of `width` elements. The weight has 1 added where a family does that; `centred`: a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool
    width: int


class Rotary(NamedTuple):
    """`cos`, `sin`: float32[positions, R / 2], for the first R elements of a head. A pair is two neighbours, or two
    elements R / 2 apart."""

    cos: torch.Tensor
    sin: torch.Tensor
    neighbours: bool


class HeadShape(NamedTuple):
    """Heads of queries, heads of keys and of values, and elements of each."""

    heads: int
    kv_heads: int
    head_dim: int


class Attention(NamedTuple):
    """`qkv` has the rows of all queries, keys and values, and, if outputs are multiplied by gates, of these: one for
    each of their elements or for each head.

    Without rows of values, these are the keys as they are before their norm. Without rows of keys, those of another
    layer are read: `keys_of` is its place among all layers that have keys.

    `scale` multiplies scores; `cap`, unless 0, is what they stay below; `window`, unless 0, is how many keys a query
    sees, its own included; `chunk`, unless 0, the length of chunks beyond which it sees none; `sinks` [H] are scores of
    a key without a value; queries are multiplied by their position's `temperature`, float32[positions]."""

    shape: HeadShape
    qkv: Matrix
    out: Matrix
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    rotary: Rotary | None
    turns_first: bool
    """Whether queries and keys are turned before they are normed."""
    scale: float
    cap: float
    window: int
    chunk: int
    sinks: torch.Tensor | None
    temperature: torch.Tensor | None
    keys_of: int | None = None
    slopes: torch.Tensor | None = None
    """[H]: how much less a key scores for each token that it is farther behind its query (ALiBi, arXiv 2108.12409)."""
    softplus_gates: bool = False
    """Whether gates go through a softplus, not a sigmoid."""


class Latents(NamedTuple):
    """`into` has the rows of what queries are made of, of the latent, which has R elements, and of a key's turned part.

    `q_norm` and `queries` turn the first into queries of all heads, if it is not these. By head, `absorb` [H, R, nope]
    takes queries to latents and `expand` [H, V, R] takes latents to values.
    """

    into: Matrix
    q_norm: Norm | None
    queries: Matrix | None
    kv_norm: Norm
    absorb: torch.Tensor
    expand: torch.Tensor
    out: Matrix
    rotary: Rotary
    scale: float


class Conv(NamedTuple):
    """Of each channel by itself: `weight` [channels, taps], the newest input's last, `bias` [channels]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class ShortConv(NamedTuple):
    """`into` has the rows of the gate before it, of the gate behind it and of its inputs, one behind the other."""

    into: Matrix
    conv: Conv
    out: Matrix


class Mamba2(NamedTuple):
    """`into` has the rows of the gate, of inputs, keys and queries, which `conv` goes over, and of step sizes [H].

    By head: `decay`, the logarithm of what is left of a state after a step of 1; `skip`, of the input in the output;
    `step_bias`, what is added to step sizes. `groups` of heads have keys and queries in common.
    """

    into: Matrix
    conv: Conv
    out: Matrix
    decay: torch.Tensor
    skip: torch.Tensor
    step_bias: torch.Tensor
    norm: Norm | None
    gate_first: bool
    """Whether outputs are normed behind the gate. They are, too, where there is no norm."""
    groups: int
    shortest: float
    longest: float
    """What step sizes are kept within."""


class Mamba1(NamedTuple):
    """`into` has the rows of inputs, which `conv` goes over, and of the gate; `choices` those of R step sizes, N keys
    and N queries; `steps` widens the former to all channels, with a bias.
    """

    into: Matrix
    conv: Conv
    choices: Matrix
    steps: Matrix
    out: Matrix
    decay: torch.Tensor
    """[channels, N]: the logarithm of what is left of a state after a step of 1."""
    skip: torch.Tensor
    """[channels]: of the input in the output."""
    norms: list[Norm]
    """Of step sizes, keys and queries, or none."""


class DeltaNet(NamedTuple):
    """`into` has the rows of queries, keys and values, which `conv` goes over, of gates, and by head of strengths and
    step sizes. `decay` and `step_bias` as in Mamba2; `norm` is of a head. `key_heads`: of queries and keys.
    """

    into: Matrix
    conv: Conv
    out: Matrix
    decay: torch.Tensor
    step_bias: torch.Tensor
    norm: Norm
    key_heads: int


Mixer = Attention | Latents | ShortConv | Mamba2 | Mamba1 | DeltaNet


class Curve(NamedTuple):
    """xIELU (arXiv 2411.13010) of x: `above` x² + `linear` x above 0, else `below` (exp(x) - 1 - x) + `linear` x, where
    the exponent is at most `most`.
    """

    above: float
    below: float
    linear: float
    most: float


class Mlp(NamedTuple):
    """`into` has the rows of gate and up one behind the other if it is `gated`. `activation`: a name of ACTIVATIONS,
    unless it is a `curve`.
    """

    into: Matrix
    down: Matrix
    gated: bool
    activation: str
    curve: Curve | None = None


class Router(NamedTuple):
    """Which experts a token goes to, by a product with `matrix`, [E, C] of the model's type or float32.

    `correction` [E] is added to scores for the choice alone. `scoring`: "softmax", "sigmoid", "chosen" (a softmax over
    those that were chosen by their logits) or "sparsemixer" with its `jitter`. With more than one of `groups` a token's
    experts are of `kept_groups`, those with the greatest sums of their best `best_of_group` scores.
    """

    matrix: Matrix
    correction: torch.Tensor | None
    scoring: str
    top_k: int
    groups: int
    kept_groups: int
    best_of_group: int
    renormalises: bool
    factor: float
    jitter: float
    rounds: bool
    """Whether logits are rounded to the model's type."""
    scales: torch.Tensor | None = None
    """[E]: what weights are multiplied by at last, by expert."""


class Clamp(NamedTuple):
    """A gate is `g sigmoid(alpha g) (x + offset)`, with g below `limit` and x within it."""

    alpha: float
    limit: float
    offset: float


class Experts(NamedTuple):
    """`into` [E, 2 I, C] has rows of gate and up as `Mlp` has, or [E, I, C]; `down` is [E, C, I].

    `shared` sees all tokens and is added, multiplied by the sigmoid of a product with `shared_gate` [C], if given.
    """

    router: Router
    into: torch.Tensor
    into_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    gated: bool
    activation: str
    clamp: Clamp | None
    shared: Mlp | None
    shared_gate: torch.Tensor | None
    weighs_inputs: bool
    """Whether what experts read is multiplied by a token's weight, not what they give."""


class Beside(NamedTuple):
    """An MLP, and experts beside it that read the states by norms of their own. What each gives is normed."""

    mlp: Mlp
    experts: Experts
    behind_mlp: Norm
    before_router: Norm
    before_experts: Norm
    behind_experts: Norm


class LayerInput(NamedTuple):
    """What a layer does with its own input of a token, [P]: `gate` [P, C] of the states, through an activation, times
    that input, goes `out` [C, P] and through a norm, and is added to the states.
    """

    gate: Matrix
    out: Matrix
    behind: Norm
    activation: str


class LayerInputs(NamedTuple):
    """Inputs of all L layers: of a token's id, a row of `table` [V, L P] times `multiplier`; of its embedding, the
    product with `matrix` [L P, C] times `factor`, normed by layer. Their sum is multiplied by `both`.
    """

    table: torch.Tensor
    multiplier: float
    matrix: Matrix
    factor: float
    norm: Norm
    both: float


class Layer(NamedTuple):
    """Norms where there are any. Its mixers all read the same; in a `parallel` one the MLP does too, or its own norm of
    it.
    """

    before_mixers: Norm | None
    after_mixers: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    mixers: tuple[Mixer, ...]
    mlp: Mlp | Experts | Beside | None
    parallel: bool
    multiplier: float
    """Of what mixers and the MLP add to the states."""
    input: LayerInput | None = None
    scale: float = 1.0
    """Of the states, behind all of it."""


class Outside(NamedTuple):
    """What surrounds the layers: multipliers of embeddings and of logits, and what logits stay below unless it is 0.

    `places`, [positions, C] of the model's type, is added to embeddings once they are multiplied. `norm`: of these.
    """

    embedding_multiplier: float
    logit_multiplier: float
    logit_cap: float
    places: torch.Tensor | None = None
    inputs: LayerInputs | None = None
    norm: Norm | None = None


class StepImages(NamedTuple):
    """What a step has of images: `embeddings` [T, C] stand for those of ids, and `angles`, cosines and sines
    float32[T, R / 2], for those of positions. Tokens from one place to another of `both_ways`, ascending, see each
    other in both directions.
    """

    embeddings: torch.Tensor | None
    angles: tuple[torch.Tensor, torch.Tensor] | None
    both_ways: list[tuple[int, int]]
    in_windows: bool
    """Whether they do that in layers with windows alone."""
    deep: tuple[torch.Tensor, torch.Tensor] | None = None
    """Tokens int64[n], and what is added to their states behind each of the first layers, [layers, n, C]."""


class StepStates(NamedTuple):
    """What a step does to recurrent states: requests go on from `sources` [B], and behind the first `ends[i]` tokens of
    the step, ascending, a state is left in slot `slots[i]`. Every request leaves one behind its last token.
    """

    sources: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    convs: list[torch.Tensor]
    """By recurrent layer, [slots, channels, taps]."""
    recurrents: list[torch.Tensor | None]
    """By recurrent layer, float32[slots, ...], if it has more than a convolution."""
