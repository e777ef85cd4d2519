// Nested spans of threads, cut into segments in which one span is the innermost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mappnb {

// Spans of one lane, added parents before children: emit(span, left, right) for each stretch in which one of them is
// the innermost. Those that do not nest: the one that began later is the inner one until it ends.
template <class Span>
class Innermost {
 public:
  template <class Emit>
  void add(const Span* span, Emit& emit) {
    while (!open_.empty() && open_.back()->end <= span->start) close(open_.back()->end, emit);
    while (!open_.empty() && open_.back()->end < span->end) close(span->start, emit);
    if (!open_.empty() && span->start > now_) emit(*open_.back(), now_, span->start);
    now_ = span->start;
    open_.push_back(span);
  }
  template <class Emit>
  void end(Emit& emit) {
    while (!open_.empty()) close(open_.back()->end, emit);
  }

 private:
  template <class Emit>
  void close(int64_t at, Emit& emit) {
    if (at > now_) {
      emit(*open_.back(), now_, at);
      now_ = at;
    }
    open_.pop_back();
  }
  std::vector<const Span*> open_;  // each inside the one before it
  int64_t now_ = 0;
};

struct Segments {
  std::vector<int64_t> span, start, end;  // index of the innermost span, and the bounds
};

// Spans in any order; those of a lane nest, or else the one that began later is the inner one until it ends. Segments
// by lane, then time.
Segments innermost_segments(const int64_t* lane, const int64_t* start, const int64_t* end, size_t size);

}  // namespace mappnb
