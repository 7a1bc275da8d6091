// What a layer has between tokens: attention, or a recurrence that keeps a state instead of all tokens.

#pragma once

#include <algorithm>
#include <vector>

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
  // Whether it keeps anything of a token for later ones.
  virtual bool keeps() const { return true; }
  // How many heads of queries share a head of keys, 0 if it does not attend.
  virtual int64_t group() const { return 0; }
  // How many keys a query sees at most, if not all before it, else 0.
  virtual int64_t window() const { return 0; }
};

// Calls work(course, first, last, worker) for all of `count` things of every course, in parts of `size` only if there are
// few courses. What a part computes must not depend on where it begins.
template <typename Work>
void in_parts(Team& team, const std::vector<Course>& courses, int64_t count, int64_t size, const Work& work) {
  const int64_t many = static_cast<int64_t>(courses.size());
  if (many >= 4 * team.size()) size = count;
  const int64_t parts = (count + size - 1) / size;
  team.run(many * parts, [&](int64_t chunk, int64_t worker) {
    const int64_t first = chunk % parts * size;
    work(courses[chunk / parts], first, std::min(count, first + size), worker);
  });
}

}  // namespace slipstream
