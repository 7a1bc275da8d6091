// A mixture of experts: an MLP for each, applied to the tokens that chose it, and one for all tokens if there is one.
//
// Tokens are sorted by expert, so that each panel is read once for all that need it; one token reads the panels of its
// own experts. All of them are in one phase of the team, whatever expert they belong to.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "blocks.h"
#include "routing.h"

namespace slipstream {

template <typename T>
class Experts {
  // What one expert does in a step: x[rows] to inner[rows] to out[rows], out of `width_` elements.
  struct Share {
    const Mlp<T>* mlp;
    const T* x;
    T *inner, *out;
    int64_t rows;
  };

  // A panel of a matrix, for some of a share's rows.
  struct Part {
    int64_t panel, from, rows;
  };

 public:
  // What a step needs between `begin` and `apply`; kept from layer to layer for its buffers.
  struct Work {
    Routing routing;
    std::vector<Share> shares;
    std::vector<int64_t> chunks;  // by share, of it and all before it
    std::vector<float> common;    // by token: the weight of the expert of all
    Scratch room;
  };

  explicit Experts(const ExpertsParts& parts)
      : router_(std::get<0>(parts)),
        hidden_(std::get<3>(parts).size(1)),
        width_(round_up(hidden_, kPanel)),
        weighs_inputs_(std::get<10>(parts)) {
    const auto& [router, into, into_bias, down, down_bias, gated, activation, clamp, shared, gate, weighs] = parts;
    const auto of = [](const MaybeTensor& bias, int64_t e) -> MaybeTensor {
      return bias ? MaybeTensor((*bias)[e]) : std::nullopt;
    };
    std::optional<Clamp> limits;
    if (clamp)
      limits = Clamp{static_cast<float>(std::get<0>(*clamp)), static_cast<float>(std::get<1>(*clamp)),
                     static_cast<float>(std::get<2>(*clamp))};
    for (int64_t e = 0; e < router_.experts(); ++e)
      mlps_.emplace_back(MlpParts{Matrix{into[e], std::nullopt, of(into_bias, e), std::nullopt},
                                  Matrix{down[e], std::nullopt, of(down_bias, e), std::nullopt}, gated, activation,
                                  std::nullopt},
                         limits);
    if (shared) shared_.emplace(*shared);
    if (gate) gate_ = gate->contiguous().view({-1});
  }

  // Chooses experts for normed[tokens] by asked[tokens], mostly the same, and has all of them compute what is between their
  // two products.
  void begin(Workshop& shop, Work& work, const T* asked, const T* normed, int64_t tokens) const {
    router_.route(shop, work.room, asked, tokens, work.routing);
    weigh_common(work, normed, tokens);
    share_out(shop, work, normed, tokens);
    each_panel(shop, work, &Mlp<T>::into, [](const Share& share, const Part& part, const void* next, Scratch& scratch) {
      const Mlp<T>& mlp = *share.mlp;
      mlp.inner_panel(scratch, share.x + part.from * mlp.into().depth(), part.rows, part.panel, next,
                      share.inner + part.from * mlp.down().depth());
    });
  }

