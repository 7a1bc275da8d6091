// A matrix of four-bit weights in groups of inputs, packed into panels (`nibbles.h`), and the rows it is applied to.

#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "nibbles.h"
#include "parts.h"
#include "scratch.h"
#include "team.h"

namespace slipstream {

template <typename T>
class Grouped {
 public:
  // Rows as products read them: in the order of the weights' inputs, their sums by group, and, if they are few, floats by
  // the factors of their nibbles.
  struct Rows {
    const T* x;
    const float* sums;
    const float* wide;
  };

  // weight uint8 [N, K / 2], the even input of two in the low bits; depth: K filled up.
  Grouped(const Tensor& weight, const GroupParts& parts, int64_t depth)
      : depth_(depth),
        size_(std::get<2>(parts) < 2 * weight.size(1) ? std::get<2>(parts) : depth),
        count_((depth + size_ - 1) / size_),
        order_(std::get<3>(parts)) {
    const auto& [scale, zero, size, order] = parts;
    TORCH_CHECK(weight.scalar_type() == at::kByte && weight.dim() == 2, "four-bit weights come as bytes");
    TORCH_CHECK(size_ % kDepth == 0, "a group has a multiple of ", kDepth, " inputs, not ", size);
    TORCH_CHECK(!order || order->size(0) == 2 * weight.size(1), "an order has all inputs");
    pack(weight.contiguous());
    const bool half = scale.scalar_type() == at::kBFloat16;
    scale_ = by_panel(half ? scale : scale.to(at::kFloat));
    if (zero) zero_ = by_panel(zero->scalar_type() == at::kChar ? *zero : zero->to(at::kFloat));
    if (order) order_ = order->contiguous();
  }

  Rows prepare(Team& team, Scratch& scratch, const T* x, int64_t rows) const {
    const bool few = rows <= kFewNibbleRows && !kNibblePairs<T> && few_apart(scratch);
    T* sorted = order_ ? scratch.take<T>(kSorted, round_up(rows, kRows) * depth_) : nullptr;
    float* sums = scratch.take<float>(kSums, rows * count_);
    float* wide = few ? scratch.take<float>(kWide, rows * depth_) : nullptr;
    team.run((rows + kTaken - 1) / kTaken, [&](int64_t chunk, int64_t) {
      for (int64_t row = chunk * kTaken; row < std::min(rows, (chunk + 1) * kTaken); ++row) {
        const T* read = x + row * depth_;
        if (sorted) read = sort(read, sorted + row * depth_);
        for (int64_t group = 0; group < count_; ++group) {
          const int64_t from = group * size_;
          sums[row * count_ + group] = sum(read + from, std::min(size_, depth_ - from));
        }
        if (few)
          for (int64_t k = 0; k < depth_; ++k) wide[row * depth_ + k] = widen(read[k]) * nibble_factor(k % kPerWord);
      }
    });
    return {sorted ? sorted : x, sums, wide};
  }

  // out[count][64] of rows from `from` on.
  void product(Scratch& scratch, const Rows& rows, int64_t from, int64_t count, int64_t panel, float* out) const {
    const uint32_t* weights = words(panel);
    const PanelGroups groups = groups_of(panel);
    const float* sums = rows.sums + from * count_;
    const float* wide = rows.wide;  // all of them are in the first block
    if (count <= kFewNibbleRows && (wide || kNibblePairs<T>) && few_apart(scratch)) {
      return of_so_many<kFewNibbleRows>(count, [&](auto taken) {
        if constexpr (kNibblePairs<T>) {
          nibble_pair_rows<taken>(rows.x + from * depth_, depth_, sums, count_, weights, depth_, groups, out);
        } else {
          nibble_rows<taken>(wide, depth_, sums, count_, weights, depth_, groups, out);
        }
      });
    }
    T* room = scratch.take<T>(1, widened_room<T>(size_));
    float* products = scratch.take<float>(2, round_up(count, kRows) * kPanel);
    multiply_groups(rows.x + from * depth_, depth_, count, sums, count_, weights, depth_, groups, room, products, out,
                    scratch.invariant());
  }

