// Attention over latents (DeepSeek-V2, 2024, section 2.1): keys and values of all heads are products with one vector of the
// token, the latent, and that is what pages keep. Here nothing is ever expanded: queries go through the keys' part of that
// product before attention, and what was attended through the values' part behind it. So there is one KV head, whose keys
// are the latent and a turned part, and whose values are the latent.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "mixer.h"
#include "norms.h"
#include "rotary.h"

namespace slipstream {

template <typename T>
class Latents final : public Mixer<T> {
 public:
  // `place`: of its keys among those of all layers.
  Latents(const LatentParts& parts, size_t place)
      : shape_(shape_of(parts)),
        still_(std::get<4>(parts).size(2)),
        value_(std::get<5>(parts).size(1)),
        into_(std::get<0>(parts)),
        kv_norm_(std::get<3>(parts)),
        out_(std::get<6>(parts)),
        rotary_(std::get<7>(parts)),
        place_(place) {
    const auto& [into, q_norm, queries, kv_norm, absorb, expand, out, rotary, scale] = parts;
    if (q_norm) q_norm_.emplace(*q_norm);
    if (queries) queries_.emplace(*queries);
    for (int64_t h = 0; h < shape_.heads; ++h) {
      absorb_.emplace_back(absorb[h], std::nullopt, std::nullopt, std::nullopt);
      expand_.emplace_back(expand[h], std::nullopt, std::nullopt, std::nullopt);
    }
    weighing_ = {static_cast<float>(scale), 0.0f, 0, 0, nullptr};
    const int64_t given = into_.outputs() - shape_.dim;
    TORCH_CHECK((queries_ ? queries_->outputs() : given) == shape_.heads * query(), "queries of all heads");
    TORCH_CHECK(!queries_ || queries_->depth() == round_up(given, kDepth), "queries are made of ", given, " elements");
  }

  const Linear<T>& out() const override { return out_; }
  int64_t group() const override { return shape_.group(); }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* normed, int64_t tokens) const override {
    const int64_t width = into_.outputs();
    T* projected = shop.buffer<T>(3, tokens, width);
    into_.write(shop.team, shop.scratch, normed, tokens, projected, width);
    const Queries q = queries_of(shop, projected, tokens);
    T* asked = shop.buffer<T>(9, tokens, shape_.q_width());
    const int64_t* positions = step.positions.const_data_ptr<int64_t>();
    shop.in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        make_key(projected + (t + 1) * width - shape_.dim, positions[t]);
        turn_queries(q.of + t * q.stride, positions[t], asked + t * shape_.q_width());
      }
    });
    by_head(shop, absorb_, q.of, q.stride, query(), still_, tokens, asked, shape_.q_width(), shape_.dim);
    const Plan& plan = planner.of(false);
    if (step.coded(place_)) {
      store_and_attend(shop, plan, step.template stored<int8_t>(place_), projected, tokens, asked);
    } else {
      store_and_attend(shop, plan, step.template stored<T>(place_), projected, tokens, asked);
    }
    const int64_t stride = out_.depth();
    T* out = shop.buffer<T>(4, tokens, stride);
    for (int64_t t = 0; t < tokens; ++t)
      std::fill(out + t * stride + shape_.heads * value_, out + (t + 1) * stride, T(0.0f));
    by_head(shop, expand_, asked, shape_.q_width(), shape_.dim, shape_.latent, tokens, out, stride, value_);
    return out;
  }

 private:
  static constexpr int64_t kTurnTokens = 4, kHeadRows = 256;
  // Heads that are worth reading all keys for; as many as fill a tile where there are tiles, so that the way through them
  // is the same for any number of threads.
#if defined(__AMX_BF16__)
  static constexpr int64_t kPartHeads = 16;
#else
  static constexpr int64_t kPartHeads = 8;
