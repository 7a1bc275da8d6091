// Buffers that a step needs again and again.

#pragma once

#include <cstdint>
#include <vector>

namespace slipstream {

// Sixteen buffers of one thread, each as large as it ever had to be, aligned to a cache line.
// What `take` gave before is lost when the same place is taken again.
class Scratch {
 public:
  template <typename T>
  T* take(int64_t place, int64_t count) {
    std::vector<char>& bytes = bytes_[place];
    const size_t wanted = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes.size() < wanted) bytes.resize(wanted);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<char> bytes_[16];
};

}  // namespace slipstream
