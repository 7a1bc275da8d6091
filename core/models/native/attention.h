// Attention over pages of KV, read through the table of slots: 64 keys at a time become a panel of weights, which the
// queries of a block, or the heads of one token that share a KV head, are multiplied with.

#pragma once

#include <algorithm>
#include <limits>

#include "kernels.h"
#include "panels.h"
#include "scratch.h"

namespace slipstream {

// One layer's pages, and where the tokens of one request are in them.
template <typename T>
struct Pages {
  const T *keys, *values;  // [slots, K, D]
  const int32_t* table;    // [tokens]
};

// Consecutive tokens of one request (a part of a prompt, or the one that is decoded), and where their queries and outputs are.
template <typename T>
struct Block {
  const T* q;            // of the first token and first head of the group; [tokens] apart by q_stride, heads by D
  T* out;                // likewise, apart by out_stride
  int64_t q_stride, out_stride;
  int64_t tokens, position;  // how many, and the position of the first
};

// Softmax as it goes along (Milakov and Gimelshein 2018; FlashAttention, Dao 2022).
template <typename T>
class BlockAttention {
 public:
  BlockAttention(const Shape& shape, const Block<T>& block, Scratch& scratch)
      : shape_(shape),
        block_(block),
        rows_(block.tokens * shape.group()),
        depth_(round_up(shape.dim, kDepth)),
        panels_(round_up(shape.dim, kPanel) / kPanel),
        padded_(round_up(rows_, kRows)),
        q_(scratch.take<T>(0, padded_ * depth_)),
        keys_(scratch.take<T>(1, depth_ * kPanel)),
        values_(scratch.take<T>(2, panels_ * kPanel * kPanel)),
        scores_(scratch.take<float>(3, padded_ * kPanel)),
        weights_(scratch.take<T>(4, padded_ * kPanel)),
        sums_(scratch.take<float>(5, panels_ * padded_ * kPanel)),
        tops_(scratch.take<float>(6, rows_)),
        totals_(scratch.take<float>(7, rows_)) {}

  void attend(const Pages<T>& pages, int64_t kv_head) {
    begin();
    const int64_t end = block_.position + block_.tokens;
    for (int64_t from = 0; from < end; from += kPanel) {
      const int64_t count = std::min(kPanel, end - from);
      pack_keys(pages, kv_head, from, count);
      multiply(q_, depth_, rows_, keys_, depth_, scores_, false);
      for (int64_t row = 0; row < rows_; ++row) weigh(row, from, count);
      pack_values(pages, kv_head, from, count);
      for (int64_t p = 0; p < panels_; ++p)
        multiply(weights_, kPanel, rows_, values_ + p * kPanel * kPanel, kPanel, sums_ + p * padded_ * kPanel, true);
    }
    finish();
  }

 private:
  void begin() {
    const int64_t group = shape_.group(), dim = shape_.dim;
    for (int64_t row = 0; row < rows_; ++row) {
      T* to = q_ + row * depth_;
      std::copy_n(block_.q + row / group * block_.q_stride + row % group * dim, dim, to);
      std::fill(to + dim, to + depth_, T(0.0f));
    }
    std::fill_n(sums_, panels_ * padded_ * kPanel, 0.0f);
    std::fill_n(tops_, rows_, -std::numeric_limits<float>::infinity());
    std::fill_n(totals_, rows_, 0.0f);
  }

  // What is at `token` in one of a layer's two tensors.
  const T* find(const T* base, const Pages<T>& pages, int64_t kv_head, int64_t token) const {
    return base + pages.table[token] * shape_.kv_width() + kv_head * shape_.dim;
  }

  // Keys are rows and shall be columns: a panel's words (pairs of bfloat16, single floats) are turned 16 by 16.
  void pack_keys(const Pages<T>& pages, int64_t kv_head, int64_t from, int64_t count) {
    constexpr int64_t kEach = 4 / static_cast<int64_t>(sizeof(T));
    const int64_t words = shape_.dim / (kLanes * kEach) * kLanes, dim = shape_.dim;
    if (words * kEach < depth_) std::fill_n(keys_ + words * kEach * kPanel, (depth_ - words * kEach) * kPanel, T(0.0f));
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t present = std::clamp<int64_t>(count - first, 0, kLanes);
      const T* key[kLanes];
      for (int64_t k = 0; k < present; ++k) key[k] = find(pages.keys, pages, kv_head, from + first + k);
      for (int64_t word = 0; word < words; word += kLanes) {
        Words rows[kLanes] = {};
        for (int64_t k = 0; k < present; ++k) std::memcpy(&rows[k], key[k] + word * kEach, sizeof(Words));
        transpose(rows);
        for (int64_t w = 0; w < kLanes; ++w)
          std::memcpy(keys_ + ((word + w) * kPanel + first) * kEach, &rows[w], sizeof(Words));
      }
      for (int64_t k = 0; k < present; ++k)
        for (int64_t d = words * kEach; d < dim; ++d) keys_[panel_place<T>(first + k, d)] = key[k][d];
    }
  }

