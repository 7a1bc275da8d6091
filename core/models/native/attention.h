// Attention over pages of KV, read through the table of slots: 64 keys at a time become a panel of weights, which the
// queries of a block, or the heads of one token that share a KV head, are multiplied with.

#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "activations.h"
#include "kernels.h"
#include "panels.h"
#include "scratch.h"
#include "sharing.h"
#include "stored.h"

namespace slipstream {

// One layer's pages, and where the tokens of one request are in them.
template <typename S>
struct Pages {
  const Stored<S>& stored;
  const int32_t* table;  // [tokens]
};

// How one layer weighs keys. `cap`: 0, or what scores are bent to stay below. `window`: 0, or how many keys a query sees,
// its own included. `chunk`: 0, or the length of chunks that no query sees beyond. `sinks`: null, or by head the score of
// a key without a value, which everybody sees.
struct Weighing {
  float scale, cap;
  int64_t window, chunk;
  const float* sinks;

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
};

// Softmax as it goes along (Milakov and Gimelshein 2018; FlashAttention, Dao 2022), for KV heads `first` to `last`. Heads
// of a token lie side by side in its pages: with all of them at once, memory is read in order, which is several times
// faster than a head at a time.
template <typename T, typename S>
class BlockAttention {
 public:
  // `room` is the first of the eight places of `scratch` that are used.
  BlockAttention(const Shape& shape, const Weighing& weighing, const Block<T>& block, const Pages<S>& pages,
                 int64_t first, int64_t last, Scratch& scratch, int64_t room)
      : shape_(shape),
        weighing_(weighing),
        block_(block),
        pages_(pages),
        first_(first),
        heads_(last - first),
        rows_(block.tokens * shape.group()),
        depth_(round_up(shape.dim, kDepth)),
        panels_(round_up(shape.value_dim(), kPanel) / kPanel),
        padded_(round_up(rows_, kRows)),
        invariant_(scratch.invariant()),
        q_(scratch.take<T>(room, heads_ * padded_ * depth_)),
        keys_(scratch.take<T>(room + 1, heads_ * depth_ * kPanel)),
        values_(scratch.take<T>(room + 2, heads_ * panels_ * kPanel * kPanel)),
        scores_(scratch.take<float>(room + 3, padded_ * kPanel)),
        weights_(scratch.take<T>(room + 4, heads_ * padded_ * kPanel)),
        sums_(scratch.take<float>(room + 5, heads_ * panels_ * padded_ * kPanel)),
        tops_(scratch.take<float>(room + 6, heads_ * rows_)),
        totals_(scratch.take<float>(room + 7, heads_ * (rows_ + (kCodes ? 2 * kPanel : 0)))),
        key_scales_(totals_ + heads_ * rows_),
        value_scales_(key_scales_ + heads_ * kPanel) {
    ask();
  }

  // Nothing was read yet.
  void begin() {
    std::fill_n(sums_, heads_ * panels_ * padded_ * kPanel, 0.0f);
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
    for (int64_t part = 0; part < heads_ * panels_; ++part) {
      float* sums = sums_ + part * padded_ * kPanel;
      std::copy_n(other.sums_ + (part * other.padded_ + from) * kPanel, rows_ * kPanel, sums);
      std::fill_n(sums + rows_ * kPanel, (padded_ - rows_) * kPanel, 0.0f);
    }
  }

  // Reads keys `from` to `end`, each as far as it lies before a token, within its window or chunk, or is its own.
  void read(int64_t from, int64_t end) {
    first_key_ = from;
    end_ = end;
    // Keys then have the places in panels that they have for every other block, and sums the same order.
    if (invariant_) from = from / kPanel * kPanel;
    for (; from < end; from += kPanel) {
      const int64_t count = std::min(kPanel, end - from);
      if constexpr (kCodes) look_up_scales(from, count);
      pack_keys(from, count);
      for (int64_t h = 0; h < heads_; ++h) {
        multiply<false>(q_ + h * padded_ * depth_, depth_, rows_, keys_ + h * depth_ * kPanel, depth_, scores_,
                        false, invariant_);
        for (int64_t token = 0; token < block_.tokens; ++token) weigh(h, token, from, count);
      }
      pack_values(from, count);
      for (int64_t part = 0; part < heads_ * panels_; ++part)
        multiply<false>(weights_ + part / panels_ * padded_ * kPanel, kPanel, rows_, values_ + part * kPanel * kPanel,
                        kPanel, sums_ + part * padded_ * kPanel, true, invariant_);
    }
  }

