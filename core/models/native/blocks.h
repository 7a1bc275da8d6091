// The blocks that a layer is made of: a gated or plain MLP, and attention from projections to heads, with their options.

#pragma once

#include <optional>

#include "activations.h"
#include "attention.h"
#include "linear.h"
#include "mixer.h"
#include "norms.h"
#include "parting.h"
#include "plan.h"
#include "rotary.h"

namespace slipstream {

template <typename T>
class Mlp {
 public:
  explicit Mlp(const MlpParts& parts, std::optional<Clamp> clamp = std::nullopt)
      : gated_(std::get<2>(parts)),
        activation_(std::get<4>(parts) ? Activation::kSilu : activation_of(std::get<3>(parts))),
        clamp_(clamp),
        curve_(curve_of(std::get<4>(parts))),
        into_(gated_ ? paired(std::get<0>(parts)) : Linear<T>(std::get<0>(parts))),
        down_(std::get<1>(parts)) {}

  const Linear<T>& into() const { return into_; }
  const Linear<T>& down() const { return down_; }

  // [tokens][down().depth()] from normed.
  T* inner(Workshop& shop, const T* normed, int64_t tokens) const {
    const int64_t stride = down_.depth();
    T* out = shop.buffer<T>(2, tokens, stride);
    into_.apply(shop.team, shop.scratch, normed, tokens, [&](int64_t row, int64_t first, float* found, int64_t) {
      activate_panel(found, first, out + row * stride);
    });
    return out;
  }

  // The same of one panel only: what x[rows][into().depth()] becomes in out[rows][down().depth()]; `next` as in `Linear`.
  void inner_panel(Scratch& scratch, const T* x, int64_t rows, int64_t panel, const void* next, T* out) const {
    float* found = into_.outputs_of(scratch, x, rows, panel, next);
    for (int64_t row = 0; row < rows; ++row)
      activate_panel(found + row * kPanel, panel * kPanel, out + row * down_.depth());
  }

 private:
  // A row's part of a panel of `into_`, whose first output is `first`.
  void activate_panel(float* found, int64_t first, T* out) const {
    const int64_t half = kPanel / 2;
    if (clamp_) {
      activate_clamped(*clamp_, found, found + half, out + first / 2, half);
    } else if (gated_) {
      activate(activation_, found, found + half, out + first / 2, half);
    } else if (curve_) {
      activate_curved(*curve_, found, out + first, std::min(kPanel, down_.depth() - first));
    } else {
      activate(activation_, found, nullptr, out + first, std::min(kPanel, down_.depth() - first));
    }
  }

  // gate and up [2 I, C], row by row in turns of half a panel, so that one panel holds both sides of its 32 products.
  static Tensor paired(const Tensor& gate_up) {
    const int64_t half = kPanel / 2, inner = gate_up.size(0) / 2, padded = round_up(inner, half);
    Tensor out = at::zeros({padded / half, 2, half, gate_up.size(1)}, gate_up.options());
    Tensor flat = at::zeros({2, padded, gate_up.size(1)}, gate_up.options());
    flat.narrow(1, 0, inner).copy_(gate_up.view({2, inner, gate_up.size(1)}));
    out.copy_(flat.view({2, padded / half, half, gate_up.size(1)}).transpose(0, 1));
    return out.view({2 * padded, gate_up.size(1)});
  }

  static MaybeTensor paired(const MaybeTensor& by_output) {
    if (!by_output) return std::nullopt;
    return paired(by_output->unsqueeze(1)).squeeze(1);
  }

  static Linear<T> paired(const Matrix& matrix) {
    const auto& [weight, scale, bias, groups] = matrix;
    return Linear<T>(paired(weight), paired(scale), paired(bias), paired(groups));
  }

  static std::optional<GroupParts> paired(const std::optional<GroupParts>& groups) {
    if (!groups) return std::nullopt;
    const auto& [scale, zero, size, order] = *groups;
    return GroupParts{paired(scale), zero ? MaybeTensor(paired(*zero)) : std::nullopt, size, order};
  }

