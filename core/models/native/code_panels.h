// Panels of 64 keys and 64 values as the codes that pages hold, multiplied in integers by AVX-512 VNNI.
//
// Making bfloat16 of codes takes as many instructions as reading half the bytes saves. So queries and weights become
// numbers of sixteen bits, a power of two to each row, and these two bytes, each of which an instruction multiplies with
// four codes. bfloat16 has eight bits: what has a 64th of a row's greatest or more is exact, and the rest errs by less than
// the greatest would. Sums are exact, in any order, so a row's bits are the same among any number of rows.

#pragma once

#include "number_panels.h"

namespace slipstream {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr bool kMultipliesCodes = true;

// Elements of a head up to which sums have room in 32 bits.
constexpr int64_t kMostOfCodes = 256;

// What makes whole numbers below 2^kBits of a row, and what undoes that: no number where the row holds one that is none.
template <int kBits>
struct Unit {
  float into, back;

  // `top`: the bits of the row's greatest number.
  explicit Unit(uint32_t top) {
    constexpr int32_t kOne = 127;
    const int32_t exponent = static_cast<int32_t>(top >> 23);
    const int32_t power = std::clamp(2 * kOne + kBits - 1 - exponent, 1, 2 * kOne - 1);
    into = power_of(static_cast<uint8_t>(power));
    back = top >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN()
                             : power_of(static_cast<uint8_t>(2 * kOne - power));
  }
};

// Calls done(m, p, lanes) with sixteen outputs each of M rows of two bytes, these `apart`, times a panel [words][64][4].
// Queries have a sign, and codes of keys have 128 added; weights have none.
template <int M, bool kQueries, typename Done>
inline void code_rows(const uint8_t* rows, int64_t stride, int64_t apart, const uint8_t* panel, int64_t words,
                      const Done& done) {
  constexpr int kParts = kPanel / kLanes;
  // Of the type that the instruction names: sums of others go through memory each time.
  Ints high[M][kParts], low[M][kParts];
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < kParts; ++p) high[m][p] = low[m][p] = Ints{};
  const auto multiply = [](Ints sum, __m512i codes, __m512i row) {
    const __m512i before = reinterpret_cast<__m512i>(sum);
    return reinterpret_cast<Ints>(kQueries ? _mm512_dpbusd_epi32(before, codes, row)
                                           : _mm512_dpbusd_epi32(before, row, codes));
  };
  for (int64_t w = 0; w < words; ++w) {
    __m512i codes[kParts];
    for (int p = 0; p < kParts; ++p) codes[p] = _mm512_load_si512(panel + (w * kParts + p) * 64);
    for (int m = 0; m < M; ++m) {
      int32_t four[2];
      for (int half = 0; half < 2; ++half)
        std::memcpy(&four[half], rows + m * stride + half * apart + 4 * w, sizeof(four[half]));
      for (int p = 0; p < kParts; ++p) high[m][p] = multiply(high[m][p], codes[p], _mm512_set1_epi32(four[0]));
      for (int p = 0; p < kParts; ++p) low[m][p] = multiply(low[m][p], codes[p], _mm512_set1_epi32(four[1]));
    }
  }
  SLIPSTREAM_IN_REGISTERS
  for (int m = 0; m < M; ++m)
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p) done(m, p, (high[m][p] << 8) + low[m][p]);
}

class CodePanels {
 public:
  CodePanels(const Rows& rows, Scratch& scratch, int64_t room)
      : of_(rows),
        depth_(rows.depth()),
        panels_(rows.panels()),
        padded_(rows.padded()),
        q_(scratch.take<uint8_t>(room, rows.heads * padded_ * 2 * depth_)),
        keys_(scratch.take<uint8_t>(room + 1, rows.heads * depth_ * kPanel)),
        values_(scratch.take<uint8_t>(room + 2, rows.heads * panels_ * kPanel * kPanel)),
        weights_(scratch.take<uint8_t>(room + 3, rows.heads * padded_ * (2 * kPanel + 3 * sizeof(float)))),
        query_units_(reinterpret_cast<float*>(weights_ + rows.heads * padded_ * 2 * kPanel)),
        weight_units_(query_units_ + rows.heads * padded_),
        added_(reinterpret_cast<int32_t*>(weight_units_ + rows.heads * padded_)) {}

