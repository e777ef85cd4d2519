#include "recorder.hpp"

namespace mappnb {
namespace {

struct Entry {
  uint64_t recorder_id;
  std::shared_ptr<ThreadState> state;
};

// The state used last, without a constructor or destructor to check for; all states of this thread are in `t_table`.
struct Cached {
  uint64_t recorder_id;
  ThreadState* state;
};
thread_local Cached t_cached = {0, nullptr};
thread_local bool t_ended = false;

struct Table {
  std::vector<Entry> entries;
  ~Table() {
    t_cached = {0, nullptr};
    t_ended = true;
    for (const Entry& entry : entries) entry.state->ended.store(true, std::memory_order_release);
  }
};
thread_local Table t_table;

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return 1 + last.fetch_add(1, std::memory_order_relaxed);
}

uint64_t make_token(int32_t index, uint64_t serial, uint32_t position) {
  return (static_cast<uint64_t>(index) & 0x7FFF) << 48 | (serial & 0xFFFFFFFFFF) << 8 | position;
}

// A record made of a slot's words as they are.
Packed to_record(const ThreadState& state, const Slot::Values& v, const EndValues& e, int64_t now, int64_t cpu_ns) {
  constexpr uint64_t none = ~uint64_t{0}, low = 0xFFFFFFFF;
  const uint64_t upper = static_cast<uint32_t>(v.depth & 0xFFFF) | static_cast<uint32_t>(e.flags) << 16;
  return {static_cast<uint64_t>(v.start_ns),
          static_cast<uint64_t>(std::max<int64_t>(0, now - v.start_ns)),
          none,
          static_cast<uint64_t>(cpu_ns),
          static_cast<uint64_t>(e.bytes),
          static_cast<uint64_t>(e.seq),
          static_cast<uint64_t>(e.group),
          v.site_step,
          static_cast<uint32_t>(e.peer) | (v.rest & ~low),
          (v.rest & low) | upper << 32,
          static_cast<uint32_t>(state.index) | (none & ~low)};
}

}  // namespace

Recorder::Recorder(uint64_t capacity, bool cpu_time, NameOfThread name_of_thread)
    : id_(next_id()), capacity_(capacity), cpu_time_(cpu_time), name_of_thread_(std::move(name_of_thread)) {}

Recorder::~Recorder() {
  for (const auto& state : states_) {
    state->ring.reset();
    state->stack.reset();
    state->orphaned.store(true, std::memory_order_release);
  }
}

// ---- this thread's state

inline ThreadState* Recorder::known_state() const {
  return __builtin_expect(t_cached.recorder_id == id_, 1) ? t_cached.state : find_state();
}

inline ThreadState* Recorder::state() {
  ThreadState* found = known_state();
  return __builtin_expect(found != nullptr, 1) ? found : new_state();
}

__attribute__((noinline)) ThreadState* Recorder::find_state() const {
  if (t_ended) return nullptr;
  for (const Entry& entry : t_table.entries) {
    if (entry.recorder_id != id_) continue;
    t_cached = {id_, entry.state.get()};
    return t_cached.state;
  }
  return nullptr;
}

__attribute__((noinline)) ThreadState* Recorder::new_state() {
  if (t_ended) return nullptr;
  std::string name = name_of_thread_ ? name_of_thread_() : std::string();
  auto& entries = t_table.entries;
  entries.erase(
      std::remove_if(entries.begin(), entries.end(),
                     [](const Entry& entry) { return entry.state->orphaned.load(std::memory_order_acquire); }),
      entries.end());
  const std::lock_guard<std::mutex> lock(registry_mutex_);
  const auto index = static_cast<int32_t>(infos_.size());
  auto made = std::make_shared<ThreadState>(index, capacity_);
  infos_.push_back({index, native_thread_id(), std::move(name)});
  states_.push_back(made);
  entries.push_back({id_, made});
  t_cached = {id_, made.get()};
  return made.get();
}

// ---- hot calls

