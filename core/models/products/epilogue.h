// What becomes of the outputs of a product before anything else reads them.

#pragma once

#include <optional>
#include <string>

#include "../native/activations.h"
#include "../native/linear.h"
#include "../native/norms.h"
#include "../native/team.h"

namespace slipstream {

// In this order, each where there is one: an activation, a residual that is added, a weight and a bias of each output, and a
// norm of the row.
class Epilogue {
 public:
  // `activation`: its name, or nothing. scale and shift [N], both or none.
  Epilogue(const std::string& activation, const std::optional<NormParts>& norm, const MaybeTensor& scale,
           const MaybeTensor& shift) {
    TORCH_CHECK(scale.has_value() == shift.has_value() && (!scale || scale->numel() == shift->numel()),
                "a weight of each output comes with a bias");
    if (!activation.empty()) activation_ = activation_of(activation);
    if (norm) norm_.emplace(*norm);
    if (norm) width_ = std::get<4>(*norm);
    if (scale) {
      width_ = scale->numel();
      scale_ = filled_up(*scale);
      shift_ = filled_up(*shift);
    }
  }

  // Whether it is for rows of `outputs`.
  void check(int64_t outputs) const {
    TORCH_CHECK(width_ == 0 || width_ == outputs, "what is for ", width_, " outputs stands behind ", outputs);
  }

  // All but the norm of outputs `first`, ... of a row, `count` in a room of whole vectors; `residual`: of them, or null.
  template <typename T>
  void apply(float* found, int64_t first, int64_t count, const T* residual) const {
    const int64_t room = round_up(count, kLanes);
    if (activation_) activate(*activation_, found, nullptr, found, room);
    if (residual != nullptr) {
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) store(load(found + i) + load(residual + i), found + i);
      for (; i < count; ++i) found[i] += widen(residual[i]);
    }
    if (!scale_) return;
    const float* scale = scale_->const_data_ptr<float>() + first;
    const float* shift = shift_->const_data_ptr<float>() + first;
    for (int64_t i = 0; i < room; i += kLanes) store(load(found + i) * load(scale + i) + load(shift + i), found + i);
  }

  // Of x[rows][width], to `out`, which may be x.
  template <typename T>
  void norm(Team& team, const T* x, T* out, int64_t rows, int64_t width) const {
    if (!norm_) return;
    constexpr int64_t kTogether = 16;
    team.run((rows + kTogether - 1) / kTogether, [&](int64_t block, int64_t) {
      const int64_t first = block * kTogether, behind = std::min(rows, first + kTogether);
      for (int64_t at = first * width; at < behind * width; at += width) norm_->apply(x + at, out + at, width);
    });
  }

 private:
  // In float32, and with zeros to the end of the last panel.
  static Tensor filled_up(const Tensor& given) {
    Tensor found = at::zeros({round_up(given.numel(), kPanel)}, given.options().dtype(at::kFloat));
    found.narrow(0, 0, given.numel()).copy_(given);
    return found;
  }

  std::optional<Activation> activation_;
  std::optional<Norm> norm_;
  MaybeTensor scale_, shift_;
  int64_t width_ = 0;
};

}  // namespace slipstream