  void ask(int64_t head, int64_t row, const BFloat16* query) {
    const int64_t dim = of_.shape.dim, at = head * padded_ + row;
    const Unit<14> unit(largest_bits(query, dim));
    uint8_t* to = q_ + at * 2 * depth_;
    int32_t sum = 0;
    for (int64_t d = 0; d < depth_; d += kLanes) {
      float some[kLanes] = {};
      for (int64_t i = 0; i < std::min(kLanes, dim - d); ++i) some[i] = widen(query[d + i]);
      // The low byte has a sign too, so the high one is rounded.
      const Ints whole = whole_of(load(some) * unit.into), high = (whole + 128) >> 8;
      put_bytes(high, to + d);
      put_bytes(whole - (high << 8), to + depth_ + d);
      sum += _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(whole));
    }
    query_units_[at] = unit.back;
    added_[at] = sum * 128;
  }

  void pack_keys(const Walk<int8_t>& walk, int64_t from, int64_t count) {
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t present = std::clamp<int64_t>(count - first, 0, kLanes);
      const int8_t* key[kLanes];
      for (int64_t k = 0; k < present; ++k) key[k] = walk.find(walk.stored().keys, from + first + k);
      if (first + kLanes < kPanel) walk.fetch(walk.stored().keys, from + first + kLanes);
      if (first + kLanes == kPanel) walk.fetch(walk.stored().values, from);
      for (int64_t h = 0; h < of_.heads; ++h)
        for (int64_t d = 0; d < of_.shape.dim; d += 64)
          turn(key, present, h * of_.shape.dim + d, mask_of(of_.shape.dim - d), (depth_ - d) / 4,
               keys_ + h * depth_ * kPanel + d * kPanel + first * 4);
    }
  }

  void score(int64_t head, float* scores) const {
    const int64_t at = head * padded_;
    in_threes<true>(q_ + at * 2 * depth_, 2 * depth_, depth_, keys_ + head * depth_ * kPanel, depth_ / 4,
                    [&](int64_t row, int p, Ints sums) {
                      const Floats numbers = __builtin_convertvector(sums - added_[at + row], Floats);
                      store(numbers * query_units_[at + row], scores + row * kPanel + p * kLanes);
                    });
  }

  void weigh(int64_t head, int64_t row, const Floats* weights) {
    constexpr int kParts = kPanel / kLanes;
    const int64_t at = head * padded_ + row;
    // Of numbers without a sign, the one with the greatest bits is the greatest, or none.
    Words tops{};
    for (int p = 0; p < kParts; ++p) {
      const Words bits = reinterpret_cast<Words>(weights[p]);
      tops = bits > tops ? bits : tops;
    }
    const Unit<15> unit(_mm512_reduce_max_epu32(reinterpret_cast<__m512i>(tops)));
    uint8_t* to = weights_ + at * 2 * kPanel;
    for (int p = 0; p < kParts; ++p) {
      const Ints whole = whole_of(weights[p] * unit.into);
      put_bytes(whole >> 8, to + p * kLanes);
      put_bytes(whole, to + kPanel + p * kLanes);
    }
    weight_units_[at] = unit.back;
  }

  void pack_values(const Walk<int8_t>& walk, int64_t from, int64_t count) {
    const int64_t dim = of_.shape.dim, wide = of_.shape.value_dim();
    for (int64_t k = 0; k < kPanel; k += 4) {
      if (k % kLanes == 0)
        walk.fetch(k + kLanes < kPanel ? walk.stored().values : walk.stored().keys, from + k + kLanes);
      const int8_t* four[4] = {};
      for (int64_t i = 0; i < std::min<int64_t>(4, count - k); ++i) four[i] = walk.find(walk.stored().values, from + k + i);
      for (int64_t h = 0; h < of_.heads; ++h)
        for (int64_t d = 0; d < wide; d += kPanel)
          weave(four, h * dim + d, mask_of(wide - d), values_ + (h * panels_ * kPanel + d) * kPanel + k * kPanel);
    }
  }

  void add(int64_t head, float* sums) const {
    const int64_t at = head * padded_;
    for (int64_t p = 0; p < panels_; ++p, sums += padded_ * kPanel)
      in_threes<false>(weights_ + at * 2 * kPanel, 2 * kPanel, kPanel, values_ + (head * panels_ + p) * kPanel * kPanel,
                       kPanel / 4, [&](int64_t row, int part, Ints whole) {
                         float* to = sums + row * kPanel + part * kLanes;
                         store(load(to) + __builtin_convertvector(whole, Floats) * weight_units_[at + row], to);
                       });
  }

  // Weaving leaves elements of a panel by quarters of registers.
  static int64_t place(int64_t d) { return d % 4 + d / 4 % 4 * 16 + d / 16 * 4; }

 private:
  static __mmask64 mask_of(int64_t elements) {
    return elements >= 64 ? ~__mmask64{0} : (__mmask64{1} << elements) - 1;
  }

  static Ints whole_of(Floats numbers) {
    return reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(numbers)));
  }

  static void put_bytes(Ints numbers, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(numbers)));
  }

  // Rows three at a time, whose sums have room in registers: calls done(row, part, sums).
  template <bool kQueries, typename Done>
  void in_threes(const uint8_t* rows, int64_t stride, int64_t apart, const uint8_t* panel, int64_t words,
                 const Done& done) const {
    constexpr int64_t kMost = 3;
    for (int64_t row = 0; row < of_.rows; row += kMost)
      of_so_many<kMost>(std::min(kMost, of_.rows - row), [&](auto taken) {
        code_rows<taken, kQueries>(rows + row * stride, stride, apart, panel, words,
                                   [&](int m, int p, Ints sums) { done(row + m, p, sums); });
      });
  }

  // Sixty-four codes of as many keys as lanes as columns of four, of which `words` have room.
  static void turn(const int8_t* const* key, int64_t present, int64_t at, __mmask64 mask, int64_t words, uint8_t* to) {
    Words rows[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) {
      rows[k] = Words{};
      if (k < present) rows[k] = reinterpret_cast<Words>(_mm512_maskz_loadu_epi8(mask, key[k] + at)) ^ 0x80808080u;
    }
    transpose(rows);
    for (int64_t w = 0; w < std::min(kLanes, words); ++w) std::memcpy(to + w * kPanel * 4, &rows[w], sizeof(Words));
  }

  // Sixty-four codes of four values, element by element.
  static void weave(const int8_t* const* four, int64_t at, __mmask64 mask, uint8_t* to) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i)
      rows[i] = four[i] == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8(mask, four[i] + at);
    const __m512i low_even = _mm512_unpacklo_epi8(rows[0], rows[1]), high_even = _mm512_unpackhi_epi8(rows[0], rows[1]);
    const __m512i low_odd = _mm512_unpacklo_epi8(rows[2], rows[3]), high_odd = _mm512_unpackhi_epi8(rows[2], rows[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(low_even, low_odd));
    _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(low_even, low_odd));
    _mm512_store_si512(to + 128, _mm512_unpacklo_epi16(high_even, high_odd));
    _mm512_store_si512(to + 192, _mm512_unpackhi_epi16(high_even, high_odd));
  }

  Rows of_;
  int64_t depth_, panels_, padded_;
  uint8_t *q_, *keys_, *values_, *weights_;
  // By row: powers of two of its query and of its weights, and what adding 128 to each code has added to its scores.
  float *query_units_, *weight_units_;
  int32_t* added_;
};

#else

constexpr bool kMultipliesCodes = false;
constexpr int64_t kMostOfCodes = 0;
class CodePanels;

#endif

}  // namespace slipstream
