// Mamba (Gu and Dao, 2023): every channel has a state of N numbers, and shrinks each of them by a factor that the token
// chooses. States are float32 and go from token to token, in prompts too.

#pragma once

#include <cmath>
#include <vector>

#include "activations.h"
#include "conv.h"
#include "mixer.h"
#include "norms.h"

namespace slipstream {

template <typename T>
class Mamba1 final : public Mixer<T> {
 public:
  // `place`: of its states among those of all layers.
  Mamba1(const Mamba1Parts& parts, size_t place)
      : into_(std::get<0>(parts)),
        conv_(std::get<1>(parts)),
        choices_(std::get<2>(parts)),
        steps_(std::get<3>(parts)),
        out_(std::get<4>(parts)),
        size_(std::get<5>(parts).size(1)),
        padded_(round_up(size_, kLanes)),
        rank_(choices_.outputs() - 2 * size_),
        decay_(at::zeros({conv_.channels(), padded_}, at::kFloat)),
        skip_(std::get<6>(parts).to(at::kFloat).contiguous()),
        place_(place) {
    decay_.narrow(1, 0, size_).copy_(std::get<5>(parts));
    const auto& norms = std::get<7>(parts);
    for (const NormParts& norm : norms) norms_.emplace_back(norm);
    TORCH_CHECK(norms_.empty() || norms_.size() == 3, "norms of step sizes, keys and queries");
    TORCH_CHECK(into_.outputs() == 2 * conv_.channels() && steps_.outputs() == conv_.channels(), "channels of Mamba");
  }

  const Linear<T>& out() const override { return out_; }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* read, int64_t tokens) const override {
    const int64_t channels = conv_.channels(), width = 2 * channels, stride = out_.depth();
    T* projected = shop.buffer<T>(3, tokens, width);
    T* mixed = shop.buffer<T>(4, tokens, stride);
    into_.write(shop.team, shop.scratch, read, tokens, projected, width);
    const T* inputs = convolve(shop, planner, step, projected, tokens);
    const Choices choices = choose(shop, inputs, tokens);
    for (int64_t t = 0; t < tokens; ++t) std::fill(mixed + t * stride + channels, mixed + (t + 1) * stride, T(0.0f));
    float* states = step.recurrent(place_).template mutable_data_ptr<float>();
    in_parts(shop.team, planner.courses(), channels, kPart, [&](const Course& course, int64_t first, int64_t last,
                                                                int64_t worker) {
      scan(course, first, last, inputs, choices, states, shop.scratch[worker], [&](int64_t token, int64_t c, Floats y) {
        store(y * activated<Activation::kSilu>(load(projected + token * width + channels + c)),
              mixed + token * stride + c);
      });
    });
    return mixed;
  }

 private:
  static constexpr int64_t kPart = 64, kNormTokens = 4;

  // What tokens choose: keys and queries [tokens][2 N], step sizes [tokens][channels].
  struct Choices {
    const T* keys;
    const float* sizes;
  };

  int64_t input_stride() const { return choices_.depth(); }

  // [tokens][input_stride()].
  T* convolve(Workshop& shop, const Planner& planner, const Step& step, const T* projected, int64_t tokens) const {
    const int64_t channels = conv_.channels(), stride = input_stride();
    T* inputs = shop.buffer<T>(8, tokens, stride);
    for (int64_t t = 0; t < tokens; ++t) std::fill(inputs + t * stride + channels, inputs + (t + 1) * stride, T(0.0f));
    T* states = step.convs(place_).template mutable_data_ptr<T>();
    in_parts(shop.team, planner.courses(), channels, 2 * kPart, [&](const Course& course, int64_t first, int64_t last,
                                                                    int64_t worker) {
      conv_.run(
          course, states, first, last, shop.scratch[worker],
          [&](int64_t token, int64_t c) { return load(projected + token * 2 * channels + c); },
          [&](int64_t token, int64_t c, Floats sums) {
            store(activated<Activation::kSilu>(sums), inputs + token * stride + c);
          });
    });
    return inputs;
  }

