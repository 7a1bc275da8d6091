// The gated delta rule (Yang et al., Gated Delta Networks, 2024): a head's state maps keys to values; each token shrinks
// it, and corrects what it says of the token's key. States are float32 and go from token to token, in prompts too.

#pragma once

#include <cmath>

#include "activations.h"
#include "conv.h"
#include "mixer.h"
#include "norms.h"

namespace slipstream {

template <typename T>
class DeltaNet final : public Mixer<T> {
 public:
  // `place`: of its states among those of all layers.
  DeltaNet(const DeltaNetParts& parts, size_t place)
      : into_(std::get<0>(parts)),
        conv_(std::get<1>(parts)),
        out_(std::get<2>(parts)),
        decay_(std::get<3>(parts).to(at::kFloat).contiguous()),
        step_bias_(std::get<4>(parts).to(at::kFloat).contiguous()),
        norm_(std::get<5>(parts)),
        heads_(decay_.numel()),
        key_heads_(std::get<6>(parts)),
        inner_(into_.outputs() - conv_.channels() - 2 * heads_),
        value_(inner_ / heads_),
        key_((conv_.channels() - inner_) / (2 * key_heads_)),
        place_(place) {
    TORCH_CHECK(inner_ == heads_ * value_ && conv_.channels() == inner_ + 2 * key_heads_ * key_, "heads of a delta net");
    TORCH_CHECK(value_ % kLanes == 0 && key_ % kLanes == 0, "heads of ", key_, " by ", value_, " elements");
  }

  const Linear<T>& out() const override { return out_; }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* read, int64_t tokens) const override {
    const int64_t width = round_up(into_.outputs(), kLanes), stride = out_.depth();
    T* projected = shop.buffer<T>(3, tokens, width);
    T* mixed = shop.buffer<T>(4, tokens, stride);
    into_.write(shop.team, shop.scratch, read, tokens, projected, width);
    convolve(shop, planner, step, projected, width);
    float* states = step.recurrent(place_).template mutable_data_ptr<float>();
    // Columns of a head's state are independent of each other.
    in_parts(shop.team, planner.courses(), inner_, value_, [&](const Course& course, int64_t first, int64_t last,
                                                               int64_t worker) {
      for (int64_t at = first; at < last; at += value_)
        scan(course, at / value_, projected, width, states, mixed, stride, shop.scratch[worker]);
    });
    finish(shop, projected, width, mixed, stride, tokens);
    return mixed;
  }

 private:
  static constexpr int64_t kPart = 128, kNormTokens = 4;

  // Of a token's [queries, keys, values, gates, strengths, step sizes], the first three: in place.
  void convolve(Workshop& shop, const Planner& planner, const Step& step, T* projected, int64_t width) const {
    T* states = step.convs(place_).template mutable_data_ptr<T>();
    in_parts(shop.team, planner.courses(), conv_.channels(), kPart, [&](const Course& course, int64_t first,
                                                                        int64_t last, int64_t worker) {
      conv_.run(
          course, states, first, last, shop.scratch[worker],
          [&](int64_t token, int64_t c) { return load(projected + token * width + c); },
          [&](int64_t token, int64_t c, Floats sums) {
            store(activated<Activation::kSilu>(sums), projected + token * width + c);
          });
    });
  }

  // All tokens of one request, in one head.
  void scan(const Course& course, int64_t head, const T* projected, int64_t width, float* states, T* mixed,
            int64_t stride, Scratch& scratch) const {
    const int64_t group = head / (heads_ / key_heads_), whole = key_ * value_;
    float* queries = scratch.take<float>(0, 2 * key_);
    float* keys = queries + key_;
    const float decay = decay_.const_data_ptr<float>()[head], bias = step_bias_.const_data_ptr<float>()[head];
    for (const Stretch& stretch : course) {
      const float* from = states + (stretch.from * heads_ + head) * whole;
      float* to = states + (stretch.to * heads_ + head) * whole;
      if (stretch.tokens == 0) std::copy_n(from, whole, to);
      for (int64_t token = stretch.token; token < stretch.token + stretch.tokens; ++token, from = to) {
        const T* all = projected + token * width;
        const T* strength = all + conv_.channels() + inner_ + head;
        unit(all + group * key_, queries, 1.0f / std::sqrt(static_cast<float>(key_)));
        unit(all + (key_heads_ + group) * key_, keys, 1.0f);
        const float shrink = std::exp(decay * softplus(widen(strength[heads_]) + bias));
        const float beta = 1.0f / (1.0f + std::exp(-widen(*strength)));
        advance(from, to, shrink, beta, keys, queries, all + 2 * key_heads_ * key_ + head * value_,
                mixed + token * stride + head * value_);
      }
    }
  }

  // x brought to length 1, times `factor`.
  void unit(const T* x, float* out, float factor) const {
    const float scale = factor / std::sqrt(dot(x, x, key_) + 1e-6f);
    for (int64_t k = 0; k < key_; k += kLanes) store(load(x + k) * scale, out + k);
  }

  // to[K][V] = shrink from + keys times what is missing, by beta, in what that says of them; out[V] = queries to.
  void advance(const float* from, float* to, float shrink, float beta, const float* keys, const float* queries,
               const T* values, T* out) const {
    for (int64_t v = 0; v < value_; v += kLanes) {
      Floats said{}, found{};
      for (int64_t k = 0; k < key_; ++k) said += load(from + k * value_ + v) * keys[k];
      const Floats missing = (load(values + v) - said * shrink) * beta;
      for (int64_t k = 0; k < key_; ++k) {
        const Floats state = load(from + k * value_ + v) * shrink + missing * keys[k];
        store(state, to + k * value_ + v);
        found += state * queries[k];
      }
      store(found, out + v);
    }
  }

  void finish(Workshop& shop, const T* projected, int64_t width, T* mixed, int64_t stride, int64_t tokens) const {
    shop.in_blocks(tokens, kNormTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        T* row = mixed + t * stride;
        const T* gate = projected + t * width + conv_.channels();
        norm_.apply(row, row, inner_);
        for (int64_t i = 0; i < inner_; i += kLanes)
          store(load(row + i) * activated<Activation::kSilu>(load(gate + i)), row + i);
        std::fill(row + inner_, row + stride, T(0.0f));
      }
    });
  }

  Linear<T> into_;
  CausalConv<T> conv_;
  Linear<T> out_;
  Tensor decay_, step_bias_;
  Norm norm_;
  int64_t heads_, key_heads_, inner_, value_, key_;
  size_t place_;
};

}  // namespace slipstream
