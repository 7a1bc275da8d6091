// What lies between two matrix products of a dense decoder: one pass over memory each, float32 inside, T tokens at a time.
//
// Hidden C, heads H of D elements, KV heads K, G = H / K query heads to each; `scalar_t` is float or BFloat16.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace slipstream {

using at::BFloat16;

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline void narrow(float value, float& out) { out = value; }

inline void narrow(float value, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  // Round to nearest even. A NaN stays one: its top mantissa bit is set in every NaN that arithmetic makes.
  bits += 0x7fff + ((bits >> 16) & 1);
  out.x = static_cast<uint16_t>(bits >> 16);
}

struct Shape {
  int64_t heads, kv_heads, dim;
  double eps, scale;
};

// x[T, C] += delta where there is one, then its RMS norm by weight[C].
template <typename scalar_t>
void add_norm(scalar_t* x, const scalar_t* delta, const scalar_t* weight, scalar_t* out, int64_t rows, int64_t width,
              float eps) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    std::vector<float> wide(width);
    float* w = wide.data();
    for (int64_t row = begin; row < end; ++row) {
      scalar_t* here = x + row * width;
      float squares = 0;
      if (delta != nullptr) {
        const scalar_t* more = delta + row * width;
        for (int64_t i = 0; i < width; ++i) narrow(widen(here[i]) + widen(more[i]), here[i]);
      }
      for (int64_t i = 0; i < width; ++i) {
        w[i] = widen(here[i]);
        squares += w[i] * w[i];
      }
      const float factor = 1.0f / std::sqrt(squares / width + eps);
      scalar_t* to = out + row * width;
      for (int64_t i = 0; i < width; ++i) narrow(w[i] * factor * widen(weight[i]), to[i]);
    }
  });
}

// out[T, I] = silu(gate) * up, from gate and up side by side [T, 2 I].
template <typename scalar_t>
void silu_mul(const scalar_t* gate_up, scalar_t* out, int64_t rows, int64_t width) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const scalar_t* gate = gate_up + row * 2 * width;
      const scalar_t* up = gate + width;
      scalar_t* to = out + row * width;
      for (int64_t i = 0; i < width; ++i) {
        const float g = widen(gate[i]);
        narrow(g / (1.0f + std::exp(-g)) * widen(up[i]), to[i]);
      }
    }
  });
}

// One head [D], normed where the family does that, and turned by its position: halves of a head are the two axes.
template <typename scalar_t>
void turn_head(scalar_t* head, const scalar_t* norm, const float* cos, const float* sin, int64_t dim, float eps,
               float* wide) {
  for (int64_t i = 0; i < dim; ++i) wide[i] = widen(head[i]);
  if (norm != nullptr) {
    float squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += wide[i] * wide[i];
    const float factor = 1.0f / std::sqrt(squares / dim + eps);
    for (int64_t i = 0; i < dim; ++i) wide[i] *= factor * widen(norm[i]);
  }
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = wide[i], b = wide[i + half];
    narrow(a * cos[i] - b * sin[i], head[i]);
    narrow(b * cos[i] + a * sin[i], head[i + half]);
  }
}

// Turns queries and keys of qkv [T, (H + 2 K) D] in place, and stores keys and values at `slots`.
template <typename scalar_t>
void rotate_and_store(scalar_t* qkv, const scalar_t* q_norm, const scalar_t* k_norm, const Shape& shape,
                      const int64_t* positions, const int64_t* slots, const float* cos, const float* sin,
                      scalar_t* keys, scalar_t* values, int64_t tokens) {
  const int64_t dim = shape.dim, kv_width = shape.kv_heads * dim, half = dim / 2;
  const int64_t width = (shape.heads + 2 * shape.kv_heads) * dim;
  at::parallel_for(0, tokens, std::max<int64_t>(1, 4096 / width), [&](int64_t begin, int64_t end) {
    std::vector<float> wide(dim);
    for (int64_t t = begin; t < end; ++t) {
      scalar_t* row = qkv + t * width;
      const float* c = cos + positions[t] * half;
      const float* s = sin + positions[t] * half;
      for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h)
        turn_head(row + h * dim, h < shape.heads ? q_norm : k_norm, c, s, dim, static_cast<float>(shape.eps),
                  wide.data());
      const scalar_t* k = row + shape.heads * dim;
      std::memcpy(keys + slots[t] * kv_width, k, kv_width * sizeof(scalar_t));
      std::memcpy(values + slots[t] * kv_width, k + kv_width, kv_width * sizeof(scalar_t));
    }
  });
}

// Attention of one query token for the G query heads of one KV head, over `length` tokens found through `table`.
template <typename scalar_t>
void attend_one(const scalar_t* q, const scalar_t* keys, const scalar_t* values, const int32_t* table, int64_t length,
                const Shape& shape, int64_t kv_head, scalar_t* out, std::vector<float>& scratch) {
  const int64_t dim = shape.dim, group = shape.heads / shape.kv_heads, stride = shape.kv_heads * dim;
  scratch.resize(group * (length + 2 * dim));
  float* wide = scratch.data();
  float* sums = wide + group * dim;
  float* scores = sums + group * dim;
  for (int64_t i = 0; i < group * dim; ++i) wide[i] = widen(q[i]) * static_cast<float>(shape.scale);
  std::fill_n(sums, group * dim, 0.0f);
  for (int64_t t = 0; t < length; ++t) {
    const scalar_t* key = keys + table[t] * stride + kv_head * dim;
    for (int64_t g = 0; g < group; ++g) {
      const float* query = wide + g * dim;
      float dot = 0;
      for (int64_t i = 0; i < dim; ++i) dot += query[i] * widen(key[i]);
      scores[g * length + t] = dot;
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * length;
    const float top = *std::max_element(row, row + length);
    float total = 0;
    for (int64_t t = 0; t < length; ++t) {
      row[t] = std::exp(row[t] - top);
      total += row[t];
    }
    const float factor = 1.0f / total;
    for (int64_t t = 0; t < length; ++t) row[t] *= factor;
  }
  for (int64_t t = 0; t < length; ++t) {
    const scalar_t* value = values + table[t] * stride + kv_head * dim;
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * length + t];
      float* sum = sums + g * dim;
      for (int64_t i = 0; i < dim; ++i) sum[i] += weight * widen(value[i]);
    }
  }
  for (int64_t i = 0; i < group * dim; ++i) narrow(sums[i], out[i]);
}

}  // namespace slipstream
