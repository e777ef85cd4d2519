// Nested spans of threads, cut into segments in which one span is the innermost.
#include "nesting.hpp"

#include <algorithm>

namespace mappnb {

namespace {

struct Span {
  int64_t lane, start, end, index;
};

// Parents before children; equal spans in the order they came.
bool before(const Span& a, const Span& b) {
  if (a.lane != b.lane) return a.lane < b.lane;
  if (a.start != b.start) return a.start < b.start;
  return a.end != b.end ? a.end > b.end : a.index < b.index;
}

}  // namespace

Segments innermost_segments(const int64_t* lane, const int64_t* start, const int64_t* end, size_t size) {
  std::vector<Span> spans;
  spans.reserve(size);
  for (size_t i = 0; i < size; i++)
    if (end[i] > start[i]) spans.push_back({lane[i], start[i], end[i], int64_t(i)});  // an instant takes no time
  if (!std::is_sorted(spans.begin(), spans.end(), before)) std::sort(spans.begin(), spans.end(), before);
  Segments out;
  const auto emit = [&out](const Span& span, int64_t left, int64_t right) {
    out.span.push_back(span.index);
    out.start.push_back(left);
    out.end.push_back(right);
  };
  Innermost<Span> open;
  for (size_t i = 0; i < spans.size(); i++) {
    if (i && spans[i].lane != spans[i - 1].lane) open.end(emit);
    open.add(&spans[i], emit);
  }
  open.end(emit);
  return out;
}

}  // namespace mappnb
