// Products with panels of four-bit weights in groups of inputs: a quarter of what bfloat16 reads.
//
// A word of 32 bits has eight inputs of one output, those at even places in its lower half and the others in its upper
// one, the first of each in its lowest bits; a panel is [depth / 8][64] words. So a shift brings both inputs of a pair to
// where bfloat16 has them, and one look-up in a register turns them into it. A weight is (q - zero) scale of its group, so a group adds scale (sum of x q - zero times sum of x) to an output: q is exact in
// every type, and scales are applied to sums, in float32. A few rows are multiplied while words become floats in registers;
// for more of them a group is widened once, into a cache, for all rows. Both add the same numbers in the same order.

#pragma once

#include <algorithm>

#include "bytes.h"
#include "panels.h"

namespace slipstream {

// Inputs in one word.
constexpr int64_t kPerWord = 8;

// Which nibble of a word has input `input` of its eight.
constexpr int64_t nibble_of(int64_t input) { return input / 2 + input % 2 * (kPerWord / 2); }
// Rows up to which widening in registers is quicker than by way of a cache.
#if defined(__AVX512F__)
constexpr int64_t kFewNibbleRows = kBlockRows;
#else
constexpr int64_t kFewNibbleRows = 4;
#endif
// The zero of weights that have none of their own.
constexpr float kMiddle = 8.0f;

// What the groups of one panel are scaled by, [groups][64] each; scales are float or BFloat16, zeros int8, float or absent.
struct PanelGroups {
  int64_t size;
  const float* scale;
  const BFloat16* half_scale;
  const int8_t* zero;
  const float* wide_zero;

  Floats scale_at(int64_t place) const { return half_scale ? load(half_scale + place) : load(scale + place); }
  Floats zero_at(int64_t place) const {
    if (zero) return load(zero + place);
    return wide_zero ? load(wide_zero + place) : Floats{} + kMiddle;
  }
};

// out[lanes] += what they get of a group: `products` are sums of x q, `sum` is that of x.
inline void add_group(Floats scale, Floats zero, Floats products, float sum, float* out) {
  const Floats centred = multiply_add(-zero, sum, products);
  store(multiply_add(scale, centred, load(out)), out);
}

// What an input is multiplied with beforehand, by its nibble: its nibble is then taken where it lies, as many
// times too large. The highest is moved down, for it would be a sign.
inline float nibble_factor(int64_t input) {
  constexpr float kFactors[] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};
  return kFactors[nibble_of(input)];
}

template <int kInput>
inline Floats nibble_at(Words words) {
  constexpr int64_t kPlace = nibble_of(kInput);
  if constexpr (kPlace == kPerWord - 1) return __builtin_convertvector(reinterpret_cast<Ints>(words >> 28), Floats);
  return __builtin_convertvector(reinterpret_cast<Ints>(words & (15u << (4 * kPlace))), Floats);
}

inline Words load_words(const uint32_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// sums[M][kParts] += input `kInput` of eight, for all parts.
template <int M, int kParts, int kInput>
inline void add_input(const float* x, int64_t stride, const uint32_t* words, Floats (&sums)[M][kParts]) {
  Floats values[M];
  for (int m = 0; m < M; ++m) values[m] = x[m * stride + kInput] - Floats{};
  for (int p = 0; p < kParts; ++p) {
    const Floats weights = nibble_at<kInput>(load_words(words + p * kLanes));
    for (int m = 0; m < M; ++m) sums[m][p] = multiply_add(weights, values[m], sums[m][p]);
  }
  if constexpr (kInput + 1 < kPerWord) add_input<M, kParts, kInput + 1>(x, stride, words, sums);
}

// Vectors of outputs at a time, so that their sums stay in registers and are not waited for.
template <int M>
constexpr int nibble_parts() {
#if defined(__AVX512F__)
  return 4;
#else
  return M == 1 ? 8 : M == 4 ? 2 : 4;
#endif
}

// out[M][64] = x[M] times the panel; x [M][stride] are floats by their factors, `sums` [M][groups] are those of x.
template <int M>
inline void nibble_rows(const float* x, int64_t stride, const float* sums, int64_t count, const uint32_t* panel,
                        int64_t depth, const PanelGroups& groups, float* out) {
  constexpr int kParts = nibble_parts<M>();
  std::fill_n(out, M * kPanel, 0.0f);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t from = group * groups.size, to = std::min(depth, from + groups.size);
    for (int64_t first = 0; first < kPanel; first += kParts * kLanes) {
      Floats products[M][kParts] = {};
      const uint32_t* words = panel + from / kPerWord * kPanel + first;
      for (int64_t k = from; k < to; k += kPerWord, words += kPanel) {
        for (int64_t line = 0; line < kParts * kLanes; line += 16)
          ask_ahead(words + line);
        add_input<M, kParts, 0>(x + k, stride, words, products);
      }
      for (int p = 0; p < kParts; ++p) {
        const int64_t output = first + p * kLanes, place = group * kPanel + output;
        const Floats scale = groups.scale_at(place), zero = groups.zero_at(place);
        for (int m = 0; m < M; ++m)
          add_group(scale, zero, products[m][p], sums[m * count + group], out + m * kPanel + output);
      }
    }
  }
}

inline Floats nibble(Words words, int64_t input) {
  const uint32_t down = static_cast<uint32_t>(4 * nibble_of(input));
  return __builtin_convertvector(reinterpret_cast<Ints>(words >> down & 15u), Floats);
}

#if defined(__AVX512BF16__)