  static std::optional<Curve> curve_of(const std::optional<CurveParts>& parts) {
    if (!parts) return std::nullopt;
    const auto& [above, below, linear, most] = *parts;
    return Curve{static_cast<float>(above), static_cast<float>(below), static_cast<float>(linear), static_cast<float>(most)};
  }

  bool gated_;
  Activation activation_;
  std::optional<Clamp> clamp_;
  std::optional<Curve> curve_;
  Linear<T> into_, down_;
};

template <typename T>
class Attention final : public Mixer<T> {
 public:
  // `place`: of the keys and values that it reads among those of all layers.
  Attention(const AttentionParts& parts, size_t place)
      : shape_{std::get<0>(std::get<0>(parts)), std::get<1>(std::get<0>(parts)), std::get<2>(std::get<0>(parts))},
        qkv_(std::get<1>(parts)),
        out_(std::get<2>(parts)),
        stores_(!std::get<14>(parts)),
        place_(place) {
    const auto& [shape, qkv, out, q_norm, k_norm, v_norm, rotary, turns_first, scale, cap, window, chunk, sinks, temperature,
                 keys_of, slopes, softplus] = parts;
    if (q_norm) q_norm_.emplace(*q_norm);
    if (k_norm) k_norm_.emplace(*k_norm);
    if (v_norm) v_norm_.emplace(*v_norm);
    if (rotary) rotary_.emplace(*rotary);
    turns_first_ = turns_first;
    softplus_ = softplus;
    if (sinks) sinks_ = sinks->to(at::kFloat).contiguous();
    if (temperature) temperature_ = temperature->to(at::kFloat).contiguous();
    weighing_ = {static_cast<float>(scale), static_cast<float>(cap), window, chunk,
                 sinks_ ? sinks_->const_data_ptr<float>() : nullptr};
    if (slopes) slopes_ = slopes->to(at::kFloat).contiguous();
    weighing_.slopes = slopes_ ? slopes_->const_data_ptr<float>() : nullptr;
    width_ = stores_ ? std::max(qkv_.outputs(), shape_.qkv_width()) : shape_.q_width();
    TORCH_CHECK(stores_ ? qkv_.outputs() == shape_.qkv_width() || gated() || values_are_keys()
                        : qkv_.outputs() == width_ && !k_norm_ && !v_norm_,
                "queries, keys and values have ", qkv_.outputs(), " elements");
  }

