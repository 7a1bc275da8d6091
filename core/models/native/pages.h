// Memory that is read front to back.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace slipstream {

// Asks for huge pages: a page of 4 KiB is over in a third of a microsecond.
inline void ask_for_huge_pages(const void* from, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = 4096, at = reinterpret_cast<uintptr_t>(from);
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace slipstream
