// What attention and the rows between two products have in common: sizes of heads, and sums of rows.
//
// Hidden C, heads H of D elements, KV heads K, G = H / K query heads to each; T is float or BFloat16.

#pragma once

#include "vectors.h"

namespace slipstream {

struct Shape {
  int64_t heads, kv_heads, dim;
  // How many of a key's elements, from the first on, are its value too; 0 where values are elsewhere.
  int64_t latent = 0;

  // Nothing where no layer attends.
  int64_t group() const { return kv_heads == 0 ? 0 : heads / kv_heads; }
  int64_t q_width() const { return heads * dim; }
  int64_t kv_width() const { return kv_heads * dim; }
  int64_t value_dim() const { return latent == 0 ? dim : latent; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

// x[count] += delta[count], rounded as a tensor of T between the two would be.
template <typename T>
void add_rounded(T* x, const float* delta, int64_t count) {
  int64_t i = 0;
  T rounded[kLanes];
  for (; i + kLanes <= count; i += kLanes) {
    store(load(delta + i), rounded);
    store(load(x + i) + load(rounded), x + i);
  }
  for (; i < count; ++i) {
    narrow(delta[i], rounded[0]);
    narrow(widen(x[i]) + widen(rounded[0]), x[i]);
  }
}

// The same of rows that are tensors of T already.
template <typename T>
void add_row(T* x, const T* delta, int64_t count, float multiplier) {
  for (int64_t i = 0; i < count; ++i) narrow(widen(x[i]) + multiplier * widen(delta[i]), x[i]);
}

}  // namespace slipstream
