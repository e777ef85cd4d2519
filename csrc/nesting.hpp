// Nested spans of threads, cut into segments in which one span is the innermost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mappnb {

struct Segments {
  std::vector<int64_t> span, start, end;  // index of the innermost span, and the bounds
};

// Spans in any order; those of a lane nest, or else the one that began later is the inner one until it ends. Segments
// by lane, then time.
Segments innermost_segments(const int64_t* lane, const int64_t* start, const int64_t* end, size_t size);

}  // namespace mappnb