int64_t Recorder::begin(int32_t site, uint64_t owner) {
  ThreadState* s = state();
  if (s == nullptr) return kNoSpan;
  const uint32_t position = s->top.load(std::memory_order_relaxed);
  if (position == kMaxDepth) {
    ++s->overflow;
    too_deep_.fetch_add(1, std::memory_order_relaxed);
    return kNoSpan;
  }
  const uint64_t token = make_token(s->index, ++s->serial, position);
  constexpr auto relaxed = std::memory_order_relaxed;
  const uint64_t site_step = static_cast<uint32_t>(site) | step_.load(relaxed) << 32;
  Slot::Values values{owner, -1, -1, site_step, rest_.load(relaxed), s->live, enabled()};
  if (values.live) {
    ++s->live;
    if (cpu_time_) values.cpu_start_ns = clock(CLOCK_THREAD_CPUTIME_ID);
    values.start_ns = now_ns();
  }
  s->stack[position].write(token, values);
  s->top.store(position + 1, std::memory_order_release);
  return static_cast<int64_t>(token);
}

void Recorder::end(int64_t token, const EndValues& values) {
  const int64_t now = enabled() ? now_ns() : kRealClock;
  ThreadState* s = known_state();
  if (s == nullptr || token < kNoSpan) return mismatch();
  const uint32_t top = s->top.load(std::memory_order_relaxed);
  if (token <= 0) {
    if (s->overflow > 0) {
      --s->overflow;
    } else if (token == 0) {
      end_at(*s, static_cast<int64_t>(top) - 1, values, now);
    }
    return;
  }
  const auto position = static_cast<uint32_t>(token & 0xFF);
  const auto wanted = static_cast<uint64_t>(token);
  const bool known = position < top && s->stack[position].token.load(std::memory_order_relaxed) == wanted;
  end_at(*s, known ? static_cast<int64_t>(position) : -1, values, now);
}

void Recorder::exit(uint64_t owner, uint16_t flags) {
  const int64_t now = enabled() ? now_ns() : kRealClock;
  ThreadState* s = known_state();
  if (s == nullptr) return mismatch();
  if (s->overflow > 0) {
    --s->overflow;
    return;
  }
  int64_t position = static_cast<int64_t>(s->top.load(std::memory_order_relaxed)) - 1;
  while (position >= 0 && s->stack[position].owner.load(std::memory_order_relaxed) != owner) --position;
  EndValues values;
  values.flags = flags;
  end_at(*s, position, values, now);
}

// Closes the span at `position` (-1: counts a mismatch) after those inside it. `now` is kRealClock while off.
inline void Recorder::end_at(ThreadState& s, int64_t position, const EndValues& values, int64_t now) {
  if (position < 0) return mismatch();
  const int64_t cpu = cpu_time_ && now != kRealClock ? clock(CLOCK_THREAD_CPUTIME_ID) : -1;
  s.overflow = 0;
  EndValues repaired;
  repaired.flags = kRepaired;
  while (s.top.load(std::memory_order_relaxed) > position + 1) close(s, repaired, now, cpu);
  close(s, values, now, cpu);
}

// Takes the innermost span off the stack; records it if the recorder was on at both its ends.
inline void Recorder::close(ThreadState& s, const EndValues& values, int64_t now, int64_t cpu) {
  const uint32_t position = s.top.load(std::memory_order_relaxed) - 1;
  const Slot::Values v = s.stack[position].read();
  s.top.store(position, std::memory_order_release);
  if (!v.live) return;
  --s.live;
  if (now == kRealClock) return;
  const int64_t spent = cpu >= 0 && v.cpu_start_ns >= 0 ? std::max<int64_t>(0, cpu - v.cpu_start_ns) : -1;
  s.ring->push(to_record(s, v, values, now, spent));
}

void Recorder::record(Record event, bool current_depth) {
  if (!enabled()) return;
  ThreadState* s = state();
  if (s == nullptr) return;
  event.thread = s->index;
  if (current_depth) event.depth = static_cast<int16_t>(s->live);
  s->ring->push(event.pack());
}

Context Recorder::context() const {
  constexpr auto relaxed = std::memory_order_relaxed;
  const uint64_t rest = rest_.load(relaxed);
  return {static_cast<int32_t>(step_.load(relaxed)), static_cast<int16_t>(rest >> 32), static_cast<int16_t>(rest >> 48),
          static_cast<int32_t>(rest)};
}

void Recorder::set_context(const Context& context) {
  constexpr auto relaxed = std::memory_order_relaxed;
  step_.store(static_cast<uint32_t>(context.step), relaxed);
  rest_.store(pack16(context.microbatch, context.stage, static_cast<uint16_t>(context.chunk)), relaxed);
}

// ---- readers

