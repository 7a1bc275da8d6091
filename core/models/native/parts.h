// What a decoder is made of, as Python declares it: every struct of a layer comes as a named tuple of the same order, see
// `core/models/native/parts.py`. Nothing here or behind it knows what a family is called.

#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <tuple>

namespace slipstream {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Weight [N, K], scale [N] if that is int8, bias [N] if there is one.
using Matrix = std::tuple<Tensor, MaybeTensor, MaybeTensor>;

// Weight and bias [n width], eps, whether the mean is taken off first, and how many elements are normed together.
using NormParts = std::tuple<Tensor, MaybeTensor, double, bool, int64_t>;

// cos and sin float32 [positions, R / 2] of the first R elements of a head, and whether a pair is two neighbours.
using RotaryParts = std::tuple<Tensor, Tensor, bool>;

// Projections of queries, keys and values, and of the output; norms of queries and keys; rotary embedding; scale and soft
// cap of scores (0: none); keys that a query sees, itself included (0: all); sinks [H].
using AttentionParts = std::tuple<Matrix, Matrix, std::optional<NormParts>, std::optional<NormParts>,
                                  std::optional<RotaryParts>, double, double, int64_t, MaybeTensor>;

// Into and out of the inner width, whether gate and up come together, and the activation.
using MlpParts = std::tuple<Matrix, Matrix, bool, std::string>;

// Norms before and after attention, before and after the MLP; whether both read the same states; what their results are
// multiplied by.
using LayerParts = std::tuple<std::optional<NormParts>, std::optional<NormParts>, std::optional<NormParts>,
                              std::optional<NormParts>, AttentionParts, MlpParts, bool, double>;

}  // namespace slipstream
