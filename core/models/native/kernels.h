// What lies between two matrix products of a dense decoder: one pass over memory each, float32 inside.
//
// Hidden C, heads H of D elements, KV heads K, G = H / K query heads to each; T is float or BFloat16.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace slipstream {

struct Shape {
  int64_t heads, kv_heads, dim;
  double eps, scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t q_width() const { return heads * dim; }
  int64_t kv_width() const { return kv_heads * dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

// The RMS norm of one row x[C] by weight[C].
template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t width, float eps) {
  const float factor = 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(load(x + i) * factor * load(weight + i), out + i);
  for (; i < width; ++i) narrow(widen(x[i]) * factor * widen(weight[i]), out[i]);
}

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

// out[count] = silu(gate) * up
template <typename T>
void silu_mul(const float* gate, const float* up, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats g = load(gate + i);
    store(g / (1.0f + exp_of(-g)) * load(up + i), out + i);
  }
}

// One head [D], normed where the family does that, and turned by its position: halves of a head are the two axes.
template <typename T>
void turn_head(T* head, const T* norm, const float* cos, const float* sin, int64_t dim, float eps) {
  if (norm != nullptr) rms_norm(head, norm, head, dim, eps);
  const int64_t half = dim / 2;
  T *low = head, *high = head + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = load(low + i), b = load(high + i), c = load(cos + i), s = load(sin + i);
    store(a * c - b * s, low + i);
    store(b * c + a * s, high + i);
  }
  for (; i < half; ++i) {
    const float a = widen(low[i]), b = widen(high[i]);
    narrow(a * cos[i] - b * sin[i], low[i]);
    narrow(b * cos[i] + a * sin[i], high[i]);
  }
}

// Turns queries and keys of one token's qkv [(H + 2 K) D] in place, and stores its key and value where they belong.
template <typename T>
void rotate_and_store(T* qkv, const T* q_norm, const T* k_norm, const Shape& shape, const float* cos, const float* sin,
                      T* key, T* value) {
  for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h)
    turn_head(qkv + h * shape.dim, h < shape.heads ? q_norm : k_norm, cos, sin, shape.dim,
              static_cast<float>(shape.eps));
  const T* k = qkv + shape.q_width();
  std::copy_n(k, shape.kv_width(), key);
  std::copy_n(k + shape.kv_width(), shape.kv_width(), value);
}

}  // namespace slipstream