Recorder::States Recorder::states() const {
  const std::lock_guard<std::mutex> lock(registry_mutex_);
  return states_;
}

Recorder::States Recorder::ended(const States& states) {
  States out;
  for (const auto& state : states) {
    if (state->ended.load(std::memory_order_acquire)) out.push_back(state);
  }
  return out;
}

uint64_t Recorder::waiting(const States& states) const {
  const std::lock_guard<std::mutex> lock(drain_mutex_);
  uint64_t total = 0;
  for (const auto& state : states) total += state->ring->waiting();
  return total;
}

uint64_t Recorder::drain(const States& states, uint64_t* out, uint64_t room) {
  const std::lock_guard<std::mutex> lock(drain_mutex_);
  uint64_t done = 0;
  for (const auto& state : states) done += state->ring->drain(out + done * kRecordWords, room - done);
  return done;
}

void Recorder::retire(const States& ended) {
  // Never waits: the caller holds the GIL, and who holds this lock over a fork may want the GIL.
  const std::unique_lock<std::mutex> reading(drain_mutex_, std::try_to_lock);
  if (!reading) return;
  const std::lock_guard<std::mutex> lock(registry_mutex_);
  for (const auto& state : ended) {
    const auto found = std::find(states_.begin(), states_.end(), state);
    if (found == states_.end() || state->ring->waiting() > 0) continue;
    const uint64_t recorded = state->ring->recorded();
    retired_.recorded += recorded;
    retired_.dropped += state->ring->dropped(recorded);
    mismatched_.fetch_add(static_cast<uint64_t>(state->live), std::memory_order_relaxed);
    states_.erase(found);
  }
}

// Reads the spans of one thread as they were at one moment; false if they changed meanwhile.
bool Recorder::read_stack(const ThreadState& state, std::vector<std::pair<uint64_t, Slot::Values>>& out) {
  out.clear();
  const uint32_t top = state.top.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < top; ++i) {
    const uint64_t token = state.stack[i].token.load(std::memory_order_acquire);
    out.emplace_back(token, state.stack[i].read());
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  for (uint32_t i = 0; i < top; ++i) {
    const uint64_t token = state.stack[i].token.load(std::memory_order_relaxed);
    if (token == 0 || token != out[i].first) return out.resize(i), false;
  }
  return state.top.load(std::memory_order_relaxed) >= top;
}

std::vector<Record> Recorder::open_spans() const {
  std::vector<Record> out;
  std::vector<std::pair<uint64_t, Slot::Values>> spans;
  EndValues open;
  open.flags = kOpen;
  for (const auto& state : states()) {
    for (int attempt = 0; attempt < 100 && !read_stack(*state, spans); ++attempt) continue;
    const int64_t now = now_ns();
    for (const auto& span : spans) {  // after the last attempt: outer spans that did hold still
      if (span.second.live) out.push_back(Record::unpack(to_record(*state, span.second, open, now, -1)));
    }
  }
  return out;
}

std::vector<ThreadInfo> Recorder::threads() const {
  const std::lock_guard<std::mutex> lock(registry_mutex_);
  return infos_;
}

Counters Recorder::retired() const {
  const std::lock_guard<std::mutex> lock(registry_mutex_);
  Counters out = retired_;
  out.mismatched = mismatched_.load(std::memory_order_relaxed);
  out.too_deep = too_deep_.load(std::memory_order_relaxed);
  out.threads = infos_.size();
  return out;
}

Counters Recorder::counters(const States& states, Counters retired) const {
  const std::lock_guard<std::mutex> lock(drain_mutex_);
  for (const auto& state : states) {
    const uint64_t recorded = state->ring->recorded();
    retired.recorded += recorded;
    retired.dropped += state->ring->dropped(recorded);
  }
  return retired;
}

void Recorder::after_fork_in_child() {
  set_enabled(false);
  const ThreadState* own = known_state();
  States kept;
  for (const auto& state : states_) {
    if (state.get() == own) kept.push_back(state);
  }
  states_ = std::move(kept);
  for (const auto& state : states_) {
    state->ring->clear();
    infos_[static_cast<size_t>(state->index)].native_id = native_thread_id();
  }
  retired_ = Counters{};
  mismatched_.store(0, std::memory_order_relaxed);
  too_deep_.store(0, std::memory_order_relaxed);
  drain_mutex_.unlock();
}

}  // namespace mappnb
