// What a step takes out of the relay before the model, and leaves there behind it. See core/relay/compiled.py.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace slipstream_host {

namespace py = pybind11;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Buffers by request row, which Python keeps alive. Nothing here lets go of the interpreter: a call takes less time
// than it takes to get that back.
struct Relay {
  int64_t* tokens;    // [rows]: newest token, -1 once it was read
  int64_t* lens;      // [rows]: published length
  int64_t* violated;  // [rows]: flags of the decode rows of a step, in their order
  int64_t* counters;  // unwritten reads, lengths outside of the plan
  const int32_t* table;  // [rows, context]: KV slots
  int64_t rows, context;

  void check_rows(const int64_t* of, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (of[i] < 0 || of[i] >= rows) {
        throw py::index_error("row " + std::to_string(of[i]) + " of a relay of " + std::to_string(rows));
      }
    }
  }

  // int64[4, count]: newest tokens, which this consumes; lengths before the step, within their bounds; lengths with the
  // newest token; its KV slot.
  py::array_t<int64_t> enter(uintptr_t rows_at, uintptr_t lower_at, uintptr_t upper_at, int64_t count, bool counts,
                             bool traps) {
    const int64_t* of = at<const int64_t>(rows_at);
    check_rows(of, count);
    if (traps) refuse(of, at<const int64_t>(lower_at), at<const int64_t>(upper_at), count);
    py::array_t<int64_t> made({int64_t{4}, count});
    int64_t* ids = made.mutable_data();
    int64_t *before = ids + count, *after = before + count, *slots = after + count;
    cut(of, at<const int64_t>(lower_at), at<const int64_t>(upper_at), count, counts, before);
    take(of, count, counts, ids);
    for (int64_t i = 0; i < count; ++i) {
      after[i] = before[i] + 1;
      // A place behind the end of a row is nobody's, so it gets the padding slot.
      slots[i] = before[i] >= 0 && before[i] < context ? table[of[i] * context + before[i]] : 0;
    }
    return made;
  }

  void publish(uintptr_t rows_at, uintptr_t lens_at, int64_t count) { write(lens, rows_at, lens_at, count); }

  void stash(uintptr_t rows_at, uintptr_t tokens_at, int64_t count) { write(tokens, rows_at, tokens_at, count); }

 private:
  void cut(const int64_t* of, const int64_t* lower, const int64_t* upper, int64_t count, bool counts, int64_t* cut_to) {
    for (int64_t i = 0; i < count; ++i) {
      cut_to[i] = std::min(std::max(lens[of[i]], lower[i]), upper[i]);
      if (counts) {
        violated[i] = cut_to[i] != lens[of[i]];
        counters[1] += violated[i];
      }
    }
  }

  void take(const int64_t* of, int64_t count, bool consumes, int64_t* ids) {
    for (int64_t i = 0; i < count; ++i) ids[i] = tokens[of[i]];
    if (!consumes) return;
    for (int64_t i = 0; i < count; ++i) {
      const bool unwritten = ids[i] < 0;
      violated[i] |= unwritten;
      counters[0] += unwritten;
      ids[i] = std::max<int64_t>(ids[i], 0);
      tokens[of[i]] = -1;
    }
    // Padded rows all read row 0: it stays readable however often it is consumed.
    tokens[0] = 0;
  }

  void refuse(const int64_t* of, const int64_t* lower, const int64_t* upper, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (lens[of[i]] < lower[i] || lens[of[i]] > upper[i]) {
        throw std::runtime_error("relay_seq_len: published length differs from the plan");
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      if (tokens[of[i]] < 0) {
        throw std::runtime_error("relay_unwritten_read: a row was read without a write since its last read");
      }
    }
  }

  void write(int64_t* column, uintptr_t rows_at, uintptr_t values_at, int64_t count) {
    const int64_t* of = at<const int64_t>(rows_at);
    check_rows(of, count);
    for (int64_t i = 0; i < count; ++i) column[of[i]] = at<const int64_t>(values_at)[i];
  }
};

inline void bind_relay(py::module_& module) {
  py::class_<Relay>(module, "Relay")
      .def(py::init([](uintptr_t tokens, uintptr_t lens, uintptr_t violated, uintptr_t counters, uintptr_t table,
                       int64_t rows, int64_t context) {
        return Relay{at<int64_t>(tokens),   at<int64_t>(lens),        at<int64_t>(violated),
                     at<int64_t>(counters), at<const int32_t>(table), rows,
                     context};
      }))
      .def("enter", &Relay::enter)
      .def("publish", &Relay::publish)
      .def("stash", &Relay::stash);
}

}  // namespace slipstream_host
