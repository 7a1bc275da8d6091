// A weight matrix in panels, applied by a team: whoever is free takes the next panel, for all rows or a block of them.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bytes.h"
#include "grouped.h"
#include "panels.h"
#include "parts.h"
#include "scratch.h"
#include "team.h"

namespace slipstream {

// Outputs stay what the product makes.
struct AsMade {
  void operator()(int64_t, int64_t, float*, int64_t) const {}
};

template <typename T>
class Linear {
 public:
  // Rows that go through a panel at a time, at most, and at least where others could go through it meanwhile.
  static constexpr int64_t kBlock = 256, kLeastBlock = 12;
  // Chunks of work for each thread: with fewer, the last one holds up all others for long.
  static constexpr int64_t kChunksEach = 3;
  // Inputs of which passes are few.
  static constexpr int64_t kBrief = 128;
#if defined(__AMX_BF16__)
  // Tiles read as many rows at a time: a block that began elsewhere would have them read behind the last row's room.
  static constexpr int64_t kBlockStep = 16;
#else
  static constexpr int64_t kBlockStep = 1;
#endif

  // weight [N, K] of T, of a type that becomes it, or of int8, or of four bits in groups; what each output is multiplied by
  // as scale [N], or none; bias [N] or none.
  Linear(const at::Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias,
         const std::optional<GroupParts>& groups)
      : outputs_(weight.size(0)),
        depth_(round_up(weight.size(1) * (groups ? 2 : 1), kDepth)),
        bytes_(weight.scalar_type() == at::kChar) {
    if (groups) {
      grouped_.emplace(weight, *groups, depth_);
    } else if (bytes_) {
      pack<int8_t>(weight.contiguous());
    } else {
      pack<T>(weight.to(c10::CppTypeToScalarType<T>::value).contiguous());
    }
    if (scale) scale_ = scale->to(at::kFloat).contiguous();
    if (bias) bias_ = bias->to(at::kFloat).contiguous();
  }

  explicit Linear(const Matrix& matrix)
      : Linear(std::get<0>(matrix), std::get<1>(matrix), std::get<2>(matrix), std::get<3>(matrix)) {}

  int64_t outputs() const { return outputs_; }
  // Inputs filled up: the stride of the rows it is applied to.
  int64_t depth() const { return depth_; }
  int64_t panels() const { return (outputs_ + kPanel - 1) / kPanel; }

  // Calls sink(row, first output, outputs as float[64], how many of them exist) for each of x[rows][depth] and panel.
  template <typename Sink>
  void apply(Team& team, std::vector<Scratch>& scratch, const T* x, int64_t rows, const Sink& sink) const {
    const Rows read = grouped_ ? grouped_->prepare(team, scratch[0], x, rows) : Rows{x, nullptr, nullptr};
    in_chunks(team, rows, [&](const Chunk& chunk, int64_t worker) {
      float* out = panel_of(scratch[worker], read, chunk.from, chunk.rows, chunk.panel, chunk.next);
      const int64_t first = chunk.panel * kPanel, count = std::min(kPanel, outputs_ - first);
      for (int64_t row = 0; row < chunk.rows; ++row) sink(chunk.from + row, first, out + row * kPanel, count);
    });
  }

  // Writes all outputs of x[rows][depth] to out[rows][stride], each row of a panel once `after` is through with it, which is
  // called as a sink of `apply` while it is in a cache; there is room for whole vectors.
  template <typename After = AsMade>
  void write(Team& team, std::vector<Scratch>& scratch, const T* x, int64_t rows, T* out, int64_t stride,
             const After& after = {}) const {
    if constexpr (std::is_same_v<T, float>)
      if (goes_straight(block_of(rows, team.size()))) return write_straight(team, scratch, x, rows, out, stride, after);
    apply(team, scratch, x, rows, [&](int64_t row, int64_t first, float* found, int64_t count) {
      after(row, first, found, count);
      for (int64_t i = 0; i < count; ++i) narrow(found[i], out[row * stride + first + i]);
    });
  }

  // What a thread reads of a panel from memory; null where there is no such panel, or groups are unpacked for long.
  const void* weights_of(int64_t panel) const {
    if (grouped_ || panel >= panels()) return nullptr;
    return static_cast<const char*>(panels_.const_data_ptr()) + panel * kPanel * depth_ * panels_.element_size();
  }