#endif

  // One KV head, whose elements are those of a key: a latent and what is turned.
  static Shape shape_of(const LatentParts& parts) {
    const Tensor& absorb = std::get<4>(parts);
    const int64_t rank = absorb.size(1);
    return {absorb.size(0), 1, rank + 2 * std::get<0>(std::get<7>(parts)).size(1), rank};
  }

  struct Queries {
    const T* of;  // [tokens][stride], all heads' side by side
    int64_t stride;
  };

  // Elements of a head's query: those that are absorbed, and those that are turned.
  int64_t query() const { return still_ + shape_.dim - shape_.latent; }

  Queries queries_of(Workshop& shop, const T* projected, int64_t tokens) const {
    const int64_t width = into_.outputs();
    if (!queries_) return {projected, width};
    const int64_t depth = queries_->depth(), given = width - shape_.dim, stride = queries_->outputs();
    T* x = shop.buffer<T>(4, tokens, depth);
    shop.in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        q_norm_->apply(projected + t * width, x + t * depth, given);
        std::fill(x + t * depth + given, x + (t + 1) * depth, T(0.0f));
      }
    });
    T* q = shop.buffer<T>(8, tokens, stride);
    queries_->write(shop.team, shop.scratch, x, tokens, q, stride);
    return {q, stride};
  }

  // In its place.
  void make_key(T* projected, int64_t position) const {
    kv_norm_.apply(projected, projected, shape_.latent);
    rotary_.turn(projected + shape_.latent, position);
  }

  // Leaves room for the latents of all heads.
  void turn_queries(const T* q, int64_t position, T* asked) const {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      T* turned = asked + h * shape_.dim + shape_.latent;
      std::copy_n(q + h * query() + still_, shape_.dim - shape_.latent, turned);
      rotary_.turn(turned, position);
    }
  }

  // to[tokens][to_stride] = by head its matrix of `count` elements from[tokens][from_stride]; heads are `from_step` and
  // `to_step` apart.
  void by_head(Workshop& shop, const std::vector<Linear<T>>& matrices, const T* from, int64_t from_stride,
               int64_t from_step, int64_t count, int64_t tokens, T* to, int64_t to_stride, int64_t to_step) const {
    const int64_t blocks = (tokens + kHeadRows - 1) / kHeadRows;
    shop.team.run(shape_.heads * blocks, [&](int64_t chunk, int64_t worker) {
      const int64_t head = chunk / blocks, first = chunk % blocks * kHeadRows, rows = std::min(kHeadRows, tokens - first);
      const Linear<T>& matrix = matrices[head];
      const int64_t depth = matrix.depth();
      Scratch& scratch = shop.scratch[worker];
      T* x = scratch.take<T>(2, round_up(rows, kRows) * depth);
      for (int64_t row = 0; row < rows; ++row) {
        std::copy_n(from + (first + row) * from_stride + head * from_step, count, x + row * depth);
        std::fill(x + row * depth + count, x + (row + 1) * depth, T(0.0f));
      }
      for (int64_t panel = 0; panel < matrix.panels(); ++panel) {
        const float* found = matrix.outputs_of(scratch, x, rows, panel, matrix.weights_of(panel + 1));
        const int64_t wanted = std::min(kPanel, matrix.outputs() - panel * kPanel);
        for (int64_t row = 0; row < rows; ++row) {
          T* out = to + (first + row) * to_stride + head * to_step + panel * kPanel;
          for (int64_t i = 0; i < wanted; ++i) narrow(found[row * kPanel + i], out[i]);
        }
      }
    });
  }

  // Keys stand at the ends of projected[tokens].
  template <typename S>
  void store_and_attend(Workshop& shop, const Plan& plan, const Stored<S>& stored, const T* projected, int64_t tokens,
                        T* asked) const {
    const int64_t width = into_.outputs();
    shop.in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t)
        store_heads(projected + (t + 1) * width - shape_.dim, 1, shape_.dim, stored.keys + plan.slots[t] * shape_.dim,
                    stored.key_scale(plan.slots[t]));
    });
    attend(shop, plan, stored, asked);
  }

  // Puts what queries attend to in their place. Heads part only if there is not enough to do otherwise: all of them read
  // the same keys.
  template <typename S>
  void attend(Workshop& shop, const Plan& plan, const Stored<S>& stored, T* asked) const {
    const int64_t groups = static_cast<int64_t>(plan.groups->size()), width = shape_.q_width();
    const int64_t parts = groups < 2 * shop.team.size() ? std::max<int64_t>(1, shape_.heads / kPartHeads) : 1;
    shop.team.run(groups * parts, [&](int64_t chunk, int64_t worker) {
      const int64_t part = chunk % parts, first = part * shape_.heads / parts, last = (part + 1) * shape_.heads / parts;
      const Shape shape{last - first, 1, shape_.dim, shape_.latent};
      T* rows = asked + first * shape_.dim;
      const Block<T> block{rows, rows, width, width, nullptr, 0, 0};
      slipstream::attend(shape, weighing_, (*plan.groups)[chunk / parts], block, stored, 0, 1, shop.scratch[worker]);
    });
  }

  Shape shape_;
  int64_t still_, value_;
  Linear<T> into_;
  std::optional<Norm> q_norm_;
  std::optional<Linear<T>> queries_;
  Norm kv_norm_;
  std::vector<Linear<T>> absorb_, expand_;
  Linear<T> out_;
  Rotary rotary_;
  Weighing weighing_{};
  size_t place_;
};

}  // namespace slipstream
