// Native stress test of the recorder, made for sanitizers (sanitize.sh): many writers that come and go, one drain,
// one look at the open spans, and the switch. Every record must be drained or counted as dropped, and be whole.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "recorder.hpp"

namespace {

using mappnb::Recorder;

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

// One thread's work: each record carries its number in every field that can hold it.
void write(Recorder& recorder, int32_t site, int64_t num_spans) {
  for (int64_t i = 0; i < num_spans; ++i) {
    const int64_t outer = recorder.begin(site);
    const int64_t inner = recorder.begin(site, 5);
    if (i % 3 == 0) recorder.begin(site);  // left open: repaired
    recorder.exit(5, 0);
    if (i % 7 == 0) recorder.end(inner, {});  // stale
    mappnb::EndValues values;
    values.bytes = values.seq = values.group = i;
    values.peer = static_cast<int32_t>(i);
    recorder.end(outer, values);
  }
}

struct Drained {
  uint64_t records = 0;
  void take(Recorder& recorder) {
    const auto states = recorder.states();
    const auto ended = Recorder::ended(states);
    const uint64_t room = recorder.waiting(states);
    std::vector<uint64_t> words(room * mappnb::kRecordWords + 1);
    const uint64_t got = recorder.drain(states, words.data(), room);
    for (uint64_t i = 0; i < got; ++i) whole(words.data() + i * mappnb::kRecordWords);
    records += got;
    recorder.retire(ended);
  }
  static void whole(const uint64_t* w) {
    check(w[4] == w[5] && w[5] == w[6] && static_cast<uint32_t>(w[4]) == static_cast<uint32_t>(w[8]), "torn record");
    check(static_cast<int64_t>(w[1]) >= 0, "negative duration");
  }
};

void run(uint64_t capacity, int num_threads, int64_t num_spans, bool toggle) {
  Recorder recorder(capacity, false, {});
  std::atomic<bool> stop{false};
  Drained drained;
  std::thread reader([&] {
    while (!stop) drained.take(recorder);
  });
  std::thread looker([&] {
    for (int i = 0; !stop; ++i) {
      for (const auto& span : recorder.open_spans()) check(span.flags == mappnb::kOpen && span.depth < 3, "open span");
      recorder.set_context({i, 1, 2, i});
      if (toggle) recorder.set_enabled(i % 5 != 0);
      recorder.counters(recorder.states(), recorder.retired());
    }
  });
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> writers;
    for (int i = 0; i < num_threads; ++i) writers.emplace_back([&, i] { write(recorder, i, num_spans); });
    for (auto& writer : writers) writer.join();
  }
  stop = true;
  reader.join();
  looker.join();
  drained.take(recorder);
  const auto counters = recorder.counters(recorder.states(), recorder.retired());
  check(counters.recorded == drained.records + counters.dropped, "recorded == drained + dropped");
  check(counters.threads == 3U * static_cast<unsigned>(num_threads), "threads");
  const int64_t all = 3 * num_threads * (2 * num_spans + (num_spans + 2) / 3);
  if (!toggle) check(counters.recorded == static_cast<uint64_t>(all), "all recorded");
  check(recorder.open_spans().empty() && recorder.states().empty(), "nothing left");
  std::printf("capacity %llu: recorded %llu, dropped %llu\n", static_cast<unsigned long long>(capacity),
              static_cast<unsigned long long>(counters.recorded), static_cast<unsigned long long>(counters.dropped));
}

void measure() {
  Recorder recorder(65536, false, {});
  constexpr int kSpans = 2'000'000;
  const int64_t start = mappnb::read_clock(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < kSpans; ++i) recorder.end(recorder.begin(1), {});
  const int64_t spent = mappnb::read_clock(CLOCK_THREAD_CPUTIME_ID) - start;
  const int64_t again = mappnb::read_clock(CLOCK_THREAD_CPUTIME_ID);
  int64_t sum = 0;
  for (int i = 0; i < kSpans; ++i) sum += mappnb::read_clock(CLOCK_MONOTONIC);
  const int64_t clocks = mappnb::read_clock(CLOCK_THREAD_CPUTIME_ID) - again;
  std::printf("begin + end: %.1f ns; one clock reading: %.1f ns (%d)\n", static_cast<double>(spent) / kSpans,
              static_cast<double>(clocks) / kSpans, sum != 0);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t num_spans = argc > 1 ? std::atoll(argv[1]) : 20000;
  run(64, 4, num_spans, false);
  run(1 << 20, 4, num_spans, false);
  run(1000, 6, num_spans, true);
  run(1, 2, num_spans, false);
  measure();
  return 0;
}
