// How a step goes through recurrent states: each request goes on from the one in a slot, and leaves one behind some of its
// tokens: behind the last, behind the end of a page that others may resume from, or behind each of its drafts.

#pragma once

#include <vector>

#include "parts.h"

namespace slipstream {

// Consecutive tokens of one request, none perhaps, that go on from the state in slot `from` and leave theirs in `to`.
struct Stretch {
  int64_t token, tokens, from, to;
};

// All tokens of one request, each stretch going on where the one before it stopped. No two courses have a slot in common.
struct Course {
  const Stretch* stretches;
  int64_t count;

  const Stretch* begin() const { return stretches; }
  const Stretch* end() const { return stretches + count; }
};

class StatePlan {
 public:
  // `extends`: tokens of each of so many requests.
  void begin(const StepStates& states, const int64_t* extends, int64_t requests) {
    const auto& [sources, ends, slots, convs, recurrents] = states;
    const int64_t *source = sources.const_data_ptr<int64_t>(), *slot = slots.const_data_ptr<int64_t>();
    const int64_t *end = ends.const_data_ptr<int64_t>(), count = ends.size(0);
    stretches_.clear();
    courses_.clear();
    // Room for all of them first: courses point into it.
    stretches_.reserve(count);
    int64_t token = 0, next = 0;
    for (int64_t request = 0; request < requests; ++request) {
      const int64_t behind = token + extends[request], first = next;
      for (int64_t from = source[request]; next < count && end[next] <= behind; from = slot[next++]) {
        TORCH_CHECK(end[next] >= token, "states are kept in the order of tokens");
        stretches_.push_back({token, end[next] - token, from, slot[next]});
        token = end[next];
      }
      TORCH_CHECK(token == behind, "a request leaves no state behind its last token");
      courses_.push_back({stretches_.data() + first, next - first});
    }
    TORCH_CHECK(next == count, "states are kept of tokens that the step has not");
  }

  const std::vector<Course>& courses() const { return courses_; }

 private:
  std::vector<Stretch> stretches_;
  std::vector<Course> courses_;
};

}  // namespace slipstream
