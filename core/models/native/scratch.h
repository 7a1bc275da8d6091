// Memory: buffers that a step needs again and again, and pages of what is read front to back.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <vector>

namespace slipstream {

// Asks for huge pages: a page of 4 KiB is over in a third of a microsecond.
inline void ask_for_huge_pages(const void* from, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = 4096, at = reinterpret_cast<uintptr_t>(from);
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Sixteen buffers of one thread, each as large as it ever had to be, aligned to a cache line.
// What `take` gave before is lost when the same place is taken again.
class Scratch {
 public:
  // `invariant`: what this thread sums for a token comes in one order, whatever other tokens go through with it and
  // wherever its request was cut (decision 57).
  explicit Scratch(bool invariant = false) : invariant_(invariant) {}

  bool invariant() const { return invariant_; }

  template <typename T>
  T* take(int64_t place, int64_t count) {
    std::vector<char>& bytes = bytes_[place];
    const size_t wanted = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes.size() < wanted) bytes.resize(wanted);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  }

 private:
  bool invariant_;
  std::vector<char> bytes_[16];
};

}  // namespace slipstream
