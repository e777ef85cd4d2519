// Nested spans of threads, cut into segments in which one span is the innermost.
#include "nesting.hpp"

#include <algorithm>
#include <limits>

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
  std::vector<Span> open;  // each inside the one before it
  int64_t reached = std::numeric_limits<int64_t>::min();
  auto go_on = [&](int64_t to) {  // with the innermost span
    const Span& inner = open.back();
    if (to > reached) {
      out.span.push_back(inner.index);
      out.start.push_back(reached);
      out.end.push_back(to);
    }
    reached = std::max(reached, to);
  };
  auto close = [&](int64_t to) {
    go_on(to);
    open.pop_back();
  };
  for (const Span& span : spans) {
    while (!open.empty() && (open.back().lane != span.lane || open.back().end <= span.start)) close(open.back().end);
    while (!open.empty() && open.back().end < span.end) close(span.start);  // they do not nest: cut
    if (!open.empty()) go_on(span.start);
    open.push_back(span);
    reached = span.start;
  }
  while (!open.empty()) close(open.back().end);
  return out;
}

}  // namespace mappnb
