// Attention over pages of KV, read through the table of slots: 64 keys at a time become a panel of weights, which the
// queries of a block, or the heads of one token that share a KV head, are multiplied with.

#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "activations.h"
#include "code_panels.h"
#include "number_panels.h"
#include "sharing.h"

namespace slipstream {

// How one layer weighs keys. `cap`: 0, or what scores are bent to stay below. `window`: 0, or how many keys a query sees,
// its own included. `chunk`: 0, or the length of chunks that no query sees beyond. `sinks`: null, or by head the score of
// a key without a value, which everybody sees. `both_ways`: queries see the keys behind them too.
struct Weighing {
  float scale, cap;
  int64_t window, chunk;
  const float* sinks;
  bool both_ways = false;
  // Null, or [H][stride]: what scores get before they are scaled, `origin` for a query's own key and places from there on
  // for those behind it; readable for 64 keys more.
  const float* distances = nullptr;
  int64_t stride = 0, origin = 0;
  // Null, or by head how much less a key scores for each token that it is farther behind its query, once it is scaled.
  const float* slopes = nullptr;

  bool hides() const { return window > 0 || chunk > 0; }

  // The first key that the query at `position` sees.
  int64_t first(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  }
};

// Tokens that read the same keys: consecutive ones of one request (a part of a prompt, or the one that is decoded), or of
// several, as far as their prefix is the same. Queries and outputs have all H heads of a token side by side.
template <typename T>
struct Block {
  const T* q;
  T* out;
  int64_t q_stride, out_stride;
  const int64_t* places;     // by token: its row of q and out
  int64_t tokens, position;  // how many, and the position of the first
  int64_t sees = 0;          // as of a piece
  const int64_t* positions = nullptr;  // by row of q
};

// Softmax as it goes along (Milakov and Gimelshein 2018; FlashAttention, Dao 2022), for KV heads `first` to `last`. Heads
// of a token lie side by side in its pages: with all of them at once, memory is read in order, which is several times
// faster than a head at a time. Panels: what keys and values are packed to, and multiplied as.
template <typename T, typename S, typename Panels>
class BlockAttention {
 public:
  // `room` is the first of the eight places of `scratch` that are used.
  BlockAttention(const Shape& shape, const Weighing& weighing, const Block<T>& block, const Pages<S>& pages,
                 int64_t first, int64_t last, Scratch& scratch, int64_t room)
      : shape_(shape),
        weighing_(weighing),
        block_(block),
        walk_(shape, pages, first, last - first),
        first_(first),
        heads_(last - first),
        of_{shape, heads_, block.tokens * shape.group(), scratch.invariant()},
        rows_(of_.rows),
        width_(of_.panels()),
        padded_(of_.padded()),
        panels_(of_, scratch, room),
        scores_(scratch.take<float>(room + 4, padded_ * kPanel)),
        sums_(scratch.take<float>(room + 5, heads_ * width_ * padded_ * kPanel)),
        tops_(scratch.take<float>(room + 6, heads_ * rows_)),
        totals_(scratch.take<float>(room + 7, heads_ * (rows_ + (kCodes ? 2 * kPanel : 0)))),
        key_scales_(totals_ + heads_ * rows_),
        value_scales_(key_scales_ + heads_ * kPanel) {
    const int64_t group = shape.group();
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t row = 0; row < rows_; ++row)
        panels_.ask(h, row, block.q + place(row) * block.q_stride + ((first + h) * group + row % group) * shape.dim);
  }

  // Nothing was read yet.
  void begin() {
    std::fill_n(sums_, heads_ * width_ * padded_ * kPanel, 0.0f);
    std::fill_n(tops_, heads_ * rows_, -std::numeric_limits<float>::infinity());
    std::fill_n(totals_, heads_ * rows_, 0.0f);
    if (weighing_.sinks == nullptr) return;
    for (int64_t i = 0; i < heads_ * rows_; ++i) {
      tops_[i] = weighing_.sinks[(first_ + i / rows_) * shape_.group() + i % rows_ % shape_.group()];
      totals_[i] = 1.0f;
    }
  }

  // Goes on from what `other` read, whose tokens from `token` on are these.
  void go_on(const BlockAttention& other, int64_t token) {
    const int64_t from = token * shape_.group();
    for (int64_t h = 0; h < heads_; ++h) {
      std::copy_n(other.tops_ + h * other.rows_ + from, rows_, tops_ + h * rows_);
      std::copy_n(other.totals_ + h * other.rows_ + from, rows_, totals_ + h * rows_);
    }
    for (int64_t part = 0; part < heads_ * width_; ++part) {
      float* sums = sums_ + part * padded_ * kPanel;
      std::copy_n(other.sums_ + (part * other.padded_ + from) * kPanel, rows_ * kPanel, sums);
      std::fill_n(sums + rows_ * kPanel, (padded_ - rows_) * kPanel, 0.0f);
    }
  }

