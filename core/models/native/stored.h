// What pages hold of keys and values: numbers as they are computed, or codes of eight bits, each head of a token times a
// power of two of its own. `core/memory/kv_int8.py` is the definition, which these bytes are equal to.
//
// Every code is exact in bfloat16. So codes are multiplied as they are, scores by the scales of keys, and weights by those
// of values: nothing is rounded but what encoding has rounded.

#pragma once

#include <algorithm>
#include <type_traits>

#include "bytes.h"
#include "kernels.h"

namespace slipstream {

// One layer's pages; S is what is stored: what attention computes with, or int8_t.
template <typename S>
struct Stored {
  static constexpr bool kCodes = std::is_same_v<S, int8_t>;

  S *keys, *values;                          // [slots, K, D], the same where values are the first elements of keys
  uint8_t *key_scales = nullptr, *value_scales = nullptr;  // [slots, K]: biased exponents, where there are codes

  uint8_t* key_scale(int64_t at) const { return kCodes ? key_scales + at : nullptr; }
  uint8_t* value_scale(int64_t at) const { return kCodes ? value_scales + at : nullptr; }
};

// The power of two that a scale stands for. 0, of what was never written, is 0; 255 is no number.
inline float power_of(uint8_t scale) {
  const uint32_t bits = static_cast<uint32_t>(scale) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

inline Floats powers_of(const uint8_t* scales) {
  using Scales = uint8_t __attribute__((vector_size(kLanes)));
  Scales bytes;
  std::memcpy(&bytes, scales, sizeof(bytes));
  return reinterpret_cast<Floats>(__builtin_convertvector(bytes, Words) << 23);
}

template <typename T>
inline T as_number(T stored) {
  return stored;
}

template <typename T, typename = std::enable_if_t<!std::is_same_v<T, int8_t>>>
inline T as_number(int8_t stored) {
  T number;
  narrow(static_cast<float>(stored), number);
  return number;
}

// Rounds to nearest, to even halfway: what lies behind the point has no room beside so large a number.
inline Floats rounded(Floats x) {
  constexpr float kLarge = 12582912.0f;
  return (x + kLarge) - kLarge;
}

// The bits of the greatest of |x[count]|, of float32; those of a NaN are greater than any number's.
template <typename T>
inline uint32_t largest_bits(const T* x, int64_t count) {
  constexpr uint32_t kSignless = 0x7fffffff;
  Words tops{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Words bits = reinterpret_cast<Words>(load(x + i)) & kSignless;
    tops = bits > tops ? bits : tops;
  }
  uint32_t top = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) top = std::max(top, static_cast<uint32_t>(tops[lane]));
  for (; i < count; ++i) {
    const float wide = widen(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &wide, sizeof(bits));
    top = std::max(top, bits & kSignless);
  }
  return top;
}

// Codes of one head, and its scale.
template <typename T>
inline void encode(const T* from, int64_t count, int8_t* to, uint8_t& scale) {
  constexpr float kMost = 127.0f, kGrown = 128.0f / 127.5f;
  const uint32_t bits = largest_bits(from, count);
  float grown;
  std::memcpy(&grown, &bits, sizeof(grown));
  grown *= kGrown;
  uint32_t grown_bits;
  std::memcpy(&grown_bits, &grown, sizeof(grown_bits));
  const int32_t exponent = std::max(static_cast<int32_t>(grown_bits >> 23) - 6, 1);
  if (bits >= 0x7f800000 || grown_bits >= 0x7f800000) {
    std::fill_n(to, count, int8_t{0});
    scale = 255;
    return;
  }
  scale = static_cast<uint8_t>(exponent);
  const float inverse = power_of(static_cast<uint8_t>(254 - exponent));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats code = rounded(load(from + i) * inverse);
    code = code > kMost ? Floats{} + kMost : code;
    code = code < -kMost ? Floats{} - kMost : code;
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(code, Ints), Bytes);
    std::memcpy(to + i, &bytes, sizeof(bytes));
  }
  for (; i < count; ++i) {
    Floats one{};
    one[0] = widen(from[i]) * inverse;
    to[i] = static_cast<int8_t>(std::clamp(static_cast<float>(rounded(one)[0]), -kMost, kMost));
  }
}

// Puts `heads` heads of `dim` elements, side by side, where they belong: their scales only where there are codes.
template <typename T>
inline void store_heads(const T* from, int64_t heads, int64_t dim, T* to, uint8_t*) {
  std::copy_n(from, heads * dim, to);
}

template <typename T>
inline void store_heads(const T* from, int64_t heads, int64_t dim, int8_t* to, uint8_t* scales) {
  for (int64_t h = 0; h < heads; ++h) encode(from + h * dim, dim, to + h * dim, scales[h]);
}

}  // namespace slipstream
