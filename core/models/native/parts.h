// What a decoder is made of, as Python declares it: every struct of a layer comes as a named tuple of the same order, see
// `core/models/native/parts.py`. Nothing here or behind it knows what a family is called.

#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace slipstream {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Of four-bit weights: scales [N, groups]; zeros of the same shape, int8 or float, or none where all are 8; inputs of a
// group; and int64[K] if inputs are in an order of their own.
using GroupParts = std::tuple<Tensor, MaybeTensor, int64_t, MaybeTensor>;

// Weight [N, K], scale [N] if that is int8, bias [N] if there is one; a weight in groups is uint8 [N, K / 2].
using Matrix = std::tuple<Tensor, MaybeTensor, MaybeTensor, std::optional<GroupParts>>;

// Weight and bias [n width], eps, whether the mean is taken off first, and how many elements are normed together.
using NormParts = std::tuple<Tensor, MaybeTensor, double, bool, int64_t>;

// cos and sin float32 [positions, R / 2] of the first R elements of a head, and whether a pair is two neighbours.
using RotaryParts = std::tuple<Tensor, Tensor, bool>;

// Heads of queries, heads of keys, and elements of a head.
using ShapeParts = std::tuple<int64_t, int64_t, int64_t>;

// Heads; projections of queries, keys and values, with one of gates behind them or none, and of the output: without values
// these are the keys before their norm, without keys another layer's are read; norms of queries, keys and values; rotary embedding, and whether it comes before the norms; scale and soft cap of scores (0: none); keys that a query sees, itself included (0: all); the
// length of chunks that it sees no key outside of (0: one chunk); sinks [H]; by position what queries are multiplied by; the
// place of the keys that are read, among those of all layers, unless it has its own; by head how much less a key scores for
// each token of distance; whether gates go through a softplus, not a sigmoid.
using AttentionParts =
    std::tuple<ShapeParts, Matrix, Matrix, std::optional<NormParts>, std::optional<NormParts>, std::optional<NormParts>,
               std::optional<RotaryParts>, bool, double, double, int64_t, int64_t, MaybeTensor, MaybeTensor,
               std::optional<int64_t>, MaybeTensor, bool>;

// Into what queries are made of, the latent and what is turned of a key; norm of the former, and what makes queries of it, or
// none; norm of the latent; by head from queries to latents [H, R, nope] and from latents to values [H, V, R]; out of all
// values; rotary embedding; scale of scores.
using LatentParts = std::tuple<Matrix, std::optional<NormParts>, std::optional<Matrix>, NormParts, Tensor, Tensor, Matrix,
                               RotaryParts, double>;

// A convolution of each channel by itself: weight [channels, taps], the newest input's last, and bias [channels].
using ConvParts = std::tuple<Tensor, MaybeTensor>;

// Into the gate before a short convolution, the one behind it and its inputs; the convolution; out of it.
using ShortConvParts = std::tuple<Matrix, ConvParts, Matrix>;

// Into gate, inputs, keys, queries and step sizes; convolution of the three in the middle; out of the inner width; by head
// logarithms of decay for a step of 1, factors of the input that is added to outputs, and what is added to step sizes; the
// norm behind, whether the gate comes before it, and groups of heads that have keys and queries in common; what step sizes
// are kept within.
using Mamba2Parts = std::tuple<Matrix, ConvParts, Matrix, Tensor, Tensor, Tensor, std::optional<NormParts>, bool, int64_t,
                               double, double>;

// Into inputs and gate; convolution of inputs; from these to step sizes before they are widened, keys and queries; from
// the former to all channels, with a bias; out; logarithms of decay for a step of 1 [channels, N]; factors of inputs that
// are added to outputs [channels]; norms of step sizes, keys and queries, or none.
using Mamba1Parts =
    std::tuple<Matrix, ConvParts, Matrix, Matrix, Matrix, Tensor, Tensor, std::vector<NormParts>>;