  void finish() {
    const int64_t group = shape_.group(), dim = shape_.dim;
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t row = 0; row < rows_; ++row) {
        const float factor = 1.0f / totals_[h * rows_ + row];
        T* to = block_.out + place(row) * block_.out_stride + ((first_ + h) * group + row % group) * dim;
        for (int64_t d = 0; d < shape_.value_dim(); ++d)
          narrow(sums_[((h * panels_ + d / kPanel) * padded_ + row) * kPanel + d % kPanel] * factor, to[d]);
      }
  }

 private:
  static constexpr bool kCodes = Stored<S>::kCodes;
  static constexpr int64_t kWord = 4 / static_cast<int64_t>(sizeof(T));

  int64_t place(int64_t row) const { return block_.places[row / shape_.group()]; }

  // Lines up the queries.
  void ask() {
    const int64_t group = shape_.group(), dim = shape_.dim;
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t row = 0; row < rows_; ++row) {
        T* to = q_ + (h * padded_ + row) * depth_;
        std::copy_n(block_.q + place(row) * block_.q_stride + ((first_ + h) * group + row % group) * dim, dim, to);
        std::fill(to + dim, to + depth_, T(0.0f));
      }
  }

  // What is at `token` in one of a layer's two tensors, from head `first` on. In the places of tokens that left the window
  // of all queries stands the first that has not: their own slots may be anybody's, and weights hide all of them.
  const S* find(const S* base, int64_t token) const {
    return base + slot(token) * shape_.kv_width() + first_ * shape_.dim;
  }

  int64_t slot(int64_t token) const { return pages_.table[std::max(token, first_key_)]; }

  // By head, the scales of the keys and values of a panel.
  void look_up_scales(int64_t from, int64_t count) {
    const uint8_t* of[2][kPanel];
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = slot(from + k) * shape_.kv_heads + first_;
      of[0][k] = pages_.stored.key_scales + at;
      of[1][k] = pages_.stored.value_scales + at;
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

  // Asks for some later tokens: pages lie anywhere, and nothing else knows which comes next.
  void fetch(const S* base, int64_t from) const {
    const int64_t bytes = heads_ * shape_.dim * static_cast<int64_t>(sizeof(S));
    for (int64_t token = from; token < std::min(end_, from + kLanes); ++token) {
      const char* here = reinterpret_cast<const char*>(find(base, token));
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(here + at);
    }
  }

  // Keys are rows and shall be columns: a panel's words (pairs of bfloat16, single floats) are turned as many at a time as there are lanes.
  void pack_keys(int64_t from, int64_t count) {
    const int64_t dim = shape_.dim, words = dim / (kLanes * kWord) * kLanes, whole = words * kWord;
    if (whole < depth_)
      for (int64_t h = 0; h < heads_; ++h)
        std::fill_n(keys_ + (h * depth_ + whole) * kPanel, (depth_ - whole) * kPanel, T(0.0f));
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t present = std::clamp<int64_t>(count - first, 0, kLanes);
      const S* key[kLanes];
      for (int64_t k = 0; k < present; ++k) key[k] = find(pages_.stored.keys, from + first + k);
      if (first + kLanes < kPanel) fetch(pages_.stored.keys, from + first + kLanes);
      if (first + kLanes == kPanel) fetch(pages_.stored.values, from);
      for (int64_t h = 0; h < heads_; ++h) {
        T* panel = keys_ + h * depth_ * kPanel;
        int64_t word = 0;
        if constexpr (kCodes)
          for (constexpr int64_t kStep = 4 * kLanes / kWord; word + kStep <= words; word += kStep)
            turn_codes(key, present, h * dim + word * kWord, panel + (word * kPanel + first) * kWord);
        for (; word < words; word += kLanes)
          turn(key, present, h * dim + word * kWord, panel + (word * kPanel + first) * kWord);
        for (int64_t k = 0; k < present; ++k)
          for (int64_t d = whole; d < dim; ++d) panel[panel_place<T>(first + k, d)] = as_number<T>(key[k][h * dim + d]);
      }
    }
  }

  // As many words as lanes, of as many keys, from element `at` on, as columns.
  static void turn(const S* const* key, int64_t present, int64_t at, T* to) {
    Words rows[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) {
      rows[k] = Words{};
      if (k < present) take_words(key[k] + at, rows[k]);
    }
    transpose(rows);
    for (int64_t w = 0; w < kLanes; ++w) std::memcpy(to + w * kPanel * kWord, &rows[w], sizeof(Words));
  }

  // Four times as many codes as lanes, turned four by four, and made numbers where they lie.
  static void turn_codes(const int8_t* const* key, int64_t present, int64_t at, T* to) {
    Words fours[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) {
      fours[k] = Words{};
      if (k < present) std::memcpy(&fours[k], key[k] + at, sizeof(Words));
    }
    transpose(fours);
    for (int64_t w = 0; w < kLanes; ++w) {
      Floats numbers[4];
      for (int i = 0; i < 4; ++i)
        numbers[i] = __builtin_convertvector(reinterpret_cast<Ints>(fours[w] << (24 - 8 * i)) >> 24, Floats);
      for (int i = 0; i < 4; i += kWord) {
        T* here = to + (4 * w + i) * kPanel;
        if constexpr (kWord == 2) {
          const Words low = reinterpret_cast<Words>(numbers[i]) >> 16;
          const Words both = low | (reinterpret_cast<Words>(numbers[i + 1]) & 0xffff0000u);
          std::memcpy(here, &both, sizeof(both));
        } else {
          store(numbers[i], here);
        }
      }
    }
  }

  static void take_words(const T* from, Words& to) { std::memcpy(&to, from, sizeof(to)); }

  template <typename Code, typename = std::enable_if_t<!std::is_same_v<Code, T>>>
  static void take_words(const Code* from, Words& to) {
    T numbers[kLanes * kWord];
    for (int64_t i = 0; i < kLanes * kWord; i += kLanes) store(load(from + i), numbers + i);
    std::memcpy(&to, numbers, sizeof(to));
  }

  void pack_values(int64_t from, int64_t count) {
    const int64_t dim = shape_.dim, wide = shape_.value_dim(), panel = kPanel * kPanel;
    if (count < kPanel || wide % kPanel != 0) std::fill_n(values_, heads_ * panels_ * panel, T(0.0f));
    for (int64_t k = 0; k < count; k += 2) {
      if (k % kLanes == 0) fetch(k + kLanes < kPanel ? pages_.stored.values : pages_.stored.keys, from + k + kLanes);
      const S* one = find(pages_.stored.values, from + k);
      const S* other = k + 1 < count ? find(pages_.stored.values, from + k + 1) : nullptr;
      for (int64_t h = 0; h < heads_; ++h) {
        T* to = values_ + h * panels_ * panel;
        int64_t d = other == nullptr ? 0 : pack_two(one + h * dim, other + h * dim, k, to);
        for (; d < wide; ++d) {
          to[d / kPanel * panel + panel_place<T>(d % kPanel, k)] = as_number<T>(one[h * dim + d]);
          if (other != nullptr) to[d / kPanel * panel + panel_place<T>(d % kPanel, k + 1)] =
              as_number<T>(other[h * dim + d]);
        }
      }
    }
  }

  // Packs the values of keys `k` (even) and k + 1 as far as whole vectors go; returns how far that is.
  int64_t pack_two(const S* one, const S* other, int64_t k, T* to) const {
    int64_t d = 0;
    for (; d + kLanes <= shape_.value_dim(); d += kLanes) {
      T* here = to + d / kPanel * kPanel * kPanel;
      if constexpr (sizeof(T) == 2) {
        const Words low = reinterpret_cast<Words>(load(one + d)) >> 16;
        const Words both = low | (reinterpret_cast<Words>(load(other + d)) & 0xffff0000u);
        std::memcpy(here + panel_place<T>(d % kPanel, k), &both, sizeof(both));
      } else {
        store(load(one + d), here + panel_place<T>(d % kPanel, k));
        store(load(other + d), here + panel_place<T>(d % kPanel, k + 1));
      }
    }
    return d;
  }

  // The rows of one token, which see the same keys.
  void weigh(int64_t head, int64_t token, int64_t from, int64_t count) {
    const int64_t position = block_.position + token, group = shape_.group();
    const int64_t seen = std::clamp<int64_t>(position + 1 - from, 0, count);
    const int64_t hidden = weighing_.hides() ? std::clamp<int64_t>(weighing_.first(position) - from, 0, count) : 0;
    for (int64_t row = token * group; row < (token + 1) * group; ++row)
      weigh_row(head, row, static_cast<int32_t>(seen), hidden);
  }

  // Turns a row of scores into weights against the greatest score so far, and what was summed to the new scale. Of the
  // keys, it sees the first `seen` without the first `hidden`.
  void weigh_row(int64_t head, int64_t row, int32_t seen, int64_t hidden) {
    constexpr int kParts = kPanel / kLanes;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const float scale = weighing_.scale, before = tops_[head * rows_ + row];
    if constexpr (kCodes)
      for (int64_t i = 0; i < kPanel; i += kLanes)
        store(load(scores_ + row * kPanel + i) * load(key_scales_ + head * kPanel + i), scores_ + row * kPanel + i);
    if (weighing_.cap > 0.0f) bend(scores_ + row * kPanel);
    std::fill_n(scores_ + row * kPanel, hidden, kNone);
    T* weights = weights_ + (head * padded_ + row) * kPanel;
    Ints lanes;
    for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    Floats scores[kParts], tops = Floats{} + before, total{};
    for (int p = 0; p < kParts; ++p) {
      const Floats score = load(scores_ + row * kPanel + p * kLanes) * scale;
      scores[p] = lanes + static_cast<int32_t>(p * kLanes) < seen ? score : Floats{} + kNone;
      tops = scores[p] > tops ? scores[p] : tops;
    }
    const float top = max_of(tops);
    for (int p = 0; p < kParts; ++p) {
      const Floats weight = scores[p] == kNone ? Floats{} : exp_of(scores[p] - top);
      total += weight;
      if constexpr (kCodes) {
        // What is not seen may have any scale, and no number too.
        const Floats scaled = weight * load(value_scales_ + head * kPanel + p * kLanes);
        store(scores[p] == kNone ? Floats{} : scaled, weights + p * kLanes);
      } else {
        store(weight, weights + p * kLanes);
      }
    }
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
    for (int64_t p = 0; p < panels_; ++p) {
      float* sums = sums_ + ((head * panels_ + p) * padded_ + row) * kPanel;
      for (int64_t i = 0; i < kPanel; i += kLanes) store(load(sums + i) * factor, sums + i);
    }
  }

  const Shape& shape_;
  const Weighing& weighing_;
  const Block<T>& block_;
  const Pages<S>& pages_;
  int64_t first_, heads_, rows_, depth_, panels_, padded_, first_key_ = 0, end_ = 0;
  bool invariant_;
  T *q_, *keys_, *values_;
  float* scores_;
  T* weights_;
  float *sums_, *tops_, *totals_;
  float *key_scales_, *value_scales_;  // by head those of a panel, where there are codes
};

// Attention of a group for KV heads `first` to `last`: what all share is read for all at once, the rest by each. Nobody
// shares where there is a window: keys that have left it may be anybody's by now, so not one of them is read.
template <typename T, typename S>
void attend(const Shape& shape, const Weighing& weighing, const Group& group, Block<T> block, const Stored<S>& stored,
            int64_t first, int64_t last, Scratch& scratch) {
  block.places = group.tokens;
  block.tokens = 0;
  for (int64_t i = 0; i < group.count; ++i) block.tokens += group.pieces[i].tokens;
  // The last key that is shared lies before every token.
  block.position = group.shared;
  const Pages<S> shared{stored, group.pieces[0].table};
  std::optional<BlockAttention<T, S>> together;
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
    const Pages<S> pages{stored, piece.table};
    BlockAttention<T, S> alone(shape, weighing, own, pages, first, last, scratch, 0);
    if (together) {
      alone.go_on(*together, done);
    } else {
      alone.begin();
    }
    alone.read(std::max(group.shared, weighing.first(piece.position)), piece.position + piece.tokens);
    alone.finish();
    done += piece.tokens;
  }
}

}  // namespace slipstream
