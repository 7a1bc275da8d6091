// What a layer has between tokens: attention, or a recurrence that keeps a state instead of all tokens.

#pragma once

#include "linear.h"
#include "plan.h"
#include "workshop.h"

namespace slipstream {

template <typename T>
class Mixer {
 public:
  virtual ~Mixer() = default;

  // [tokens][out().depth()], which `out` is to be applied to, from what the layer reads, [tokens][...]. It is in buffer 4,
  // and lost when the next mixer runs.
  virtual T* mix(Workshop& shop, const Planner& planner, const Step& step, const T* read, int64_t tokens) const = 0;
  virtual const Linear<T>& out() const = 0;
  // How many keys it sees if not all, else 0.
  virtual int64_t window() const { return 0; }
};

}  // namespace slipstream
