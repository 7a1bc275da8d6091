// What stands between the two products of an MLP, with a gate beside it or without.

#pragma once

#include <stdexcept>
#include <string>

#include "vectors.h"

namespace slipstream {

// As torch has it: linear where one more would be lost.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

inline Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "relu2") return Activation::kRelu2;
  throw std::invalid_argument("there is no activation " + name);
}

// Within 2e-7 of it.
inline Floats tanh_of(Floats x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

// Within 4e-7 of it, and a NaN for a NaN. A quotient of polynomials in x^2, fitted to the largest error on [0, 4], behind which
// it is 1. One by way of an exponential (Abramowitz and Stegun, 7.1.26) takes twice as many operations.
inline Floats erf_of(Floats x) {
  x = x < -4.0f ? Floats{} - 4.0f : x;
  x = x > 4.0f ? Floats{} + 4.0f : x;
  const Floats u = x * x;
  Floats p = Floats{} + 1.974797e-06f;
  p = p * u + 2.8803834e-04f;
  p = p * u + 4.0036314e-03f;
  p = p * u + 5.346744e-02f;
  p = p * u + 1.9624905e-01f;
  p = p * u + 1.128379f;
  Floats q = Floats{} + 3.748035e-05f;
  q = q * u + 1.2163509e-03f;
  q = q * u + 1.5444401e-02f;
  q = q * u + 1.1647641e-01f;
  q = q * u + 5.0725234e-01f;
  q = q * u + 1.0f;
  return x * p / q;
}

template <Activation kind>
inline Floats activated(Floats x) {
  if constexpr (kind == Activation::kSilu) return x / (1.0f + exp_of(-x));
  if constexpr (kind == Activation::kGelu) return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
  if constexpr (kind == Activation::kGeluTanh)
    return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
  // Written so that a NaN stays one.
  const Floats positive = x < 0.0f ? Floats{} : x;
  if constexpr (kind == Activation::kRelu2) return positive * positive;
  return positive;
}

// out[count] = activation of x, times `by` unless that is null; count is a multiple of the lanes.
template <Activation kind, typename T>
void activate_as(const float* x, const float* by, T* out, int64_t count) {
  if (by == nullptr) {
    for (int64_t i = 0; i < count; i += kLanes) store(activated<kind>(load(x + i)), out + i);
  } else {
    for (int64_t i = 0; i < count; i += kLanes) store(activated<kind>(load(x + i)) * load(by + i), out + i);
  }
}

template <typename T>
void activate(Activation kind, const float* x, const float* by, T* out, int64_t count) {
  switch (kind) {
    case Activation::kSilu: return activate_as<Activation::kSilu>(x, by, out, count);
    case Activation::kGelu: return activate_as<Activation::kGelu>(x, by, out, count);
    case Activation::kGeluTanh: return activate_as<Activation::kGeluTanh>(x, by, out, count);
    case Activation::kRelu: return activate_as<Activation::kRelu>(x, by, out, count);
    case Activation::kRelu2: return activate_as<Activation::kRelu2>(x, by, out, count);
  }
}

// A gate that is kept below `limit`, beside an input that is kept within it and has `offset` added.
struct Clamp {
  float alpha, limit, offset;
};

// out[count] = gate sigmoid(alpha gate) (x + offset).
template <typename T>
void activate_clamped(const Clamp& clamp, const float* gate, const float* x, T* out, int64_t count) {
  const Floats most = Floats{} + clamp.limit;
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats g = load(gate + i), by = load(x + i);
    g = g > most ? most : g;
    by = by > most ? most : by;
    by = by < -most ? -most : by;
    store(g / (1.0f + exp_of(-clamp.alpha * g)) * (by + clamp.offset), out + i);
  }
}

// xIELU (Huang and Schlag, 2024): a parabola above 0, and below it what ELU lets through of x, integrated.
struct Curve {
  float above, below, linear, most;
};

// out[count] of x.
template <typename T>
void activate_curved(const Curve& curve, const float* x, T* out, int64_t count) {
  const Floats most = Floats{} + curve.most;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats in = load(x + i), straight = curve.linear * in;
    const Floats below = (exp_of(in > most ? most : in) - 1.0f - in) * curve.below;
    store((in > 0.0f ? curve.above * in * in : below) + straight, out + i);
  }
}

// x[count], each times the sigmoid of a gate.
template <typename T>
void multiply_by_sigmoids(const T* gates, T* x, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(x + i) / (1.0f + exp_of(-load(gates + i))), x + i);
  for (; i < count; ++i) narrow(widen(x[i]) / (1.0f + std::exp(-widen(gates[i]))), x[i]);
}

}  // namespace slipstream