// Into queries, keys, values, gates, strengths and step sizes; convolution of the first three; out; by head logarithms of
// decay for a step of 1, and what is added to step sizes; the norm of a head, and heads of queries and keys.
using DeltaNetParts = std::tuple<Matrix, ConvParts, Matrix, Tensor, Tensor, NormParts, int64_t>;

using MixerParts =
    std::variant<AttentionParts, LatentParts, ShortConvParts, Mamba2Parts, Mamba1Parts, DeltaNetParts>;

// What a step does to recurrent states: the slots that its requests go on from; numbers of tokens of the step, ascending,
// behind which a state is left, and in which slots; by layer with states [slots, channels, taps] and float32 [slots, ...].
using StepStates = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>, std::vector<MaybeTensor>>;

// What a step has of images: embeddings [T, C] in the place of those of ids; cos and sin [T, R / 2] in the place of those of
// positions; from which token of the step to which, ascending, tokens see each other in both directions, and whether they do
// that in layers with windows alone; tokens int64[n], and what is added to their states behind each of the first layers
// [layers, n, C].
using StepImages = std::tuple<MaybeTensor, std::optional<std::pair<Tensor, Tensor>>,
                              std::vector<std::pair<int64_t, int64_t>>, bool, std::optional<std::pair<Tensor, Tensor>>>;

// An activation with numbers of its own: of squares above 0, of what is below, of the input itself, and what exponents are
// at most.
using CurveParts = std::tuple<double, double, double, double>;

// Into and out of the inner width, whether gate and up come together, and the activation.
using MlpParts = std::tuple<Matrix, Matrix, bool, std::string, std::optional<CurveParts>>;

// The product with [E, C], of weights of the model's type or wider; what is added to scores for the choice alone [E]; how
// logits become scores; how many experts a token gets; groups, how many of them are chosen from, and how many of a
// group's best scores are its own; whether weights are made to sum to 1; what they are multiplied by; the jitter of a
// "sparsemixer"; whether logits are rounded; by expert what weights are multiplied by at last [E], or nothing.
using RouterParts = std::tuple<Matrix, MaybeTensor, std::string, int64_t, int64_t, int64_t, int64_t, bool, double, double,
                               bool, MaybeTensor>;

// alpha, limit and offset of a gate that is clamped.
using ClampParts = std::tuple<double, double, double>;

// The router; into [E, (2) I, C] and its bias, down [E, C, I] and its bias; whether gate and up come together, and the
// activation; the expert of all tokens, and the weights [C] of its gate; whether inputs are weighted, not outputs.
using ExpertsParts = std::tuple<RouterParts, Tensor, MaybeTensor, Tensor, MaybeTensor, bool, std::string,
                                std::optional<ClampParts>, std::optional<MlpParts>, MaybeTensor, bool>;

// An MLP and experts beside it, which read the states and not what it reads; norms behind the MLP, before the router, before
// the experts and behind them.
using BesideParts = std::tuple<MlpParts, ExpertsParts, NormParts, NormParts, NormParts, NormParts>;

// What a layer does with its own input of a token: a gate of the states into its width, out of it, the norm behind, and the
// activation of the gate.
using LayerInputParts = std::tuple<Matrix, Matrix, NormParts, std::string>;

// Inputs of all L layers, P elements each: by token id [V, L P], and what they are multiplied by; from embeddings, what that
// is multiplied by, and the norm of each layer's; what the sum of both is multiplied by.
using LayerInputsParts = std::tuple<Tensor, double, Matrix, double, NormParts, double>;

// Norms before and after its mixers, before and after the MLP; mixers, which all read the same; the MLP or its experts;
// whether that reads the same too; what their results are multiplied by; what it does with its own input; and what the states
// are multiplied by at last.
using LayerParts =
    std::tuple<std::optional<NormParts>, std::optional<NormParts>, std::optional<NormParts>, std::optional<NormParts>,
               std::vector<MixerParts>, std::optional<std::variant<MlpParts, ExpertsParts, BesideParts>>, bool, double,
               std::optional<LayerInputParts>, double>;

}  // namespace slipstream
