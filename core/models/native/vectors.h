// As many floats at a time as the machine has in one register, or eight.
//
// Wider vectors than that would be correct too, but the compiler takes them through memory: with sixteen floats on AVX2 a
// step of the bundled model took five times as long.

#pragma once

#include <c10/util/BFloat16.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Before a loop over all sums of a product: where it is not unrolled, GCC keeps them in memory before and behind the product.
#define SLIPSTREAM_IN_REGISTERS _Pragma("GCC unroll 16")

namespace slipstream {

using c10::BFloat16;

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Eight = float __attribute__((vector_size(32)));
using Four = float __attribute__((vector_size(16)));

inline int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

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

inline Floats load(const float* from) {
  Floats wide;
  std::memcpy(&wide, from, sizeof(wide));
  return wide;
}

inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// a * b + sums, rounded once where the machine has that. Left alone, GCC rounds once in one copy of a loop and twice in
// another, so the same rows get other bits in other company.
inline Floats multiply_add(Floats a, Floats b, Floats sums) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#else
  return sums + a * b;
#endif
}

inline Floats multiply_add(Floats a, float b, Floats sums) { return multiply_add(a, b - Floats{}, sums); }

inline void store(Floats wide, float* to) { std::memcpy(to, &wide, sizeof(wide)); }

#if defined(__AVX512BF16__)

// As below, except that what is too small for a normal number becomes zero.
inline void store(Floats wide, BFloat16* to) {
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(wide));
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
}

#else

inline void store(Floats wide, BFloat16* to) {
  Words bits = reinterpret_cast<Words>(wide);
  bits += 0x7fff + ((bits >> 16) & 1);
  const Halves halves = __builtin_convertvector(bits >> 16, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

#endif

// Halves upon halves: sixteen additions one behind the other would take longer than the products before them.
inline float sum_of(Floats v) {
  Eight eights[kLanes / 8];
  std::memcpy(eights, &v, sizeof(v));
  Eight eight = eights[0];
  if constexpr (kLanes == 16) eight += eights[1];
  Four fours[2];
  std::memcpy(fours, &eight, sizeof(eight));
  const Four four = fours[0] + fours[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float max_of(Floats v) {
  Eight eights[kLanes / 8];
  std::memcpy(eights, &v, sizeof(v));
  Eight eight = eights[0];
  if constexpr (kLanes == 16) eight = eight > eights[1] ? eight : eights[1];
  Four fours[2];
  std::memcpy(fours, &eight, sizeof(eight));
  const Four four = fours[0] > fours[1] ? fours[0] : fours[1];
  return std::max(std::max(four[0], four[2]), std::max(four[1], four[3]));
}

// One of the steps that turn as many rows as lanes into columns: rows `kHalf` apart change every other `kHalf` words.
template <int kHalf>
inline void exchange(Words* rows) {
  Words low, high;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & kHalf ? kLanes + lane - kHalf : lane;
    high[lane] = lane & kHalf ? kLanes + lane : lane + kHalf;
  }
  for (int row = 0; row < kLanes; ++row) {
    if (row & kHalf) continue;
    const Words a = rows[row], b = rows[row + kHalf];
    rows[row] = __builtin_shuffle(a, b, low);
    rows[row + kHalf] = __builtin_shuffle(a, b, high);
  }
}

inline void transpose(Words* rows) {
  if constexpr (kLanes == 16) exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// e to the x within 2e-7 of it, and a NaN for a NaN. Below -87 it is the smallest normal number instead of zero.
inline Floats exp_of(Floats x) {
#if defined(__AVX512F__)
  // Of two operands of which one is a NaN, these give the second.
  x = reinterpret_cast<Floats>(_mm512_max_ps(_mm512_set1_ps(-87.0f), reinterpret_cast<__m512>(x)));
  x = reinterpret_cast<Floats>(_mm512_min_ps(_mm512_set1_ps(88.0f), reinterpret_cast<__m512>(x)));
  const Floats n = reinterpret_cast<Floats>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x * 1.44269504f), 8));
#else
  x = x < -87.0f ? Floats{} - 87.0f : x;
  x = x > 88.0f ? Floats{} + 88.0f : x;
  const Floats halves = x < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f;
  const Ints power = __builtin_convertvector(x * 1.44269504f + halves, Ints);
  const Floats n = __builtin_convertvector(power, Floats);
#endif
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = Floats{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  return p * reinterpret_cast<Floats>((power + 127) << 23);
#endif
}

template <typename T>
inline float dot(const T* a, const T* b, int64_t count) {
  Floats sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load(a + i) * load(b + i);
  float total = sum_of(sums);
  for (; i < count; ++i) total += widen(a[i]) * widen(b[i]);
  return total;
}

}  // namespace slipstream
