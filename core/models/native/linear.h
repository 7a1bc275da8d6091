// A weight matrix in panels, applied by a team: whoever is free takes the next panel, for all rows or a block of them.

#pragma once

#include <ATen/ATen.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <vector>

#include "bytes.h"
#include "panels.h"
#include "parts.h"
#include "scratch.h"
#include "team.h"

namespace slipstream {

template <typename T>
class Linear {
 public:
  // Rows that go through a panel at a time.
  static constexpr int64_t kBlock = 256;

  // weight [N, K] of T or int8; what each output is multiplied by as scale [N], or none; bias [N] or none.
  Linear(const at::Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias)
      : outputs_(weight.size(0)),
        depth_(round_up(weight.size(1), kDepth)),
        bytes_(weight.scalar_type() == at::kChar) {
    if (bytes_) {
      pack<int8_t>(weight.contiguous());
    } else {
      pack<T>(weight.contiguous());
    }
    if (scale) scale_ = scale->to(at::kFloat).contiguous();
    if (bias) bias_ = bias->to(at::kFloat).contiguous();
  }

  explicit Linear(const Matrix& matrix) : Linear(std::get<0>(matrix), std::get<1>(matrix), std::get<2>(matrix)) {}

  int64_t outputs() const { return outputs_; }
  // Inputs filled up: the stride of the rows it is applied to.
  int64_t depth() const { return depth_; }
  int64_t panels() const { return (outputs_ + kPanel - 1) / kPanel; }

  // Calls sink(row, first output, outputs as float[64], how many of them exist) for each of x[rows][depth] and panel.
  template <typename Sink>
  void apply(Team& team, std::vector<Scratch>& scratch, const T* x, int64_t rows, const Sink& sink) const {
    const int64_t blocks = (rows + kBlock - 1) / kBlock;
    team.run(panels() * blocks, [&](int64_t chunk, int64_t worker) {
      const int64_t panel = chunk / blocks, from = chunk % blocks * kBlock, mine = std::min(kBlock, rows - from);
      float* out = outputs_of(scratch[worker], x + from * depth_, depth_, mine, panel);
      const int64_t first = panel * kPanel, count = std::min(kPanel, outputs_ - first);
      for (int64_t row = 0; row < mine; ++row) sink(from + row, first, out + row * kPanel, count);
    });
  }

  // [rows][64] in place 0 of `scratch`: one panel's outputs of x[rows], `stride` apart.
  float* outputs_of(Scratch& scratch, const T* x, int64_t stride, int64_t rows, int64_t panel) const {
    float* out = scratch.take<float>(0, round_up(rows, kRows) * kPanel);
    product(scratch, x, stride, rows, panel, out);
    const int64_t first = panel * kPanel, count = std::min(kPanel, outputs_ - first);
    const float* scale = scale_ ? scale_->const_data_ptr<float>() + first : nullptr;
    const float* bias = bias_ ? bias_->const_data_ptr<float>() + first : nullptr;
    for (float* found = out; found < out + rows * kPanel; found += kPanel) {
      if (scale != nullptr)
        for (int64_t i = 0; i < count; ++i) found[i] *= scale[i];
      if (bias != nullptr)
        for (int64_t i = 0; i < count; ++i) found[i] += bias[i];
    }
    return out;
  }

 private:
  // Panels of S, as `panels.h` and `bytes.h` read them.
  template <typename S>
  void pack(const at::Tensor& weight) {
    const int64_t inputs = weight.size(1), count = round_up(outputs_, kPanel) / kPanel;
    panels_ = at::empty({count * kPanel * depth_}, weight.options());
    S* to = panels_.mutable_data_ptr<S>();
#if defined(__linux__)
    // A product reads front to back, and a page of 4 KiB is over in a third of a microsecond.
    const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(to) + page - 1) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(to + panels_.numel()) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    std::fill_n(to, panels_.numel(), S(0));
    const S* from = weight.const_data_ptr<S>();
    for (int64_t n = 0; n < outputs_; ++n)
      for (int64_t k = 0; k < inputs; ++k)
        to[n / kPanel * kPanel * depth_ + panel_place<S>(n % kPanel, k)] = from[n * inputs + k];
  }

  void product(Scratch& scratch, const T* x, int64_t stride, int64_t rows, int64_t panel, float* out) const {
    const int64_t place = panel * kPanel * depth_;
    if (bytes_) {
      T* room = scratch.take<T>(1, widened_room<T>(depth_));
      multiply(x, stride, rows, panels_.const_data_ptr<int8_t>() + place, depth_, out, room);
    } else {
      multiply<true>(x, stride, rows, panels_.const_data_ptr<T>() + place, depth_, out, false);
    }
  }

  int64_t outputs_, depth_;
  bool bytes_;
  at::Tensor panels_;
  MaybeTensor scale_, bias_;
};

}  // namespace slipstream
