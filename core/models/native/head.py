"""A draft head computed in one call of compiled code: `decoder.cpp` with one layer, which is fed with features."""

from __future__ import annotations

from typing import Any

import torch

from core.memory.kv_pool import KVPool
from core.models.eagle.head import HeadStep
from core.models.eagle.weights import HeadWeights
from core.models.native.parts import Attention, HeadShape, Layer, Matrix, Mlp, Norm, Outside, Rotary

OWN_FEATURES = (1,)
"""What stands behind its only layer."""


class NativeHead:
    """A `core.models.eagle.head.Head`. `threads`: as for `NativeDecoder`."""

    def __init__(self, extension: Any, weights: HeadWeights, pool: KVPool, threads: int) -> None:
        self._keys, self._values = ([side(pool.layers[0].layer_id)] for side in (pool.k, pool.v))
        self._decoder = extension.Decoder(
            # What is guessed decides about no output, so it may be summed in any order.
            *(threads, False, weights.embedding),
            *(_norm(weights, weights.final_norm), Matrix(weights.lm_head, None, None), Outside(1.0, 1.0, 0.0)),
        )
        qkv, out, gate_up, down = (
            Matrix(each, None, None) for each in (weights.qkv, weights.out, weights.gate_up, weights.down)
        )
        rotary = Rotary(weights.cos, weights.sin, False)
        shape = HeadShape(weights.heads, weights.kv_heads, weights.head_dim)
        layer = Layer(
            before_mixers=_norm(weights, weights.feature_norm),
            after_mixers=None,
            before_mlp=_norm(weights, weights.mlp_norm),
            after_mlp=None,
            mixers=(Attention(shape, qkv, out, None, None, None, rotary, False, weights.scale, 0.0, 0, 0, None, None),),
            mlp=Mlp(gate_up, down, True, "silu"),
            parallel=False,
            multiplier=1.0,
        )
        self._decoder.add_layer(layer)
        self._decoder.fuse(_norm(weights, weights.embedding_norm), Matrix(weights.fc, None, None))

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        logits, features = self._decoder.forward(
            *(step.ids, step.positions, step.slots, step.rows),
            *(torch.from_numpy(step.prefixes), torch.from_numpy(step.extends)),
            *(
                step.wanted,
                step.table,
                self._keys,
                self._values,
                False,
                OWN_FEATURES,
                step.features,
                None,
                1,
                None,
                [],
                [],
                None,
            ),
        )
        return logits, features


def _norm(weights: HeadWeights, weight: torch.Tensor) -> Norm:
    return Norm(weight, None, weights.eps, False, weight.numel())