  // Reads keys `from` to `end`, each as far as it lies before a token, within its window or chunk, or is its own.
  void read(int64_t from, int64_t end) {
    walk_.begin(from, end);
    // Keys then have the places in panels that they have for every other block, and sums the same order.
    if (of_.invariant) from = from / kPanel * kPanel;
    for (; from < end; from += kPanel) {
      const int64_t count = std::min(kPanel, end - from);
      if constexpr (kCodes) look_up_scales(from, count);
      panels_.pack_keys(walk_, from, count);
      for (int64_t h = 0; h < heads_; ++h) {
        panels_.score(h, scores_);
        for (int64_t token = 0; token < block_.tokens; ++token) weigh(h, token, from, count);
      }
      panels_.pack_values(walk_, from, count);
      for (int64_t h = 0; h < heads_; ++h) panels_.add(h, sums_ + h * width_ * padded_ * kPanel);
    }
  }

  void finish() {
    const int64_t group = shape_.group(), dim = shape_.dim;
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t row = 0; row < rows_; ++row) {
        const float factor = 1.0f / totals_[h * rows_ + row];
        T* to = block_.out + place(row) * block_.out_stride + ((first_ + h) * group + row % group) * dim;
        for (int64_t d = 0; d < shape_.value_dim(); ++d)
          narrow(sums_[((h * width_ + d / kPanel) * padded_ + row) * kPanel + Panels::place(d % kPanel)] * factor, to[d]);
      }
  }

 private:
  static constexpr bool kCodes = Stored<S>::kCodes;

  int64_t place(int64_t row) const { return block_.places[row / shape_.group()]; }

  // By head, the scales of the keys and values of a panel.
  void look_up_scales(int64_t from, int64_t count) {
    const uint8_t* of[2][kPanel];
    for (int64_t k = 0; k < count; ++k) {
      of[0][k] = walk_.find_scale(walk_.stored().key_scales, from + k);
      of[1][k] = walk_.find_scale(walk_.stored().value_scales, from + k);
    }
    // As bytes side by side first: they then become floats as many at a time as there are lanes.
    uint8_t together[kPanel] = {};
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t of_values = 0; of_values < 2; ++of_values) {
        for (int64_t k = 0; k < count; ++k) together[k] = of[of_values][k][h];
        float* to = (of_values ? value_scales_ : key_scales_) + h * kPanel;
        for (int64_t k = 0; k < kPanel; k += kLanes) store(powers_of(together + k), to + k);
      }
  }

  // The rows of one token, which see the same keys.
  void weigh(int64_t head, int64_t token, int64_t from, int64_t count) {
    const int64_t position = block_.position + token, group = shape_.group();
    const int64_t end = std::max(position + 1, block_.sees);
    const int64_t seen = weighing_.both_ways ? count : std::clamp<int64_t>(end - from, 0, count);
    const int64_t hidden = weighing_.hides() ? std::clamp<int64_t>(weighing_.first(position) - from, 0, count) : 0;
    for (int64_t row = token * group; row < (token + 1) * group; ++row) {
      if constexpr (kCodes) multiply_scores(row, key_scales_ + head * kPanel);
      if (weighing_.slopes != nullptr) lean(head, row, from);
      if (weighing_.distances != nullptr) {
        const int64_t of = (first_ + head) * group + row % group;
        add_to_scores(row, weighing_.distances + of * weighing_.stride + weighing_.origin + from - position);
      }
      weigh_row(head, row, static_cast<int32_t>(seen), hidden);
    }
  }

  void multiply_scores(int64_t row, const float* by) {
    float* scores = scores_ + row * kPanel;
    for (int64_t i = 0; i < kPanel; i += kLanes) store(load(scores + i) * load(by + i), scores + i);
  }

  // Adds what distance takes off scores. Before they are scaled, as all that comes to them.
  void lean(int64_t head, int64_t row, int64_t from) {
    const int64_t of = (first_ + head) * shape_.group() + row % shape_.group();
    const float slope = weighing_.slopes[of] / weighing_.scale;
    const float first = static_cast<float>(from - block_.positions[place(row)]);
    float* scores = scores_ + row * kPanel;
    Floats lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
    for (int64_t i = 0; i < kPanel; i += kLanes)
      store(load(scores + i) + (lanes + (first + static_cast<float>(i))) * slope, scores + i);
  }

  void add_to_scores(int64_t row, const float* more) {
    float* scores = scores_ + row * kPanel;
    for (int64_t i = 0; i < kPanel; i += kLanes) store(load(scores + i) + load(more + i), scores + i);
  }

  // Turns a row of scores into weights against the greatest score so far, and what was summed to the new scale. Of the
  // keys, it sees the first `seen` without the first `hidden`.
  void weigh_row(int64_t head, int64_t row, int32_t seen, int64_t hidden) {
    constexpr int kParts = kPanel / kLanes;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const float scale = weighing_.scale, before = tops_[head * rows_ + row];
    if (weighing_.cap > 0.0f) bend(scores_ + row * kPanel);
    std::fill_n(scores_ + row * kPanel, hidden, kNone);
    Ints lanes;
    for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    Floats scores[kParts], weights[kParts], tops = Floats{} + before, total{};
    for (int p = 0; p < kParts; ++p) {
      const Floats score = load(scores_ + row * kPanel + p * kLanes) * scale;
      scores[p] = lanes + static_cast<int32_t>(p * kLanes) < seen ? score : Floats{} + kNone;
      tops = scores[p] > tops ? scores[p] : tops;
    }
    const float top = max_of(tops);
    for (int p = 0; p < kParts; ++p) {
      weights[p] = scores[p] == kNone ? Floats{} : exp_of(scores[p] - top);
      total += weights[p];
      // What is not seen may have any scale, and no number too.
      if constexpr (kCodes) {
        const Floats scaled = weights[p] * load(value_scales_ + head * kPanel + p * kLanes);
        weights[p] = scores[p] == kNone ? Floats{} : scaled;
      }
    }
    panels_.weigh(head, row, weights);
    if (top != before && before != kNone) rescale(head, row, std::exp(before - top));
    tops_[head * rows_ + row] = top;
    totals_[head * rows_ + row] += sum_of(total);
  }

  // Bends scores before they are scaled.
  void bend(float* scores) const {
    const float in = weighing_.scale / weighing_.cap, out = weighing_.cap / weighing_.scale;
    for (int64_t i = 0; i < kPanel; i += kLanes) store(tanh_of(load(scores + i) * in) * out, scores + i);
  }

  void rescale(int64_t head, int64_t row, float factor) {
    totals_[head * rows_ + row] *= factor;
    for (int64_t p = 0; p < width_; ++p) {
      float* sums = sums_ + ((head * width_ + p) * padded_ + row) * kPanel;
      for (int64_t i = 0; i < kPanel; i += kLanes) store(load(sums + i) * factor, sums + i);
    }
  }

  const Shape& shape_;
  const Weighing& weighing_;
  const Block<T>& block_;
  Walk<S> walk_;
  int64_t first_, heads_;
  Rows of_;
  int64_t rows_, width_, padded_;
  Panels panels_;
  float *scores_, *sums_, *tops_, *totals_;
  float *key_scales_, *value_scales_;  // by head those of a panel, where there are codes
};