  // [rows][64] in place 0 of `scratch`: one panel's outputs of x[rows][depth], for a caller with chunks of its own. `next`:
  // `weights_of` what the caller's thread multiplies with after it, mostly, or null.
  float* outputs_of(Scratch& scratch, const T* x, int64_t rows, int64_t panel, const void* next) const {
    Team alone(1);
    const Rows read = grouped_ ? grouped_->prepare(alone, scratch, x, rows) : Rows{x, nullptr, nullptr};
    return panel_of(scratch, read, 0, rows, panel, next);
  }

 private:
  using Rows = typename Grouped<T>::Rows;

  // Rows that go through a panel, and `weights_of` what the thread reads next.
  struct Chunk {
    int64_t panel, from, rows;
    const void* next;
  };

  template <typename Work>
  void in_chunks(Team& team, int64_t rows, const Work& work) const {
    const int64_t block = block_of(rows, team.size()), blocks = (rows + block - 1) / block;
    team.run(panels() * blocks, [&](int64_t chunk, int64_t worker) {
      const int64_t from = chunk % blocks * block;
      work({chunk / blocks, from, std::min(block, rows - from), weights_of((chunk + team.size()) / blocks)}, worker);
    });
  }

  // Whether sums of so many rows are best made where they belong. Where many short passes come back to them, they stay in a
  // cache only side by side.
  bool goes_straight(int64_t rows) const {
    return outputs_ % kPanel == 0 && !grouped_ && !bytes_ && !scale_ && (rows >= kLongPassRows || depth_ <= kBrief);
  }

  // As `write`, of whole panels of float32: sums are made where they belong, without a way through `scratch`.
  template <typename After>
  void write_straight(Team& team, const std::vector<Scratch>& scratch, const float* x, int64_t rows, float* out,
                      int64_t stride, const After& after) const {
    const float* bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    in_chunks(team, rows, [&](const Chunk& chunk, int64_t worker) {
      const Outputs mine = Outputs(out, stride, bias).at(chunk.from, chunk.panel * kPanel);
      const float* weights = static_cast<const float*>(weights_of(chunk.panel));
      multiply<true>(x + chunk.from * depth_, depth_, chunk.rows, weights, depth_, mine, false,
                     scratch[worker].invariant(), chunk.next);
      for (int64_t row = 0; row < chunk.rows; ++row)
        after(chunk.from + row, chunk.panel * kPanel, mine.to + row * stride, kPanel);
    });
  }

  // How many rows go through a panel at a time: fewer where there are too few panels to share among threads. What each
  // row gets does not depend on it.
  int64_t block_of(int64_t rows, int64_t threads) const {
    const int64_t wanted = threads == 1 ? 1 : (kChunksEach * threads + panels() - 1) / panels();
    const int64_t share = std::max(kLeastBlock, (rows + wanted - 1) / wanted);
    return std::min(kBlock, round_up(share, kBlockStep));
  }

  float* panel_of(Scratch& scratch, const Rows& read, int64_t from, int64_t rows, int64_t panel,
                  const void* next) const {
    float* out = scratch.take<float>(0, round_up(rows, kRows) * kPanel);
    if (grouped_) {
      grouped_->product(scratch, read, from, rows, panel, out);
    } else {
      product(scratch, read.x + from * depth_, rows, panel, next, out);
    }
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

  // Panels of S, as `panels.h` and `bytes.h` read them.
  template <typename S>
  void pack(const at::Tensor& weight) {
    const int64_t inputs = weight.size(1), count = round_up(outputs_, kPanel) / kPanel;
    panels_ = at::empty({count * kPanel * depth_}, weight.options());
    S* to = panels_.mutable_data_ptr<S>();
    ask_for_huge_pages(to, panels_.nbytes());
    std::fill_n(to, panels_.numel(), S(0));
    const S* from = weight.const_data_ptr<S>();
    for (int64_t n = 0; n < outputs_; ++n)
      for (int64_t k = 0; k < inputs; ++k)
        to[n / kPanel * kPanel * depth_ + panel_place<S>(n % kPanel, k)] = from[n * inputs + k];
  }

  void product(Scratch& scratch, const T* x, int64_t rows, int64_t panel, const void* next, float* out) const {
    const void* weights = weights_of(panel);
    if (bytes_) {
      T* room = scratch.take<T>(1, widened_room<T>(depth_));
      multiply(x, depth_, rows, static_cast<const int8_t*>(weights), depth_, out, room, scratch.invariant(), next);
    } else {
      multiply<true>(x, depth_, rows, static_cast<const T*>(weights), depth_, out, false, scratch.invariant(), next);
    }
  }

  int64_t outputs_, depth_;
  bool bytes_;
  at::Tensor panels_;
  MaybeTensor scale_, bias_;
  std::optional<Grouped<T>> grouped_;
};

}  // namespace slipstream
