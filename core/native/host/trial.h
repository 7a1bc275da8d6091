// What a step computes to verify drafts, and how far each row comes. See core/speculation/trial.py.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace slipstream_host {

namespace py = pybind11;

using Int64s = py::array_t<int64_t, py::array::c_style>;

// (Tokens of each of n rows, its first place, int64[n] each; row, id and position of each of T places, int64[T] each).
// `drafts`: int64[n, K], of which `valid`, int64[n], count, and `room`, int64[n], may be tried.
inline py::tuple lay_out(const Int64s& newest, const Int64s& lens, const Int64s& drafts, const Int64s& valid,
                         const Int64s& room, int64_t vocab_size) {
  const int64_t rows = newest.size(), width = drafts.shape(1);
  Int64s counts(rows), starts(rows);
  int64_t total = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t most = std::min({width, valid.data()[i], room.data()[i]});
    const int64_t* said = drafts.data() + i * width;
    int64_t tried = 0;
    // Drafts end before one that is no token of the model.
    while (tried < most && said[tried] >= 0 && said[tried] < vocab_size) ++tried;
    starts.mutable_data()[i] = total;
    counts.mutable_data()[i] = tried + 1;
    total += tried + 1;
  }
  Int64s row_of(total), ids(total), positions(total);
  for (int64_t i = 0, place = 0; i < rows; ++i) {
    for (int64_t behind = 0; behind < counts.data()[i]; ++behind, ++place) {
      row_of.mutable_data()[place] = i;
      ids.mutable_data()[place] = behind == 0 ? newest.data()[i] : drafts.data()[i * width + behind - 1];
      positions.mutable_data()[place] = lens.data()[i] + behind;
    }
  }
  return py::make_tuple(std::move(counts), std::move(starts), std::move(row_of), std::move(ids), std::move(positions));
}

// (The last place of each of n rows whose token counts, how many count, int64[n] each; which of T places count, bool[T]).
// `counts`, int64[n]: places of each row; `ids`, int64[T]: what they compute; `sampled`, int64[T]: what came behind.
// `most`, int64[n]: at how many places of each row a token may count.
inline py::tuple judge(const Int64s& counts, const Int64s& ids, const Int64s& sampled,
                       const std::optional<Int64s>& most) {
  const int64_t rows = counts.size();
  Int64s last(rows), got(rows);
  py::array_t<bool> kept(ids.size());
  std::fill_n(kept.mutable_data(), kept.size(), false);
  for (int64_t i = 0, start = 0; i < rows; start += counts.data()[i++]) {
    const int64_t end = most ? std::min(counts.data()[i], most->data()[i]) : counts.data()[i];
    int64_t count = 1;
    // A draft is right where it is the token that was sampled before it.
    while (count < end && sampled.data()[start + count - 1] == ids.data()[start + count]) ++count;
    last.mutable_data()[i] = start + count - 1;
    got.mutable_data()[i] = count;
    std::fill_n(kept.mutable_data() + start, count, true);
  }
  return py::make_tuple(std::move(last), std::move(got), std::move(kept));
}

inline void bind_trial(py::module_& module) {
  module.def("lay_out", &lay_out);
  module.def("judge", &judge);
}

}  // namespace slipstream_host