  const Linear<T>& out() const override { return out_; }
  bool keeps() const override { return stores_; }
  int64_t group() const override { return shape_.group(); }
  int64_t window() const override { return std::max(weighing_.window, weighing_.chunk); }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* normed, int64_t tokens) const override {
    const Plan& plan = planner.of(weighing_.hides());
    const int64_t width = width_, stride = out_.depth();
    T* qkv = shop.buffer<T>(3, tokens, width);
    T* out = shop.buffer<T>(4, tokens, stride);
    qkv_.write(shop.team, shop.scratch, normed, tokens, qkv, width);
    if (step.coded(place_)) {
      attend(shop, plan, step, step.template stored<int8_t>(place_), qkv, out, tokens);
    } else {
      attend(shop, plan, step, step.template stored<T>(place_), qkv, out, tokens);
    }
    if (gated())
      shop.in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; ++t) multiply_by_gates(qkv + t * width + shape_.qkv_width(), out + t * stride);
      });
    return out;
  }

 private:
  static constexpr int64_t kTurnTokens = 4;

  // Stores keys and values of qkv[tokens] if it has any, and puts what its queries attend to in out[tokens].
  template <typename S>
  void attend(Workshop& shop, const Plan& plan, const Step& step, const Stored<S>& stored, T* qkv, T* out,
              int64_t tokens) const {
    const int64_t width = width_, stride = out_.depth();
    const int64_t* positions = step.positions.const_data_ptr<int64_t>();
    shop.in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t)
        turn_and_store(qkv + t * width, positions[t], angles_of(step, t), stored, plan.slots[t]);
    });
    if (stride > shape_.q_width())
      for (int64_t t = 0; t < tokens; ++t)
        std::fill(out + t * stride + shape_.q_width(), out + (t + 1) * stride, T(0.0f));
    const int64_t parts = parts_of(*plan.groups, shape_.kv_heads, shop.team.size(),
                                   [&](int64_t position) { return weighing_.first(position); });
    const int64_t heads = shape_.kv_heads / parts;
    const Block<T> block{qkv, out, width, stride, nullptr, 0, 0, 0, positions};
    shop.team.run(static_cast<int64_t>(plan.groups->size()) * parts, [&](int64_t chunk, int64_t worker) {
      const int64_t head = chunk % parts * heads;
      slipstream::attend(shape_, weighing_, (*plan.groups)[chunk / parts], block, stored, head, head + heads,
                         shop.scratch[worker]);
    });
  }

  // Whether values are what keys are before their norm and their turn.
  bool values_are_keys() const { return qkv_.outputs() == shape_.q_width() + shape_.kv_width(); }
  // Whether gates stand behind queries, keys and values: one for each of its outputs, or for each head.
  bool gated() const { return gates() == shape_.q_width() || gates() == shape_.heads; }
  int64_t gates() const { return qkv_.outputs() - shape_.qkv_width(); }

  // Multiplies out [H D] by what becomes of its gates.
  void multiply_by_gates(const T* gates_of, T* out) const {
    if (gates() == shape_.q_width() && !softplus_) return multiply_by_sigmoids(gates_of, out, shape_.q_width());
    const int64_t each = shape_.q_width() / gates();
    for (int64_t i = 0; i < gates(); ++i) {
      const float gate = widen(gates_of[i]);
      T by;
      narrow(softplus_ ? softplus(gate) : 1.0f / (1.0f + std::exp(-gate)), by);
      multiply(out + i * each, each, widen(by));
    }
  }

  // What token `t` of a step is turned by, if anything.
  Rotary::Angles angles_of(const Step& step, int64_t t) const {
    if (!rotary_) return {};
    if (step.images && std::get<1>(*step.images)) return rotary_->of(*std::get<1>(*step.images), t);
    return rotary_->at(step.positions.const_data_ptr<int64_t>()[t]);
  }

  // Norms and turns queries and keys of one token's qkv [(H + 2 K) D], and stores its key and value where they belong. What
  // reads another layer's has queries alone.
  template <typename S>
  void turn_and_store(T* qkv, int64_t position, const Rotary::Angles& by, const Stored<S>& stored, int64_t slot) const {
    const int64_t width = shape_.kv_width(), heads = shape_.heads + (stores_ ? shape_.kv_heads : 0);
    T *k = qkv + shape_.q_width(), *v = k + width;
    if (stores_ && values_are_keys()) std::copy_n(k, width, v);
    if (turns_first_) turn(qkv, heads, by);
    if (q_norm_) q_norm_->apply(qkv, qkv, shape_.q_width());
    if (k_norm_) k_norm_->apply(k, k, width);
    if (v_norm_) v_norm_->apply(v, v, width);
    if (!turns_first_) turn(qkv, heads, by);
    if (temperature_) multiply(qkv, shape_.q_width(), temperature_->const_data_ptr<float>()[position]);
    if (!stores_) return;
    const int64_t scales = slot * shape_.kv_heads;
    store_heads(k, shape_.kv_heads, shape_.dim, stored.keys + slot * width, stored.key_scale(scales));
    store_heads(v, shape_.kv_heads, shape_.dim, stored.values + slot * width, stored.value_scale(scales));
  }

  void turn(T* qk, int64_t heads, const Rotary::Angles& by) const {
    if (rotary_)
      for (int64_t h = 0; h < heads; ++h) rotary_->turn(qk + h * shape_.dim, by);
  }

  static void multiply(T* x, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) narrow(widen(x[i]) * factor, x[i]);
  }

  Shape shape_;
  Linear<T> qkv_, out_;
  std::optional<Norm> q_norm_, k_norm_, v_norm_;
  std::optional<Rotary> rotary_;
  bool turns_first_ = false, softplus_ = false, stores_;
  int64_t width_ = 0;  // of a token's queries, keys, values and gates
  MaybeTensor sinks_, temperature_, slopes_;
  Weighing weighing_{};
  size_t place_;
};

}  // namespace slipstream
