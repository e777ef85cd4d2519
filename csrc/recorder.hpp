// Recorder of spans: one ring and one stack of open spans per thread. Knows nothing of Python (see recorder_py.cpp).
//
// One thread writes its ring and stack and never waits. Any thread may read them: every shared word is a relaxed
// atomic, and a reader throws away what may have been overwritten while it copied (a seqlock), so there is no data
// race. The order of a seqlock needs fences: the writer's release fence comes after the store that announces the
// overwrite, the reader's acquire fence comes before the load that looks for such an announcement. The pure-Python twin
// mappnb/capture/_pyrecorder.py has the same semantics, and is the one to read first.
#pragma once

#include <pthread.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mappnb {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are packed into words low part first");

constexpr int kRecordWords = 11;
constexpr uint32_t kMaxDepth = 256;
constexpr int64_t kNoSpan = -1;  // token of a span that was too deep to be kept
constexpr int64_t kRealClock = std::numeric_limits<int64_t>::min();

enum Flag : uint16_t { kOpen = 1, kClipped = 2, kRepaired = 4, kOverlapped = 8, kAsync = 16, kFailed = 32 };

using Word = std::atomic<uint64_t>;
using Packed = std::array<uint64_t, kRecordWords>;

inline uint64_t pack32(int32_t low, int32_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32;
}
inline uint64_t pack16(int32_t low, int16_t mid, uint16_t high) {
  const uint64_t upper = static_cast<uint16_t>(mid) | static_cast<uint32_t>(high) << 16;
  return static_cast<uint32_t>(low) | upper << 32;
}

// The 88 bytes of RECORD_DTYPE in mappnb/capture/_record.py.
struct Record {
  int64_t start_ns, duration_ns, issue_ns, cpu_ns, bytes, seq, group;
  int32_t site, step, peer;
  int16_t stage, chunk;
  int32_t microbatch;
  int16_t depth;
  uint16_t flags;
  int32_t thread, stream;

  Packed pack() const {
    Packed out;
    std::memcpy(out.data(), this, sizeof(Record));
    return out;
  }
  static Record unpack(const Packed& packed) {
    Record out;
    std::memcpy(&out, packed.data(), sizeof(Record));
    return out;
  }
};
static_assert(sizeof(Record) == 8 * kRecordWords, "Record must have no padding");

// What the caller of end() knows about the event.
struct EndValues {
  int64_t bytes = -1, seq = -1, group = -1;
  int32_t peer = -1;
  uint16_t flags = 0;
};

struct Context {
  int32_t step = -1;
  int16_t stage = -1, chunk = -1;
  int32_t microbatch = -1;
};

struct Counters {
  uint64_t recorded = 0, dropped = 0, mismatched = 0, too_deep = 0, threads = 0;
};

struct ThreadInfo {
  int32_t index;
  int64_t native_id;
  std::string name;
};

