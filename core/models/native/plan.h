// What a step is, and how its attention falls into pieces: by the ordinary table of slots, where requests may share keys,
// and by that of the layers with windows, whose keys may be in a pool of their own and are nobody else's business. Layers
// with recurrent states go by courses.

#pragma once

#include <algorithm>
#include <vector>

#include "parts.h"
#include "scratch.h"
#include "sharing.h"
#include "states.h"
#include "stored.h"

namespace slipstream {

// See `forward` in `decoder.cpp`.
struct Step {
  const Tensor &ids, &positions, &slots, &rows, &prefixes, &extends;
  const Tensor &wanted, &table;
  const std::vector<Tensor>&keys, &values;
  bool wants_hidden;
  const std::vector<int64_t>& layers;
  const MaybeTensor& features;
  const MaybeTensor& page_map;
  int64_t page_size;
  const std::optional<StepStates>& states;
  const std::vector<Tensor>&key_scales, &value_scales;
  const std::optional<StepImages>& images;

  const Tensor& convs(size_t place) const { return std::get<3>(*states)[place]; }
  // Whether codes are stored instead of numbers.
  bool coded(size_t place) const { return keys[place].scalar_type() == at::kChar; }

  // What the layers that attend have their keys and values in; S as `coded` says.
  template <typename S>
  Stored<S> stored(size_t place) const {
    Stored<S> found{keys[place].template mutable_data_ptr<S>(), values[place].template mutable_data_ptr<S>()};
    if constexpr (Stored<S>::kCodes) {
      found.key_scales = key_scales[place].template mutable_data_ptr<uint8_t>();
      found.value_scales = value_scales[place].template mutable_data_ptr<uint8_t>();
    }
    return found;
  }

  const Tensor& recurrent(size_t place) const { return *std::get<4>(*states)[place]; }
};

// What a layer's attention goes by.
struct Plan {
  const std::vector<Group>* groups;
  const int64_t* slots;  // where the step's tokens are stored
};

class Planner {
 public:
  // `heads` share a KV head, 0 if no layer attends; `window`: the longest one of all layers, 0 if there is none.
  void begin(const Step& step, int64_t heads, int64_t window) {
    if (step.states) states_.begin(*step.states, step.extends.const_data_ptr<int64_t>(), step.rows.size(0));
    cut(step);
    if (heads == 0) return;
    own_ = {nullptr, step.slots.const_data_ptr<int64_t>()};
    windowed_ = own_;
    if (window > 0) plan_windows(step, window);
    if (step.images && std::get<3>(*step.images))
      for (Piece& piece : pieces_) piece.sees = 0;
    own_.groups = &sharing_.plan(pieces_, heads);
  }

  const Plan& of(bool windowed) const { return windowed ? windowed_ : own_; }
  const std::vector<Course>& courses() const { return states_.courses(); }

 private:
  static constexpr int64_t kBlockTokens = 64;

  void cut(const Step& step) {
    const int64_t* prefixes = step.prefixes.const_data_ptr<int64_t>();
    const int64_t* extends = step.extends.const_data_ptr<int64_t>();
    const int64_t* rows = step.rows.const_data_ptr<int64_t>();
    const int32_t* table = step.table.const_data_ptr<int32_t>();
    pieces_.clear();
    int64_t token = 0;
    for (int64_t place = 0; place < step.rows.size(0); ++place) {
      const int64_t end = token + extends[place], before = prefixes[place] - token;
      while (token < end) {
        const auto [next, sees] = cut_of(step.images, token, std::min(token + kBlockTokens, end));
        pieces_.push_back({token, next - token, before + token, table + rows[place] * step.table.size(1),
                           sees > 0 ? before + sees : 0});
        token = next;
      }
    }
    TORCH_CHECK(token == step.ids.size(0), "the requests of a step have ", token, " tokens, and ", step.ids.size(0),
                " ids came");
  }

  // Where a piece ends that begins at `token`, `most` at most, and the token that it sees up to, if that is of an image: 0 for
  // what sees what is before it. No piece is of an image in part.
  static std::pair<int64_t, int64_t> cut_of(const std::optional<StepImages>& images, int64_t token, int64_t most) {
    if (!images) return {most, 0};
    for (const auto& [begin, end] : std::get<2>(*images)) {
      if (token < begin) return {std::min(most, begin), 0};
      if (token < end) return {std::min(most, end), end};
    }
    return {most, 0};
  }

  void plan_windows(const Step& step, int64_t window) {
    window_pieces_ = pieces_;
    if (step.page_map) translate(step, window);
    windowed_.groups = &windows_.apart(window_pieces_);
  }

  // Slots of the window pool stand for those of the ordinary one, as far as a window reaches.
  void translate(const Step& step, int64_t window) {
    const int32_t* pages = step.page_map->const_data_ptr<int32_t>();
    const int64_t size = step.page_size, width = step.table.size(1), tokens = step.slots.size(0);
    const auto slot_of = [&](int64_t slot) { return pages[slot / size] * size + slot % size; };
    int32_t* table = room_.take<int32_t>(0, static_cast<int64_t>(pieces_.size()) * width);
    for (Piece& piece : window_pieces_) {
      const int32_t* from = piece.table;
      for (int64_t at = std::max<int64_t>(0, piece.position + 1 - window); at < piece.end(); ++at)
        table[at] = static_cast<int32_t>(slot_of(from[at]));
      piece.table = table;
      table += width;
    }
    int64_t* slots = room_.take<int64_t>(1, tokens);
    for (int64_t t = 0; t < tokens; ++t) slots[t] = slot_of(windowed_.slots[t]);
    windowed_.slots = slots;
  }

  std::vector<Piece> pieces_, window_pieces_;
  Sharing sharing_, windows_;
  Scratch room_;
  Plan own_{}, windowed_{};
  StatePlan states_;
};

}  // namespace slipstream