// The numbers from 0 to 15 as bfloat16, twice: an index has five bits, of which the highest is another nibble's.
inline __m512i nibble_table() {
  alignas(64) uint16_t numbers[32];
  for (int i = 0; i < 32; ++i) {
    BFloat16 number;
    narrow(static_cast<float>(i % 16), number);
    numbers[i] = number.x;
  }
  return _mm512_load_si512(numbers);
}

// Inputs `input`, which is even, and the one behind it of sixteen outputs, as bfloat16 side by side.
inline __m512i nibble_pairs(__m512i words, int64_t input, __m512i table) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi32(words, static_cast<unsigned>(4 * nibble_of(input))), table);
}

inline Words nibble_pairs(Words words, int64_t input) {
  return (Words)nibble_pairs((__m512i)words, input, nibble_table());
}

// Whether a few rows of T are multiplied as they are, by pairs of inputs, and not as floats by their factors.
template <typename T>
constexpr bool kNibblePairs = sizeof(T) == 2;

// As `nibble_rows`, in the order of `multiply`: x [M][stride] as it is.
template <int M>
inline void nibble_pair_rows(const BFloat16* x, int64_t stride, const float* sums, int64_t count, const uint32_t* panel,
                             int64_t depth, const PanelGroups& groups, float* out) {
  constexpr int kParts = kPanel / kLanes;
  const __m512i table = nibble_table();
  std::fill_n(out, M * kPanel, 0.0f);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t from = group * groups.size, to = std::min(depth, from + groups.size);
    __m512 products[M][kParts];
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < kParts; ++p) products[m][p] = _mm512_setzero_ps();
    const uint32_t* words = panel + from / kPerWord * kPanel;
    for (int64_t k = from; k < to; k += kPerWord, words += kPanel) {
      __m512i held[kParts];
      for (int p = 0; p < kParts; ++p) {
        held[p] = _mm512_loadu_si512(words + p * kLanes);
        ask_ahead(words + p * kLanes);
      }
#pragma GCC unroll 4
      for (int64_t input = 0; input < kPerWord; input += 2) {
        __m512bh both[M];
        for (int m = 0; m < M; ++m) {
          int32_t pair;
          std::memcpy(&pair, x + m * stride + k + input, sizeof(pair));
          both[m] = (__m512bh)_mm512_set1_epi32(pair);
        }
        for (int p = 0; p < kParts; ++p) {
          const __m512bh weights = (__m512bh)nibble_pairs(held[p], input, table);
          for (int m = 0; m < M; ++m) products[m][p] = _mm512_dpbf16_ps(products[m][p], weights, both[m]);
        }
      }
    }
    for (int p = 0; p < kParts; ++p) {
      const int64_t place = group * kPanel + p * kLanes;
      const Floats scale = groups.scale_at(place), zero = groups.zero_at(place);
      for (int m = 0; m < M; ++m)
        add_group(scale, zero, (Floats)products[m][p], sums[m * count + group], out + m * kPanel + p * kLanes);
    }
  }
}

#else

inline Words nibble_pairs(Words words, int64_t input) {
  return reinterpret_cast<Words>(nibble(words, input)) >> 16 | reinterpret_cast<Words>(nibble(words, input + 1));
}

template <typename T>
constexpr bool kNibblePairs = false;

template <int M>
void nibble_pair_rows(const BFloat16*, int64_t, const float*, int64_t, const uint32_t*, int64_t, const PanelGroups&,
                      float*);

#endif

inline void widen_nibbles(const uint32_t* panel, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; k += kPerWord)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words words = load_words(panel + k / kPerWord * kPanel + p);
      for (int64_t input = 0; input < kPerWord; ++input) store(nibble(words, input), out + (k + input) * kPanel + p);
    }
}

inline void widen_nibbles(const uint32_t* panel, int64_t depth, BFloat16* out) {
  for (int64_t k = 0; k < depth; k += kPerWord)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words words = load_words(panel + k / kPerWord * kPanel + p);
      for (int64_t input = 0; input < kPerWord; input += 2) {
        const Words pairs = nibble_pairs(words, input);
        std::memcpy(static_cast<void*>(out + (k + input) * kPanel + 2 * p), &pairs, sizeof(pairs));
      }
    }
}

// Whether few rows of T get the bits that they get among many. Floats add one input behind the other either way. Pairs of
// bfloat16 do where neither way goes through tiles.
template <typename T>
inline bool nibbles_add_alike() {
  return sizeof(T) == sizeof(float) || (kNibblePairs<T> && !tiles_allowed());
}

// out[rows][64] = x[rows][depth] times the panel. `room` holds `widened_room<T>(groups.size)` weights, `products` as many
// floats as out; `invariant` as in `panels.h`.
template <typename T>
void multiply_groups(const T* x, int64_t stride, int64_t rows, const float* sums, int64_t count, const uint32_t* panel,
                     int64_t depth, const PanelGroups& groups, T* room, float* products, float* out, bool invariant) {
  constexpr int64_t kPass = kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)));
  std::fill_n(out, rows * kPanel, 0.0f);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t begin = group * groups.size, end = std::min(depth, begin + groups.size);
    for (int64_t from = begin; from < end; from += kPass) {
      const int64_t taken = std::min(kPass, end - from);
      widen_nibbles(panel + from / kPerWord * kPanel, taken, room);
      multiply<false>(x + from, stride, rows, room, taken, products, from > begin, invariant);
    }
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t place = group * kPanel + first;
      const Floats scale = groups.scale_at(place), zero = groups.zero_at(place);
      for (int64_t row = 0; row < rows; ++row)
        add_group(scale, zero, load(products + row * kPanel + first), sums[row * count + group],
                  out + row * kPanel + first);
    }
  }
}

}  // namespace slipstream
