// A step of the tokens alone whose logits are wanted: layers that keep nothing of a token need no others, and those that read
// the keys of layers before them (YOCO, Sun et al. 2024; Gemma 3n, 2025) stand all at the end.

#pragma once

#include <optional>
#include <vector>

#include "plan.h"

namespace slipstream {

class Narrowed {
 public:
  // Whether a step can go on so: every request wants its last tokens, or none, and none of them sees beyond itself.
  static bool fits(const Step& step) {
    if (step.images && (std::get<1>(*step.images) || !std::get<2>(*step.images).empty())) return false;
    return count(step).has_value();
  }

  explicit Narrowed(const Step& step)
      : ids_(step.ids.index_select(0, step.wanted)),
        positions_(step.positions.index_select(0, step.wanted)),
        slots_(step.slots.index_select(0, step.wanted)),
        extends_(at::empty_like(step.extends)),
        wanted_(at::arange(step.wanted.size(0))) {
    const std::vector<int64_t> counts = *count(step);
    std::copy(counts.begin(), counts.end(), extends_.mutable_data_ptr<int64_t>());
    prefixes_ = step.prefixes + step.extends - extends_;
  }

  // `step` with these tokens; good as long as both are.
  Step of(const Step& step) const {
    return {ids_,         positions_,     slots_,         step.rows,     prefixes_,       extends_,
            wanted_,      step.table,     step.keys,      step.values,   step.wants_hidden, step.layers,
            step.features, step.page_map, step.page_size, no_states_,   step.key_scales, step.value_scales,
            step.images};
  }

 private:
  // By request how many of its last tokens are wanted; nothing where others are.
  static std::optional<std::vector<int64_t>> count(const Step& step) {
    const int64_t *extends = step.extends.const_data_ptr<int64_t>(), *wanted = step.wanted.const_data_ptr<int64_t>();
    std::vector<int64_t> found;
    int64_t token = 0, next = 0;
    for (int64_t place = 0; place < step.rows.size(0); ++place) {
      token += extends[place];
      const int64_t first = next;
      while (next < step.wanted.size(0) && wanted[next] < token) ++next;
      if (next > first && wanted[first] != token - (next - first)) return std::nullopt;
      found.push_back(next - first);
    }
    return found;
  }

  Tensor ids_, positions_, slots_, prefixes_, extends_, wanted_;
  std::optional<StepStates> no_states_;
};

}  // namespace slipstream
