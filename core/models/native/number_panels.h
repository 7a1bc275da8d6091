// Panels of 64 keys and 64 values as the numbers that attention computes with, which codes are made here.

#pragma once

#include "kernels.h"
#include "pages.h"
#include "panels.h"
#include "scratch.h"

namespace slipstream {

// What all panels of a block's attention have in common: heads, and rows of queries of each.
struct Rows {
  const Shape& shape;
  int64_t heads, rows;
  bool invariant;

  int64_t depth() const { return round_up(shape.dim, kDepth); }
  // Panels of the sums of a row.
  int64_t panels() const { return round_up(shape.value_dim(), kPanel) / kPanel; }
  int64_t padded() const { return round_up(rows, kRows); }
};

template <typename T, typename S>
class NumberPanels {
 public:
  // `room` is the first of the four places of `scratch` that are used.
  NumberPanels(const Rows& rows, Scratch& scratch, int64_t room)
      : of_(rows),
        depth_(rows.depth()),
        panels_(rows.panels()),
        padded_(rows.padded()),
        q_(scratch.take<T>(room, rows.heads * padded_ * depth_)),
        keys_(scratch.take<T>(room + 1, rows.heads * depth_ * kPanel)),
        values_(scratch.take<T>(room + 2, rows.heads * panels_ * kPanel * kPanel)),
        weights_(scratch.take<T>(room + 3, rows.heads * padded_ * kPanel)) {}

  // Takes a row's query.
  void ask(int64_t head, int64_t row, const T* query) {
    T* to = q_ + (head * padded_ + row) * depth_;
    std::copy_n(query, of_.shape.dim, to);
    std::fill(to + of_.shape.dim, to + depth_, T(0.0f));
  }

  // Keys are rows and shall be columns: a panel's words (pairs of bfloat16, single floats) are turned as many at a time as
  // there are lanes.
  void pack_keys(const Walk<S>& walk, int64_t from, int64_t count) {
    const int64_t dim = of_.shape.dim, words = dim / (kLanes * kWord) * kLanes, whole = words * kWord;
    if (whole < depth_)
      for (int64_t h = 0; h < of_.heads; ++h)
        std::fill_n(keys_ + (h * depth_ + whole) * kPanel, (depth_ - whole) * kPanel, T(0.0f));
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t present = std::clamp<int64_t>(count - first, 0, kLanes);
      const S* key[kLanes];
      for (int64_t k = 0; k < present; ++k) key[k] = walk.find(walk.stored().keys, from + first + k);
      if (first + kLanes < kPanel) walk.fetch(walk.stored().keys, from + first + kLanes);
      if (first + kLanes == kPanel) walk.fetch(walk.stored().values, from);
      for (int64_t h = 0; h < of_.heads; ++h) {
        T* panel = keys_ + h * depth_ * kPanel;
        int64_t word = 0;
        if constexpr (Stored<S>::kCodes)
          for (constexpr int64_t kStep = 4 * kLanes / kWord; word + kStep <= words; word += kStep)
            turn_codes(key, present, h * dim + word * kWord, panel + (word * kPanel + first) * kWord);
        for (; word < words; word += kLanes)
          turn(key, present, h * dim + word * kWord, panel + (word * kPanel + first) * kWord);
        for (int64_t k = 0; k < present; ++k)
          for (int64_t d = whole; d < dim; ++d) panel[panel_place<T>(first + k, d)] = as_number<T>(key[k][h * dim + d]);
      }
    }
  }

  // scores[row][64] of all rows of a head.
  void score(int64_t head, float* scores) const {
    multiply<false>(q_ + head * padded_ * depth_, depth_, of_.rows, keys_ + head * depth_ * kPanel, depth_, scores, false,
                    of_.invariant);
  }

  // Takes a row's weights of 64 values.
  void weigh(int64_t head, int64_t row, const Floats* weights) {
    T* to = weights_ + (head * padded_ + row) * kPanel;
    for (int p = 0; p < kPanel / kLanes; ++p) store(weights[p], to + p * kLanes);
  }

  void pack_values(const Walk<S>& walk, int64_t from, int64_t count) {
    const int64_t dim = of_.shape.dim, wide = of_.shape.value_dim(), panel = kPanel * kPanel;
    if (count < kPanel || wide % kPanel != 0) std::fill_n(values_, of_.heads * panels_ * panel, T(0.0f));
    for (int64_t k = 0; k < count; k += 2) {
      if (k % kLanes == 0)
        walk.fetch(k + kLanes < kPanel ? walk.stored().values : walk.stored().keys, from + k + kLanes);
      const S* one = walk.find(walk.stored().values, from + k);
      const S* other = k + 1 < count ? walk.find(walk.stored().values, from + k + 1) : nullptr;
      for (int64_t h = 0; h < of_.heads; ++h) {
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

  // Adds weights times values to sums[panel][row][64] of all rows of a head.
  void add(int64_t head, float* sums) const {
    for (int64_t p = 0; p < panels_; ++p)
      multiply<false>(weights_ + head * padded_ * kPanel, kPanel, of_.rows,
                      values_ + (head * panels_ + p) * kPanel * kPanel, kPanel, sums + p * padded_ * kPanel, true,
                      of_.invariant);
  }

  // Where among the 64 sums of a panel that of element `d` is.
  static int64_t place(int64_t d) { return d; }

 private:
  static constexpr int64_t kWord = 4 / static_cast<int64_t>(sizeof(T));

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

  // Packs the values of keys `k` (even) and k + 1 as far as whole vectors go; returns how far that is.
  int64_t pack_two(const S* one, const S* other, int64_t k, T* to) const {
    int64_t d = 0;
    for (; d + kLanes <= of_.shape.value_dim(); d += kLanes) {
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

  Rows of_;
  int64_t depth_, panels_, padded_;
  T *q_, *keys_, *values_, *weights_;
};

}  // namespace slipstream
