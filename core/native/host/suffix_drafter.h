// Drafts from what was said before, for all rows of a step at once. See core/speculation/suffix_drafter.py.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "confidence.h"
#include "suffix_index.h"

namespace slipstream_host {

namespace py = pybind11;

using Int64s = py::array_t<int64_t, py::array::c_style>;

constexpr int64_t kMostUnheard = 1024;  // tokens that are noted together: a step waits 0.3 ms for them

// One row.
struct Follower {
  bool speculates = false;
  Text text;
  Found found;                   // what followed its end, whether that was proposed or not
  std::vector<int64_t> unheard;  // tokens of steps behind which no drafts were wanted
  std::vector<int64_t> heard;    // the end of the text, which is not noted yet
};

class SuffixDrafter {
 public:
  SuffixDrafter(int64_t bytes_limit, int64_t most)
      : index_(bytes_limit), confidence_(kNumOrders, most) {}

  int64_t nbytes() const { return index_.nbytes(); }

  // `rows` have new owners, which do not speculate unless they are seeded.
  void forget(const Int64s& rows) {
    catch_up();
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      Follower* follower = find(rows.data()[i]);
      if (follower == nullptr) continue;
      note(*follower);
      *follower = Follower();
    }
  }

  // All that is known of the new owner of `row`.
  void seed(int64_t row, int64_t scope, const Int64s& ids) {
    if (row >= static_cast<int64_t>(followers_.size())) followers_.resize(row + 1);
    Follower& follower = followers_[row];
    follower = Follower();
    follower.speculates = true;
    follower.text.scope = scope;
    index_.write_all(follower.text, ids.data(), ids.size());
  }

  // Rows got `counts` tokens each. Noted later, all at once.
  void hear(const Int64s& rows, const Int64s& counts, const Int64s& tokens) {
    const int64_t* came = tokens.data();
    for (py::ssize_t i = 0; i < rows.size(); came += counts.data()[i++]) {
      unheard_ += counts.data()[i];  // of all rows: when texts are noted decides what is found, here as in Python
      Follower* follower = find(rows.data()[i]);
      if (follower == nullptr) continue;
      if (follower->unheard.empty()) waiting_.push_back(rows.data()[i]);
      follower->unheard.insert(follower->unheard.end(), came, came + counts.data()[i]);
    }
    if (unheard_ >= kMostUnheard) catch_up();
  }

  // Notes the tokens of each of n rows; (drafts int64[n, most], how many of them count int64[n]).
  py::tuple draft(const Int64s& rows, const Int64s& counts, const Int64s& tokens, int64_t most, double worth,
                  double least) {
    catch_up();
    const int64_t* came = tokens.data();
    for (py::ssize_t i = 0; i < rows.size(); came += counts.data()[i++]) {
      Follower* follower = find(rows.data()[i]);
      if (follower == nullptr) continue;
      came_.assign(came, came + counts.data()[i]);
      listen(*follower, came_);
      note(*follower);
    }
    auto [ids, lens] = empty(rows.size(), most);
    double expected = 0;
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      Follower* follower = find(rows.data()[i]);
      if (follower == nullptr) continue;
      Found& found = follower->found;
      index_.follow(follower->text, most, found);
      const Prospect prospect = confidence_.prospect(found.order, found.ids.size(), worth);
      std::copy_n(found.ids.begin(), prospect.number, ids.mutable_data() + i * most);
      lens.mutable_data()[i] = prospect.number;
      expected += prospect.right;
    }
    if (expected < least) std::fill_n(lens.mutable_data(), lens.size(), 0);
    return py::make_tuple(std::move(ids), std::move(lens));
  }

  // Up to `most` tokens that followed what was heard of each of n rows: as `draft` returns them.
  py::tuple guess(const Int64s& rows, int64_t most) {
    catch_up();
    auto [ids, lens] = empty(rows.size(), most);
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      Follower* follower = find(rows.data()[i]);
      if (follower == nullptr) continue;
      note(*follower);
      index_.follow(follower->text, most, guessed_);
      std::copy(guessed_.ids.begin(), guessed_.ids.end(), ids.mutable_data() + i * most);
      lens.mutable_data()[i] = guessed_.ids.size();
    }
    return py::make_tuple(std::move(ids), std::move(lens));
  }

 private:
  Follower* find(int64_t row) {
    const bool known = row >= 0 && row < static_cast<int64_t>(followers_.size()) && followers_[row].speculates;
    return known ? &followers_[row] : nullptr;
  }

  static std::pair<Int64s, Int64s> empty(int64_t rows, int64_t width) {
    Int64s ids({rows, width}), lens(rows);
    std::fill_n(ids.mutable_data(), ids.size(), kNowhere);
    std::fill_n(lens.mutable_data(), rows, 0);
    return {std::move(ids), std::move(lens)};
  }

  // Hear the steps behind which no drafts were wanted, the rows in their order.
  void catch_up() {
    unheard_ = 0;
    std::sort(waiting_.begin(), waiting_.end());
    for (const int64_t row : waiting_) {
      Follower& follower = followers_[row];
      listen(follower, follower.unheard);
      follower.unheard.clear();
    }
    waiting_.clear();
  }

  // Its row goes on with the tokens that `came`.
  void listen(Follower& follower, const std::vector<int64_t>& came) {
    confidence_.judge(follower.found.order, follower.found.ids, came);
    follower.found.ids.clear();
    follower.heard.insert(follower.heard.end(), came.begin(), came.end());
    if (static_cast<int64_t>(follower.heard.size()) >= kBlockTokens) note(follower);
  }

  // Put what was heard of it into the index.
  void note(Follower& follower) {
    index_.write(follower.text, follower.heard.data(), follower.heard.size());
    follower.heard.clear();
  }

  SuffixIndex index_;
  Confidence confidence_;
  std::vector<Follower> followers_;  // by row
  std::vector<int64_t> waiting_;     // rows with tokens that were not heard
  int64_t unheard_ = 0;              // how many they are
  std::vector<int64_t> came_;
  Found guessed_;
};

inline void bind_suffix_drafter(py::module_& module) {
  py::class_<SuffixDrafter>(module, "SuffixDrafter")
      .def(py::init<int64_t, int64_t>())
      .def_property_readonly("nbytes", &SuffixDrafter::nbytes)
      .def("forget", &SuffixDrafter::forget)
      .def("seed", &SuffixDrafter::seed)
      .def("hear", &SuffixDrafter::hear)
      .def("draft", &SuffixDrafter::draft)
      .def("guess", &SuffixDrafter::guess);
}

}  // namespace slipstream_host
