// Attention over pages of KV, read in place through the table of slots: one query token, or a block of a prompt.

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

// One query token's G heads over one KV head: q, out [G D], `length` tokens.
template <typename T>
void attend_token(const T* q, const Pages<T>& pages, int64_t length, const Shape& shape, int64_t kv_head, T* out,
                  Scratch& scratch) {
  const int64_t dim = shape.dim, group = shape.group(), stride = shape.kv_width(), from = kv_head * dim;
  const float scale = static_cast<float>(shape.scale);
  const int64_t padded = round_up(length, kLanes);
  float* scores = scratch.take<float>(0, group * padded);
  float* sums = scratch.take<float>(1, group * dim);
  for (int64_t t = 0; t < length; ++t) {
    const T* key = pages.keys + pages.table[t] * stride + from;
    for (int64_t g = 0; g < group; ++g) scores[g * padded + t] = scale * dot(q + g * dim, key, dim);
  }
  std::fill_n(sums, group * dim, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * padded;
    const float top = *std::max_element(row, row + length);
    std::fill(row + length, row + padded, -std::numeric_limits<float>::infinity());
    Floats total{};
    for (int64_t t = 0; t < padded; t += kLanes) {
      const Floats weights = exp_of(load(row + t) - top);
      total += weights;
      store(weights, row + t);
    }
    const float factor = 1.0f / sum_of(total);
    for (int64_t t = 0; t < length; ++t) row[t] *= factor;
  }
  for (int64_t t = 0; t < length; ++t) {
    const T* value = pages.values + pages.table[t] * stride + from;
    for (int64_t g = 0; g < group; ++g) add_scaled(sums + g * dim, scores[g * padded + t], value, dim);
  }
  for (int64_t i = 0; i < group * dim; ++i) narrow(sums[i], out[i]);
}

// A block of consecutive tokens of one prompt, and where their queries and outputs are.
template <typename T>
struct Block {
  const T* q;            // of the first token and first head of the group; [tokens] apart by q_stride, heads by D
  T* out;                // likewise, apart by out_stride
  int64_t q_stride, out_stride;
  int64_t tokens, position;  // how many, and the position of the first
};

// Softmax as it goes along (Milakov and Gimelshein 2018; FlashAttention), 64 keys at a time as a panel of weights.
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

  void pack_keys(const Pages<T>& pages, int64_t kv_head, int64_t from, int64_t count) {
    const int64_t dim = shape_.dim;
    if (count < kPanel || dim < depth_) std::fill_n(keys_, depth_ * kPanel, T(0.0f));
    for (int64_t k = 0; k < count; ++k) {
      const T* key = pages.keys + pages.table[from + k] * shape_.kv_width() + kv_head * dim;
      for (int64_t d = 0; d < dim; ++d) keys_[panel_place<T>(k, d)] = key[d];
    }
  }

  void pack_values(const Pages<T>& pages, int64_t kv_head, int64_t from, int64_t count) {
    const int64_t dim = shape_.dim;
    if (count < kPanel || dim % kPanel != 0) std::fill_n(values_, panels_ * kPanel * kPanel, T(0.0f));
    for (int64_t k = 0; k < count; ++k) {
      const T* value = pages.values + pages.table[from + k] * shape_.kv_width() + kv_head * dim;
      for (int64_t d = 0; d < dim; ++d)
        values_[d / kPanel * kPanel * kPanel + panel_place<T>(d % kPanel, k)] = value[d];
    }
  }

  // Turns a row of scores into weights against the greatest score so far, and what was summed to the new scale.
  void weigh(int64_t row, int64_t from, int64_t count) {
    const int64_t position = block_.position + row / shape_.group();
    const int64_t seen = std::min(count, position + 1 - from);
    T* weights = weights_ + row * kPanel;
    if (seen <= 0) {
      std::fill_n(weights, kPanel, T(0.0f));
      return;
    }
    float* scores = scores_ + row * kPanel;
    const float scale = static_cast<float>(shape_.scale), none = -std::numeric_limits<float>::infinity();
    for (int64_t k = 0; k < kPanel; k += kLanes) store(load(scores + k) * scale, scores + k);
    std::fill(scores + seen, scores + kPanel, none);
    const float top = std::max(tops_[row], *std::max_element(scores, scores + seen));
    Floats total{};
    for (int64_t k = 0; k < kPanel; k += kLanes) {
      const Floats score = load(scores + k);
      const Floats weight = score == none ? Floats{} : exp_of(score - top);
      total += weight;
      store(weight, weights + k);
    }
    if (top != tops_[row]) rescale(row, tops_[row] == none ? 0.0f : std::exp(tops_[row] - top));
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