  // Calls sink(row, first output, sums as float[64], how many of them exist), as `Linear::apply` does, for what `begin`
  // has prepared. A token's sum is made expert by expert, whatever other tokens there are.
  template <typename Sink>
  void apply(Workshop& shop, Work& work, int64_t tokens, const Sink& sink) const {
    if (tokens == 1) return apply_alone(shop, work, sink);
    const auto write = [this](const Share& share, const Part& part, const void* next, Scratch& scratch) {
      const Linear<T>& down = share.mlp->down();
      const T* inner = share.inner + part.from * down.depth();
      const float* found = down.outputs_of(scratch, inner, part.rows, part.panel, next);
      for (int64_t row = 0; row < part.rows; ++row)
        round_panel(found + row * kPanel, share.out + (part.from + row) * width_ + part.panel * kPanel);
    };
    each_panel(shop, work, &Mlp<T>::down, write);
    const Routing& routing = work.routing;
    const T* out = work.shares.front().out;
    const T* common = shared_ ? work.shares.back().out : nullptr;
    shop.in_blocks(tokens, kSumTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t)
        for (int64_t first = 0; first < hidden_; first += kPanel) {
          float sum[kPanel] = {};
          for (int64_t entry = t * routing.top_k; entry < (t + 1) * routing.top_k; ++entry)
            add_weighted(sum, out + routing.rows[entry] * width_ + first, weight(routing, entry));
          if (common) add_weighted(sum, common + t * width_ + first, work.common[t]);
          sink(t, first, sum, std::min(kPanel, hidden_ - first));
        }
    });
  }

 private:
  static constexpr int64_t kSumTokens = 4, kGatherRows = 8;

  // Every chunk of `matrix` of every share, in one phase: each(share, part, the weights after it, scratch).
  template <typename Of, typename Each>
  void each_panel(Workshop& shop, Work& work, Of matrix, const Each& each) const {
    work.chunks.clear();
    int64_t count = 0;
    for (const Share& share : work.shares)
      work.chunks.push_back(count += (share.mlp->*matrix)().panels() * blocks(share));
    // The share of a chunk, and which of the share's chunks it is.
    const auto place_of = [&](int64_t chunk) -> std::pair<const Share&, int64_t> {
      const size_t place = std::upper_bound(work.chunks.begin(), work.chunks.end(), chunk) - work.chunks.begin();
      return {work.shares[place], place > 0 ? chunk - work.chunks[place - 1] : chunk};
    };
    shop.team.run(count, [&](int64_t chunk, int64_t worker) {
      const auto [share, own] = place_of(chunk);
      const int64_t from = own % blocks(share) * Linear<T>::kBlock;
      const int64_t rows = std::min(Linear<T>::kBlock, share.rows - from);
      const void* next = nullptr;
      if (chunk + shop.team.size() < count) {
        const auto [behind, its] = place_of(chunk + shop.team.size());
        next = (behind.mlp->*matrix)().weights_of(its / blocks(behind));
      }
      each(share, Part{own / blocks(share), from, rows}, next, shop.scratch[worker]);
    });
  }

  static int64_t blocks(const Share& share) { return (share.rows + Linear<T>::kBlock - 1) / Linear<T>::kBlock; }

  // One token's experts each have one row, so their outputs are summed while they are at hand.
  template <typename Sink>
  void apply_alone(Workshop& shop, Work& work, const Sink& sink) const {
    shop.team.run(width_ / kPanel, [&](int64_t panel, int64_t worker) {
      alignas(64) float sum[kPanel] = {};
      alignas(64) T rounded[kPanel];
      for (size_t place = 0; place < work.shares.size(); ++place) {
        const Share& share = work.shares[place];
        const Linear<T>& down = share.mlp->down();
        round_panel(down.outputs_of(shop.scratch[worker], share.inner, 1, panel, nullptr), rounded);
        const bool common = shared_ && place + 1 == work.shares.size();
        add_weighted(sum, rounded, common ? work.common[0] : weight(work.routing, static_cast<int64_t>(place)));
      }
      sink(0, panel * kPanel, sum, std::min(kPanel, hidden_ - panel * kPanel));
    });
  }

  float weight(const Routing& routing, int64_t entry) const { return weighs_inputs_ ? 1.0f : routing.weights[entry]; }

  void weigh_common(Work& work, const T* normed, int64_t tokens) const {
    work.common.assign(tokens, 1.0f);
    if (!gate_) return;
    const T* gate = gate_->const_data_ptr<T>();
    const int64_t stride = round_up(hidden_, kDepth);
    for (int64_t t = 0; t < tokens; ++t)
      work.common[t] = 1.0f / (1.0f + std::exp(-dot(normed + t * stride, gate, hidden_)));
  }

  // The rows of every expert that was chosen, then all tokens for the expert of all.
  void share_out(Workshop& shop, Work& work, const T* normed, int64_t tokens) const {
    const Routing& routing = work.routing;
    const int64_t rows = tokens * routing.top_k, stride = mlps_[0].into().depth(), inner = mlps_[0].down().depth();
    const bool gathers = tokens > 1 || weighs_inputs_;
    T* x = gathers ? gather(shop, work, normed, rows, stride) : nullptr;
    T* inside = work.room.template take<T>(3, filled(rows) * inner);
    T* out = work.room.template take<T>(4, filled(rows) * width_);
    work.shares.clear();
    for (int64_t e = 0; e < router_.experts(); ++e) {
      const int64_t begin = routing.begins[e], count = routing.begins[e + 1] - begin;
      if (count > 0)
        work.shares.push_back({&mlps_[e], gathers ? x + begin * stride : normed, inside + begin * inner,
                               out + begin * width_, count});
    }
    if (!shared_) return;
    T* own = work.room.template take<T>(5, filled(tokens) * shared_->down().depth());
    work.shares.push_back({&*shared_, normed, own, work.room.template take<T>(6, filled(tokens) * width_), tokens});
  }

  // Products touch rows up to a multiple of kRows, wherever an expert's begin.
  static int64_t filled(int64_t rows) { return rows + kRows; }

  T* gather(Workshop& shop, Work& work, const T* normed, int64_t rows, int64_t stride) const {
    const Routing& routing = work.routing;
    T* x = work.room.template take<T>(2, filled(rows) * stride);
    if (weighs_inputs_) {
      for (size_t entry = 0; entry < routing.rows.size(); ++entry) {
        const T* from = normed + static_cast<int64_t>(entry) / routing.top_k * stride;
        T* to = x + routing.rows[entry] * stride;
        for (int64_t i = 0; i < stride; ++i) narrow(widen(from[i]) * routing.weights[entry], to[i]);
      }
      return x;
    }
    shop.in_blocks(rows, kGatherRows, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        std::copy_n(normed + routing.tokens[row] * stride, stride, x + row * stride);
    });
    return x;
  }

  // As a tensor of T between an expert and the sum would be.
  static void round_panel(const float* found, T* out) {
    for (int64_t i = 0; i < kPanel; i += kLanes) store(load(found + i), out + i);
  }

  static void add_weighted(float* sum, const T* from, float weight) {
    for (int64_t i = 0; i < kPanel; i += kLanes) store(multiply_add(load(from + i), weight, load(sum + i)), sum + i);
  }

  Router<T> router_;
  int64_t hidden_, width_;
  bool weighs_inputs_;
  std::vector<Mlp<T>> mlps_;
  std::optional<Mlp<T>> shared_;
  MaybeTensor gate_;
};

}  // namespace slipstream