  void pack_values(const Pages<T>& pages, int64_t kv_head, int64_t from, int64_t count) {
    const int64_t dim = shape_.dim;
    if (count < kPanel || dim % kPanel != 0) std::fill_n(values_, panels_ * kPanel * kPanel, T(0.0f));
    for (int64_t k = 0; k < count; ++k) {
      const T* value = find(pages.values, pages, kv_head, from + k);
      int64_t d = 0;
      if (k + 1 < count) d = pack_two(value, find(pages.values, pages, kv_head, from + k + 1), k);
      const int64_t keys = d > 0 ? 2 : 1;
      for (int64_t each = 0; each < keys; ++each) {
        const T* rest = find(pages.values, pages, kv_head, from + k + each);
        for (int64_t i = d; i < dim; ++i) values_[i / kPanel * kPanel * kPanel + panel_place<T>(i % kPanel, k + each)] = rest[i];
      }
      k += keys - 1;
    }
  }

  // Interleaves the values of keys `k` (even) and k + 1 as far as whole vectors go; returns how far that is.
  int64_t pack_two(const T* one, const T* other, int64_t k) {
    int64_t d = 0;
    if constexpr (sizeof(T) == 2) {
      for (; d + kLanes <= shape_.dim; d += kLanes) {
        Halves low, high;
        std::memcpy(&low, one + d, sizeof(low));
        std::memcpy(&high, other + d, sizeof(high));
        const Words both = __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
        std::memcpy(values_ + d / kPanel * kPanel * kPanel + panel_place<T>(d % kPanel, k), &both, sizeof(both));
      }
    }
    return d;
  }

  // Turns a row of scores into weights against the greatest score so far, and what was summed to the new scale.
  void weigh(int64_t row, int64_t from, int64_t count) {
    constexpr int kParts = kPanel / kLanes;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const int64_t position = block_.position + row / shape_.group();
    const int32_t seen = static_cast<int32_t>(std::clamp<int64_t>(position + 1 - from, 0, count));
    const float scale = static_cast<float>(shape_.scale);
    T* weights = weights_ + row * kPanel;
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats scores[kParts], tops = Floats{} + tops_[row], total{};
    for (int p = 0; p < kParts; ++p) {
      const Floats score = load(scores_ + row * kPanel + p * kLanes) * scale;
      scores[p] = lanes + static_cast<int32_t>(p * kLanes) < seen ? score : Floats{} + kNone;
      tops = scores[p] > tops ? scores[p] : tops;
    }
    const float top = max_of(tops), before = tops_[row];
    for (int p = 0; p < kParts; ++p) {
      const Floats weight = scores[p] == kNone ? Floats{} : exp_of(scores[p] - top);
      total += weight;
      store(weight, weights + p * kLanes);
    }
    if (top != before && before != kNone) rescale(row, std::exp(before - top));
    tops_[row] = top;
    totals_[row] += sum_of(total);
  }

  void rescale(int64_t row, float factor) {
    totals_[row] *= factor;
    for (int64_t p = 0; p < panels_; ++p) {
      float* sums = sums_ + (p * padded_ + row) * kPanel;
      for (int64_t i = 0; i < kPanel; i += kLanes) store(load(sums + i) * factor, sums + i);
    }
  }

  void finish() {
    const int64_t group = shape_.group(), dim = shape_.dim;
    for (int64_t row = 0; row < rows_; ++row) {
      const float factor = 1.0f / totals_[row];
      T* to = block_.out + row / group * block_.out_stride + row % group * dim;
      for (int64_t d = 0; d < dim; ++d)
        narrow(sums_[(d / kPanel * padded_ + row) * kPanel + d % kPanel] * factor, to[d]);
    }
  }

  const Shape& shape_;
  const Block<T>& block_;
  int64_t rows_, depth_, panels_, padded_;
  T *q_, *keys_, *values_;
  float* scores_;
  T* weights_;
  float *sums_, *tops_, *totals_;
};

}  // namespace slipstream