inline int64_t read_clock(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

inline int64_t native_thread_id() {
#ifdef __linux__
  return static_cast<int64_t>(syscall(SYS_gettid));
#elif defined(__APPLE__)
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return static_cast<int64_t>(id);
#else
  return -1;
#endif
}

// Finished records of one thread. It has one slot more than its capacity: the writer may be inside that one.
class Ring {
 public:
  explicit Ring(uint64_t capacity) : slots_(capacity + 1), words_(new Word[slots_ * kRecordWords]) {}

  void push(const Packed& packed) {
    std::atomic_thread_fence(std::memory_order_release);
    Word* to = words_.get() + cursor_ * kRecordWords;
    for (int i = 0; i < kRecordWords; ++i) to[i].store(packed[i], std::memory_order_relaxed);
    cursor_ = cursor_ + 1 == slots_ ? 0 : cursor_ + 1;
    head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  uint64_t recorded() const { return head_.load(std::memory_order_acquire); }
  // The rest is the one reader's, under its lock.
  uint64_t waiting() const { return std::min(recorded() - tail_, slots_ - 1); }
  uint64_t dropped(uint64_t recorded) const { return recorded - drained_ - std::min(recorded - tail_, slots_ - 1); }
  // Copies at most `room` records to `out`; returns how many.
  uint64_t drain(uint64_t* out, uint64_t room) {
    const uint64_t capacity = slots_ - 1, head = recorded();
    const uint64_t first = std::max(tail_, head > capacity ? head - capacity : 0);
    const uint64_t last = first + std::min(head - first, room);
    copy(out, first, last);
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t now = head_.load(std::memory_order_relaxed);
    const uint64_t valid = std::min(last, std::max(first, now > capacity ? now - capacity : 0));
    std::copy(out + (valid - first) * kRecordWords, out + (last - first) * kRecordWords, out);
    tail_ = last;
    drained_ += last - valid;
    return last - valid;
  }
  // Only when no other thread uses the ring.
  void clear() {
    head_.store(0, std::memory_order_relaxed);
    cursor_ = tail_ = drained_ = 0;
  }

 private:
  void copy(uint64_t* out, uint64_t first, uint64_t last) const {
    uint64_t slot = first % slots_;
    for (uint64_t i = first; i < last; ++i, out += kRecordWords) {
      const Word* from = words_.get() + slot * kRecordWords;
      for (int k = 0; k < kRecordWords; ++k) out[k] = from[k].load(std::memory_order_relaxed);
      slot = slot + 1 == slots_ ? 0 : slot + 1;
    }
  }

  const uint64_t slots_;
  std::unique_ptr<Word[]> words_;  // not touched before use: memory comes as it is needed
  uint64_t cursor_ = 0;            // head_ % slots_
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) uint64_t tail_ = 0;
  uint64_t drained_ = 0;
};

// One open span. `token` is 0 while it is being written; a token is never used twice.
struct alignas(64) Slot {
  Word token, owner, start_ns, cpu_start_ns, site_step, rest, depth_live;

  struct Values {
    uint64_t owner;
    int64_t start_ns, cpu_start_ns;
    uint64_t site_step, rest;  // packed as in a record; rest: microbatch, stage, chunk
    int32_t depth;
    bool live;  // false: begun while the recorder was off
  };

  void write(uint64_t new_token, const Values& v) {
    constexpr auto relaxed = std::memory_order_relaxed;
    token.store(0, relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    owner.store(v.owner, relaxed);
    start_ns.store(static_cast<uint64_t>(v.start_ns), relaxed);
    cpu_start_ns.store(static_cast<uint64_t>(v.cpu_start_ns), relaxed);
    site_step.store(v.site_step, relaxed);
    rest.store(v.rest, relaxed);
    depth_live.store(pack32(v.depth, v.live), relaxed);
    token.store(new_token, std::memory_order_release);
  }

  Values read() const {
    constexpr auto relaxed = std::memory_order_relaxed;
    const uint64_t last = depth_live.load(relaxed);
    return {owner.load(relaxed),
            static_cast<int64_t>(start_ns.load(relaxed)),
            static_cast<int64_t>(cpu_start_ns.load(relaxed)),
            site_step.load(relaxed),
            rest.load(relaxed),
            static_cast<int32_t>(last),
            (last >> 32) != 0};
  }
};

// All that belongs to one thread. Kept alive by the recorder and by the thread's own table.
struct ThreadState {
  ThreadState(int32_t index_, uint64_t capacity)
      : index(index_), ring(new Ring(capacity)), stack(new Slot[kMaxDepth]) {}

  const int32_t index;
  std::unique_ptr<Ring> ring;
  std::unique_ptr<Slot[]> stack;
  std::atomic<uint32_t> top{0};
  int32_t live = 0;
  uint32_t overflow = 0;
  uint64_t serial = 0;
  std::atomic<bool> ended{false};     // set when the thread ends
  std::atomic<bool> orphaned{false};  // set when the recorder is gone
};

class Recorder {
 public:
  using NameOfThread = std::function<std::string()>;
  using States = std::vector<std::shared_ptr<ThreadState>>;

  Recorder(uint64_t capacity, bool cpu_time, NameOfThread name_of_thread);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Hot calls, for the calling thread.
  int64_t begin(int32_t site, uint64_t owner = 0);
  void end(int64_t token, const EndValues& values);
  void exit(uint64_t owner, uint16_t flags);  // end of a `with`: the innermost span of this owner
  void record(Record event, bool current_depth);

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void set_enabled(bool on) { enabled_.store(on, std::memory_order_relaxed); }
  Context context() const;
  void set_context(const Context& context);
  int64_t now_ns() const { return clock(CLOCK_MONOTONIC); }
  void set_test_clock(int64_t ns) { test_clock_.store(ns, std::memory_order_relaxed); }
  uint64_t new_owner() { return 1 + owners_.fetch_add(1, std::memory_order_relaxed); }

  // Readers, from any thread. drain() and counters() may wait for each other, never for a recording thread: from
  // Python, call them without the GIL. states() and retire() take a short lock that nothing else is done under.
  States states() const;
  uint64_t waiting(const States& states) const;
  uint64_t drain(const States& states, uint64_t* out, uint64_t room);
  void retire(const States& ended);
  static States ended(const States& states);  // ask before draining: what ends later may write more
  std::vector<Record> open_spans() const;
  std::vector<ThreadInfo> threads() const;
  Counters counters(const States& states, Counters retired) const;
  Counters retired() const;

  // Around a fork; before_fork() from Python without the GIL.
  void before_fork() { drain_mutex_.lock(); }
  void after_fork_in_parent() { drain_mutex_.unlock(); }
  void after_fork_in_child();

 private:
  int64_t clock(clockid_t id) const {
    const int64_t test = test_clock_.load(std::memory_order_relaxed);
    return __builtin_expect(test == kRealClock, 1) ? read_clock(id) : test;
  }
  ThreadState* state();
  ThreadState* known_state() const;
  ThreadState* find_state() const;
  ThreadState* new_state();
  void end_at(ThreadState& state, int64_t position, const EndValues& values, int64_t now);
  void close(ThreadState& state, const EndValues& values, int64_t now, int64_t cpu);
  void mismatch() { mismatched_.fetch_add(1, std::memory_order_relaxed); }
  static bool read_stack(const ThreadState& state, std::vector<std::pair<uint64_t, Slot::Values>>& out);

  const uint64_t id_, capacity_;
  const bool cpu_time_;
  const NameOfThread name_of_thread_;
  std::atomic<bool> enabled_{true};
  Word step_{~uint64_t{0}}, rest_{~uint64_t{0}};  // the context, as packed in a slot
  std::atomic<int64_t> test_clock_{kRealClock};
  std::atomic<uint64_t> owners_{0}, mismatched_{0}, too_deep_{0};
  mutable std::mutex drain_mutex_;     // the rings' reading side
  mutable std::mutex registry_mutex_;  // the members below
  States states_;
  std::vector<ThreadInfo> infos_;
  Counters retired_;
};

}  // namespace mappnb