// Attention of a group for KV heads `first` to `last`: what all share is read for all at once, the rest by each. Nobody
// shares where there is a window: keys that have left it may be anybody's by now, so not one of them is read.
template <typename Panels, typename T, typename S>
void attend_by(const Shape& shape, const Weighing& weighing, const Group& group, Block<T> block, const Stored<S>& stored,
               int64_t first, int64_t last, Scratch& scratch) {
  // The last key that is shared lies before every token.
  block.position = group.shared;
  const Pages<S> shared{stored, group.pieces[0].table};
  std::optional<BlockAttention<T, S, Panels>> together;
  if (group.shared > 0) {
    together.emplace(shape, weighing, block, shared, first, last, scratch, 8);
    together->begin();
    together->read(0, group.shared);
  }
  int64_t done = 0;
  for (int64_t i = 0; i < group.count; ++i) {
    const Piece& piece = group.pieces[i];
    Block<T> own = block;
    own.places += done;
    own.tokens = piece.tokens;
    own.position = piece.position;
    own.sees = piece.sees;
    const Pages<S> pages{stored, piece.table};
    BlockAttention<T, S, Panels> alone(shape, weighing, own, pages, first, last, scratch, 0);
    if (together) {
      alone.go_on(*together, done);
    } else {
      alone.begin();
    }
    alone.read(std::max(group.shared, weighing.first(piece.position)), piece.end());
    alone.finish();
    done += piece.tokens;
  }
}

// The same by what is quickest for these rows. Tiles multiply many, or all where rows shall be invariant.
template <typename T, typename S>
void attend(const Shape& shape, const Weighing& weighing, const Group& group, Block<T> block, const Stored<S>& stored,
            int64_t first, int64_t last, Scratch& scratch) {
  block.places = group.tokens;
  block.tokens = 0;
  for (int64_t i = 0; i < group.count; ++i) block.tokens += group.pieces[i].tokens;
  if constexpr (kMultipliesCodes && Stored<S>::kCodes && sizeof(T) == 2) {
    const bool tiles = tiles_take(block.tokens * shape.group(), scratch.invariant());
    if (!tiles && shape.dim <= kMostOfCodes)
      return attend_by<CodePanels>(shape, weighing, group, block, stored, first, last, scratch);
  }
  attend_by<NumberPanels<T, S>>(shape, weighing, group, block, stored, first, last, scratch);
}

}  // namespace slipstream
