// Mamba-2 (Dao and Gu, 2024): a state of P by N numbers for each head, which every token shrinks by a factor of its own and
// adds a product to. It is float32, and goes from token to token also in prompts: to a large extent those cost what their
// matrices cost, and so a prompt leaves the same state however it was cut.

#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "activations.h"
#include "conv.h"
#include "mixer.h"
#include "norms.h"

namespace slipstream {

template <typename T>
class Mamba2 final : public Mixer<T> {
 public:
  // `place`: of its states among those of all layers.
  Mamba2(const Mamba2Parts& parts, size_t place)
      : into_(std::get<0>(parts)),
        conv_(std::get<1>(parts)),
        out_(std::get<2>(parts)),
        decay_(std::get<3>(parts).to(at::kFloat).contiguous()),
        skip_(std::get<4>(parts).to(at::kFloat).contiguous()),
        step_bias_(std::get<5>(parts).to(at::kFloat).contiguous()),
        gate_first_(std::get<7>(parts)),
        heads_(decay_.numel()),
        groups_(std::get<8>(parts)),
        shortest_(static_cast<float>(std::get<9>(parts))),
        longest_(static_cast<float>(std::get<10>(parts))),
        inner_(into_.outputs() - conv_.channels() - heads_),
        dim_(inner_ / heads_),
        size_((conv_.channels() - inner_) / (2 * groups_)),
        place_(place) {
    if (std::get<6>(parts)) norm_.emplace(*std::get<6>(parts));
    TORCH_CHECK(inner_ == heads_ * dim_ && conv_.channels() == inner_ + 2 * groups_ * size_, "heads of Mamba-2");
    TORCH_CHECK(dim_ % kLanes == 0 && size_ % kLanes == 0, "heads of ", dim_, " by ", size_, " elements");
  }

  const Linear<T>& out() const override { return out_; }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* read, int64_t tokens) const override {
    const int64_t width = round_up(into_.outputs(), kLanes), stride = out_.depth();
    T* projected = shop.buffer<T>(3, tokens, width);
    T* mixed = shop.buffer<T>(4, tokens, stride);
    into_.write(shop.team, shop.scratch, read, tokens, projected, width);
    convolve(shop, planner, step, projected, width);
    float* states = step.recurrent(place_).template mutable_data_ptr<float>();
    // Rows of a head's state are independent of each other.
    const int64_t rows = heads_ * dim_;
    in_parts(shop.team, planner.courses(), rows, dim_, [&](const Course& course, int64_t first, int64_t last,
                                                           int64_t worker) {
      for (int64_t row = first; row < last; row += dim_)
        scan(course, row / dim_, projected, width, states, mixed, stride, shop.scratch[worker]);
    });
    finish(shop, projected, width, mixed, stride, tokens);
    return mixed;
  }

 private:
  static constexpr int64_t kPart = 128, kNormTokens = 4;

  // Of a token's [gate, inner and both projections, step sizes], what is in the middle: in place.
  void convolve(Workshop& shop, const Planner& planner, const Step& step, T* projected, int64_t width) const {
    T* states = step.convs(place_).template mutable_data_ptr<T>();
    in_parts(shop.team, planner.courses(), conv_.channels(), kPart, [&](const Course& course, int64_t first,
                                                                        int64_t last, int64_t worker) {
      conv_.run(
          course, states, first, last, shop.scratch[worker],
          [&](int64_t token, int64_t c) { return load(projected + token * width + inner_ + c); },
          [&](int64_t token, int64_t c, Floats sums) {
            store(activated<Activation::kSilu>(sums), projected + token * width + inner_ + c);
          });
    });
  }

  // All tokens of one request, in one head.
  void scan(const Course& course, int64_t head, const T* projected, int64_t width, float* states, T* mixed,
            int64_t stride, Scratch& scratch) const {
    const int64_t group = head / (heads_ / groups_), whole = dim_ * size_;
    float* keys = scratch.take<float>(0, 2 * size_ + 2 * dim_);
    float *queries = keys + size_, *inputs = queries + size_, *found = inputs + dim_;
    const float decay = decay_.const_data_ptr<float>()[head], bias = step_bias_.const_data_ptr<float>()[head];
    const Floats skip = Floats{} + skip_.const_data_ptr<float>()[head];
    for (const Stretch& stretch : course) {
      const float* from = states + (stretch.from * heads_ + head) * whole;
      float* to = states + (stretch.to * heads_ + head) * whole;
      if (stretch.tokens == 0) std::copy_n(from, whole, to);
      for (int64_t token = stretch.token; token < stretch.token + stretch.tokens; ++token, from = to) {
        const T *gate = projected + token * width + head * dim_, *x = gate + inner_;
        const T* key = projected + token * width + 2 * inner_ + group * size_;
        const float given = softplus(widen(projected[token * width + inner_ + conv_.channels() + head]) + bias);
        const float size = std::clamp(given, shortest_, longest_);
        for (int64_t n = 0; n < size_; n += kLanes) {
          store(load(key + n), keys + n);
          store(load(key + groups_ * size_ + n), queries + n);
        }
        for (int64_t p = 0; p < dim_; p += kLanes) store(load(x + p) * size, inputs + p);
        advance(from, to, std::exp(size * decay), keys, queries, inputs, found);
        T* out = mixed + token * stride + head * dim_;
        for (int64_t p = 0; p < dim_; p += kLanes) {
          const Floats y = load(found + p) + load(x + p) * skip;
          store(gate_first_ ? y * activated<Activation::kSilu>(load(gate + p)) : y, out + p);
        }
      }
    }
  }

  // to[P][N] = shrink from + inputs[P] keys[N], and found[P] = to queries[N]. `to` may be `from`.
  void advance(const float* from, float* to, float shrink, const float* keys, const float* queries, const float* inputs,
               float* found) const {
    for (int64_t p = 0; p < dim_; ++p) {
      Floats sums{};
      for (int64_t n = 0; n < size_; n += kLanes) {
        const Floats state = load(from + p * size_ + n) * shrink + load(keys + n) * inputs[p];
        store(state, to + p * size_ + n);
        sums += state * load(queries + n);
      }
      found[p] = sum_of(sums);
    }
  }

  // The norm over groups of heads, and the gate if it comes behind that.
  void finish(Workshop& shop, const T* projected, int64_t width, T* mixed, int64_t stride, int64_t tokens) const {
    shop.in_blocks(tokens, kNormTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        T* row = mixed + t * stride;
        if (norm_) norm_->apply(row, row, inner_);
        for (int64_t i = 0; i < inner_ && !gate_first_; i += kLanes)
          store(load(row + i) * activated<Activation::kSilu>(load(projected + t * width + i)), row + i);
        std::fill(row + inner_, row + stride, T(0.0f));
      }
    });
  }

  Linear<T> into_;
  CausalConv<T> conv_;
  Linear<T> out_;
  Tensor decay_, skip_, step_bias_;
  std::optional<Norm> norm_;
  bool gate_first_;
  int64_t heads_, groups_;
  float shortest_, longest_;
  int64_t inner_, dim_, size_;
  size_t place_;
};

}  // namespace slipstream