 private:
  // Places of the caller's scratch, and rows that one thread prepares at a time.
  static constexpr int64_t kSorted = 13, kSums = 14, kWide = 15, kTaken = 8;

  // Whether few rows may go another way than many.
  static bool few_apart(const Scratch& scratch) { return !scratch.invariant() || nibbles_add_alike<T>(); }

  const uint32_t* words(int64_t panel) const {
    return reinterpret_cast<const uint32_t*>(words_.const_data_ptr<int32_t>()) + panel * (depth_ / kPerWord) * kPanel;
  }

  PanelGroups groups_of(int64_t panel) const {
    const int64_t at = panel * count_ * kPanel;
    const bool half = scale_.scalar_type() == at::kBFloat16, whole = zero_ && zero_->scalar_type() == at::kChar;
    return {size_, half ? nullptr : scale_.const_data_ptr<float>() + at,
            half ? scale_.const_data_ptr<BFloat16>() + at : nullptr,
            whole ? zero_->const_data_ptr<int8_t>() + at : nullptr,
            zero_ && !whole ? zero_->const_data_ptr<float>() + at : nullptr};
  }

  const T* sort(const T* from, T* to) const {
    const int64_t inputs = order_->size(0), *order = order_->const_data_ptr<int64_t>();
    for (int64_t k = 0; k < inputs; ++k) to[k] = from[order[k]];
    std::fill(to + inputs, to + depth_, T(0.0f));
    return to;
  }

  static float sum(const T* x, int64_t count) {
    Floats sums{};
    for (int64_t k = 0; k < count; k += kLanes) sums += load(x + k);
    return sum_of(sums);
  }

  // Two inputs, from 2 `place` of a word's eight on, where they belong.
  static uint32_t nibbles_of(uint8_t byte, int64_t place) {
    const uint32_t even = byte & 15u, odd = byte >> 4;
    return even << (4 * nibble_of(2 * place)) | odd << (4 * nibble_of(2 * place + 1));
  }

  void pack(const Tensor& weight) {
    const int64_t outputs = weight.size(0), bytes = weight.size(1), panels = round_up(outputs, kPanel) / kPanel;
    words_ = at::empty({panels * (depth_ / kPerWord) * kPanel}, weight.options().dtype(at::kInt));
    ask_for_huge_pages(words_.const_data_ptr(), words_.nbytes());
    uint32_t* to = reinterpret_cast<uint32_t*>(words_.mutable_data_ptr<int32_t>());
    std::fill_n(to, words_.numel(), 0u);
    const uint8_t* from = weight.const_data_ptr<uint8_t>();
    for (int64_t n = 0; n < outputs; ++n)
      for (int64_t byte = 0; byte < bytes; byte += 4) {
        uint32_t word = 0;
        for (int64_t i = 0; i < std::min<int64_t>(4, bytes - byte); ++i)
          word |= nibbles_of(from[n * bytes + byte + i], i);
        to[(n / kPanel * (depth_ / kPerWord) + byte / 4) * kPanel + n % kPanel] = word;
      }
  }

  // [N, groups] as [panels, groups, 64], zeros behind the last.
  Tensor by_panel(const Tensor& given) const {
    TORCH_CHECK(given.dim() == 2 && given.size(1) == count_, "scales and zeros have ", count_, " groups");
    const int64_t outputs = given.size(0), panels = round_up(outputs, kPanel) / kPanel;
    Tensor filled = at::zeros({panels * kPanel, count_}, given.options());
    filled.narrow(0, 0, outputs).copy_(given);
    return filled.view({panels, kPanel, count_}).transpose(1, 2).contiguous();
  }

  int64_t depth_, size_, count_;
  MaybeTensor order_;
  Tensor words_, scale_;
  MaybeTensor zero_;
};

}  // namespace slipstream