  Choices choose(Workshop& shop, const T* inputs, int64_t tokens) const {
    const int64_t channels = conv_.channels(), depth = steps_.depth();
    T* ranks = shop.buffer<T>(9, tokens, depth);
    T* keys = shop.buffer<T>(10, tokens, 2 * size_);
    float* sizes = shop.buffer<float>(11, tokens, channels);
    choices_.apply(shop.team, shop.scratch, inputs, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i)
        narrow(found[i], first + i < rank_ ? ranks[row * depth + first + i] : keys[row * 2 * size_ + first + i - rank_]);
    });
    shop.in_blocks(tokens, kNormTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        std::fill(ranks + t * depth + rank_, ranks + (t + 1) * depth, T(0.0f));
        if (norms_.empty()) continue;
        T *rank = ranks + t * depth, *key = keys + t * 2 * size_;
        norms_[0].apply(rank, rank, rank_);
        norms_[1].apply(key, key, size_);
        norms_[2].apply(key + size_, key + size_, size_);
      }
    });
    steps_.apply(shop.team, shop.scratch, ranks, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i) sizes[row * channels + first + i] = softplus(found[i]);
    });
    return {keys, sizes};
  }

  // All tokens of one request, in channels `first` to `last`: write(token, channel, outputs) for as many as lanes.
  template <typename Write>
  void scan(const Course& course, int64_t first, int64_t last, const T* inputs, const Choices& choices, float* states,
            Scratch& scratch, const Write& write) const {
    const int64_t channels = conv_.channels();
    const float *decay = decay_.const_data_ptr<float>(), *skip = skip_.const_data_ptr<float>();
    float* keys = scratch.take<float>(0, 2 * padded_);
    float* queries = keys + padded_;
    std::fill_n(keys, 2 * padded_, 0.0f);
    for (const Stretch& stretch : course) {
      const float* from = states + stretch.from * channels * size_;
      float* to = states + stretch.to * channels * size_;
      if (stretch.tokens == 0) std::copy(from + first * size_, from + last * size_, to + first * size_);
      for (int64_t token = stretch.token; token < stretch.token + stretch.tokens; ++token, from = to) {
        for (int64_t n = 0; n < size_; ++n) {
          keys[n] = widen(choices.keys[token * 2 * size_ + n]);
          queries[n] = widen(choices.keys[token * 2 * size_ + size_ + n]);
        }
        const T* x = inputs + token * input_stride();
        const float* size = choices.sizes + token * channels;
        for (int64_t c = first; c < last; c += kLanes) {
          float found[kLanes];
          for (int64_t i = c; i < c + kLanes; ++i)
            found[i - c] = advance(from + i * size_, to + i * size_, decay + i * padded_, size[i], size[i] * widen(x[i]),
                                   keys, queries);
          write(token, c, load(found) + load(x + c) * load(skip + c));
        }
      }
    }
  }

  // One channel's state [N] by one token; returns its product with the queries.
  float advance(const float* from, float* to, const float* decay, float size, float input, const float* keys,
                const float* queries) const {
    Floats sums{};
    for (int64_t n = 0; n < size_; n += kLanes) {
      const int64_t count = std::min(kLanes, size_ - n);
      const Floats state = load_some(from + n, count) * exp_of(load(decay + n) * size) + load(keys + n) * input;
      store_some(state, to + n, count);
      sums += state * load(queries + n);
    }
    return sum_of(sums);
  }

  // As many as there are, zeros behind them.
  static Floats load_some(const float* from, int64_t count) {
    if (count == kLanes) return load(from);
    float all[kLanes] = {};
    std::copy_n(from, count, all);
    return load(all);
  }

  static void store_some(Floats wide, float* to, int64_t count) {
    if (count == kLanes) return store(wide, to);
    float all[kLanes];
    store(wide, all);
    std::copy_n(all, count, to);
  }

  Linear<T> into_;
  CausalConv<T> conv_;
  Linear<T> choices_, steps_, out_;
  int64_t size_, padded_, rank_;
  Tensor decay_, skip_;
  std::vector<Norm> norms_;
  size_t place_;
};

}  // namespace slipstream
