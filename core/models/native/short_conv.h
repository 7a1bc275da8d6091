// A short convolution between two gates (Hasani et al., LFM2, 2025): all that its layer knows of earlier tokens are the
// convolution's newest inputs.

#pragma once

#include "conv.h"
#include "mixer.h"

namespace slipstream {

template <typename T>
class ShortConv final : public Mixer<T> {
 public:
  // `place`: of its states among those of all layers.
  ShortConv(const ShortConvParts& parts, size_t place)
      : into_(std::get<0>(parts)), conv_(std::get<1>(parts)), out_(std::get<2>(parts)), place_(place) {
    TORCH_CHECK(into_.outputs() == 3 * conv_.channels(), "a short convolution has two gates and its input");
  }

  const Linear<T>& out() const override { return out_; }

  T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* read, int64_t tokens) const override {
    const int64_t channels = conv_.channels(), width = 3 * channels, stride = out_.depth();
    T* projected = shop.buffer<T>(3, tokens, width);
    T* mixed = shop.buffer<T>(4, tokens, stride);
    into_.write(shop.team, shop.scratch, read, tokens, projected, width);
    for (int64_t t = 0; t < tokens; ++t) std::fill(mixed + t * stride + channels, mixed + (t + 1) * stride, T(0.0f));
    T* states = step.convs(place_).template mutable_data_ptr<T>();
    in_parts(shop.team, planner.courses(), channels, kPart, [&](const Course& course, int64_t first, int64_t last,
                                                                int64_t worker) {
      conv_.run(
          course, states, first, last, shop.scratch[worker],
          [&](int64_t token, int64_t c) {
            const T* gate = projected + token * width + c;
            return load(gate) * load(gate + 2 * channels);
          },
          [&](int64_t token, int64_t c, Floats sums) {
            store(load(projected + token * width + channels + c) * rounded<T>(sums), mixed + token * stride + c);
          });
    });
    return mixed;
  }

 private:
  // Channels that are worth a chunk of their own.
  static constexpr int64_t kPart = 128;

  Linear<T> into_;
  CausalConv<T> conv_;
  Linear<T> out_;
  size_t place_;
};

}  // namespace slipstream
