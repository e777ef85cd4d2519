#include "policy.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace mappnb {
namespace {

constexpr double kMoment = 1e-12;  // times that differ by less than this part are one moment
constexpr double kSlack = 1e-9;    // part of the limit that counts as no memory at all
constexpr double kWeight = 0.25;   // of the newest sample in an average

// Admission to one rank by the banker's rule: see PyCredits.
class Credits {
 public:
  Credits(std::vector<double> share, std::vector<int> actions, double limit)
      : remaining_(std::move(share)),
        held_(remaining_.size(), 0.0),
        left_(std::move(actions)),
        begun_(left_.size(), uint8_t(0)),
        free_(limit),
        limit_(limit),
        most_(remaining_.empty() ? 0.0 : *std::max_element(remaining_.begin(), remaining_.end())) {
    advance();
  }

  // First unfinished microbatch before `last` that a forward of a later one would lock out.
  int bound(double activation, int last) const {
    const int none = int(left_.size());
    if (free_ - activation >= most_) return none;
    const double needed = activation - kSlack * limit_;
    double covered = free_;
    for (int j = oldest_; j < last; j++) {
      if (left_[j] == 0) continue;
      if (covered - remaining_[j] < needed) return j;
      covered += held_[j];
    }
    return none;
  }

  void run(int kind, int microbatch, double takes, double frees) {
    if (kind == 0) {
      if (!begun_[microbatch]) {
        begun_[microbatch] = true;
        to_come_ += remaining_[microbatch];
      }
      remaining_[microbatch] -= takes;
      to_come_ -= takes;
    }
    const double change = takes - frees;
    held_[microbatch] += change;
    free_ -= change;
    left_[microbatch]--;
    advance();
  }

  // Whether the forwards of all that has begun, and of one microbatch more, fit without waiting for a backward.
  bool roomy() const { return free_ - to_come_ >= most_ - kSlack * limit_; }

 private:
  void advance() {
    while (oldest_ < int(left_.size()) && left_[oldest_] == 0) oldest_++;
  }

  std::vector<double> remaining_, held_;
  std::vector<int> left_;
  std::vector<uint8_t> begun_;
  double free_, limit_, most_;
  double to_come_ = 0.0;  // forwards still to come of the microbatches that have begun
  int oldest_ = 0;
};

// Microbatches that are ready at one stage for one kind. Where priorities rise with the microbatch, the first is a
// heap's top.
struct Bucket {
  int kind, stage, position;
  bool rising;
  std::vector<int> waiting;

  void add(int microbatch) {
    waiting.push_back(microbatch);
    if (rising) std::push_heap(waiting.begin(), waiting.end(), std::greater<int>());
  }
  void remove(size_t index) {
    if (rising) {
      std::pop_heap(waiting.begin(), waiting.end(), std::greater<int>());
    } else {
      waiting[index] = waiting.back();
    }
    waiting.pop_back();
  }
};

struct Average {
  double value = -1.0;  // below 0: no sample yet
  void add(double sample) { value = value < 0 ? sample : value + kWeight * (sample - value); }
};

struct Rank {
  double free_s = 0.0, end_s = 0.0, level = 0.0;
  bool idle = true, after_backward = false, woken = false;
  Average flight, work;
  std::vector<int> buckets;
};

// A rank is free again after `action`, or (rank < 0) the input of `action` has come.
struct Event {
  double time;
  int rank;
  uint32_t action;
  bool operator<(const Event& other) const { return time > other.time; }  // for a heap with the earliest on top
};

struct Choice {
  int turn = std::numeric_limits<int>::max();
  double priority = 0.0;
  int microbatch = 0, position = 0;
  int bucket = -1;
  size_t index = 0;

  bool beats(const Choice& other) const {
    if (turn != other.turn) return turn < other.turn;
    if (priority != other.priority) return priority < other.priority;
    if (microbatch != other.microbatch) return microbatch < other.microbatch;
    return position < other.position;
  }
};

class Runner {
 public:
  Runner(const PolicyProblem& problem, const PolicyResult& result)
      : p_(problem),
        out_(result),
        kinds_(problem.split ? 3 : 2),
        backward_(problem.split ? 2 : 1),
        come_(size_t(kinds_) * p_.stages * p_.microbatches, 0.0),
        missing_(come_.size(), 1),
        ranks_(p_.ranks),
        link_s_(size_t(p_.ranks) * p_.ranks, 0.0),
        done_(p_.ranks, 0) {
    make_buckets();
    make_credits();
    for (int s = 0; s + 1 < p_.stages; s++) {  // a backward waits for its forward and the next stage's backward
      std::fill_n(missing_.begin() + size_t(s) * p_.microbatches, p_.microbatches, uint8_t(2));
    }
    std::fill_n(out_.peak, p_.ranks, 0.0);
  }

  std::vector<int64_t> run() {
    for (int i = 0; i < p_.microbatches; i++) put(action(1, 0, i));
    for (int r = 0; r < p_.ranks; r++) decide(r);
    std::vector<int> woken;
    while (!events_.empty()) {
      const double moment = events_.front().time * (1 + kMoment);
      woken.clear();
      while (!events_.empty() && events_.front().time <= moment) {
        std::pop_heap(events_.begin(), events_.end());
        const Event event = events_.back();
        events_.pop_back();
        const int r = event.rank >= 0 ? end(event.rank, event.action) : arrive(event.action, event.time);
        if (r >= 0 && !ranks_[r].woken) {
          ranks_[r].woken = true;
          woken.push_back(r);
        }
      }
      for (const int r : woken) {
        ranks_[r].woken = false;
        if (ranks_[r].idle) decide(r);
      }
    }
    return done_;
  }

 private:
  // ---- actions by number: slot (backward, forward, W), stage, microbatch

  uint32_t action(int slot, int stage, int microbatch) const {
    return uint32_t((size_t(slot) * p_.stages + stage) * p_.microbatches + microbatch);
  }
  int kind_of(int slot) const { return slot == 0 ? backward_ : slot == 1 ? 0 : 3; }
  static int slot_of(int kind) { return kind == 0 ? 1 : kind == 3 ? 2 : 0; }
  int half(int microbatch) const { return int64_t(microbatch) >= p_.mirrored_from; }
  int rank_of(int slot, int stage, int microbatch) const {
    return p_.where[(half(microbatch) * 2 + (slot != 1)) * p_.stages + stage];
  }
  int bucket_of(int slot, int stage, int microbatch) const {
    return (half(microbatch) * kinds_ + slot) * p_.stages + stage;
  }

  // ---- set-up

  void make_buckets() {
    for (int h = 0; h < 2; h++) {
      for (int slot = 0; slot < kinds_; slot++) {
        for (int s = 0; s < p_.stages; s++) {
          const int position = slot * p_.stages + p_.stages - 1 - s;
          buckets_.push_back({kind_of(slot), s, position, rising(kind_of(slot), s), {}});
        }
      }
    }
    for (int b = 0; b < int(buckets_.size()); b++) {
      const bool mirrored = b >= kinds_ * p_.stages;
      if (mirrored && p_.mirrored_from >= p_.microbatches) break;
      const int row = (mirrored ? 2 : 0) + (buckets_[b].kind != 0);
      ranks_[p_.where[row * p_.stages + buckets_[b].stage]].buckets.push_back(b);
    }
  }

  bool rising(int kind, int stage) const {
    for (int t = 0; t < p_.tables; t++) {
      const double* row = priorities(t, kind, stage);
      if (!std::is_sorted(row, row + p_.microbatches)) return false;
    }
    return true;
  }

  const double* priorities(int table, int kind, int stage) const {
    return p_.priority + ((size_t(table) * 4 + kind) * p_.stages + stage) * p_.microbatches;
  }

  void make_credits() {
    std::vector<std::vector<double>> share(p_.ranks, std::vector<double>(p_.microbatches, 0.0));
    std::vector<std::vector<int>> left(p_.ranks, std::vector<int>(p_.microbatches, 0));
    for (int slot = 0; slot < kinds_; slot++) {
      for (int s = p_.stages - 1; s >= 0; s--) {
        for (int i = 0; i < p_.microbatches; i++) {
          const int r = rank_of(slot, s, i);
          if (slot == 1) share[r][i] += p_.takes[s];
          left[r][i]++;
        }
      }
    }
    for (int r = 0; r < p_.ranks; r++) credits_.emplace_back(std::move(share[r]), std::move(left[r]), p_.limit[r]);
  }

  // ---- what waits for what

  void put(uint32_t a) {
    const int i = int(a % p_.microbatches), row = int(a / p_.microbatches);
    buckets_[bucket_of(row / p_.stages, row % p_.stages, i)].add(i);
  }

  // The input of an action has come; returns the rank if it is ready now, else -1.
  int arrive(uint32_t a, double time) {
    come_[a] = std::max(come_[a], time);
    if (--missing_[a] != 0) return -1;
    put(a);
    const int row = int(a / p_.microbatches);
    return rank_of(row / p_.stages, row % p_.stages, int(a % p_.microbatches));
  }

  // Calls `tell(slot, stage, wire)` for each action that waits for this one, the next stage first.
  template <typename Tell>
  void consumers(int slot, int stage, Tell tell) const {
    if (slot == 1) {
      if (stage + 1 < p_.stages) tell(1, stage + 1, p_.transfer);
      tell(0, stage, p_.ship);
    } else if (slot == 0) {
      if (stage > 0) tell(0, stage - 1, p_.transfer);
      if (p_.split) tell(2, stage, p_.ship);
    }
  }

  int end(int r, uint32_t a) {
    ranks_[r].idle = true;
    const int i = int(a % p_.microbatches), row = int(a / p_.microbatches);
    consumers(row / p_.stages, row % p_.stages, [&](int slot, int stage, const double*) {
      if (rank_of(slot, stage, i) == r) arrive(action(slot, stage, i), ranks_[r].end_s);
    });
    return r;
  }

  // ---- decisions

  void decide(int r) {
    const Rank& rank = ranks_[r];
    const int table = table_of(r);
    Choice best;
    for (const int b : rank.buckets) {
      if (!buckets_[b].waiting.empty()) look(r, b, table, &best);
    }
    if (best.bucket < 0) return;
    Bucket& bucket = buckets_[best.bucket];
    bucket.remove(best.index);
    begin(r, bucket.kind, bucket.stage, best.microbatch);
  }

  // Makes the best admitted action of a bucket the choice, if it beats the one so far.
  void look(int r, int b, int table, Choice* best) const {
    const Bucket& bucket = buckets_[b];
    const double* row = priorities(table, bucket.kind, bucket.stage);
    const int turn = turn_of(ranks_[r], bucket.kind);
    const int last = bucket.kind != 0 ? p_.microbatches
                                      : admitted(r, bucket.stage, bucket.rising ? bucket.waiting[0] : p_.microbatches);
    const size_t n = bucket.rising ? 1 : bucket.waiting.size();
    for (size_t index = 0; index < n; index++) {
      const int i = bucket.waiting[index];
      const Choice choice{turn, row[i], i, bucket.position, b, index};
      if (i <= last && choice.beats(*best)) *best = choice;
    }
  }

  int turn_of(const Rank& rank, int kind) const {
    if (!p_.alternate) return 0;
    return kind == 3 ? 2 : (kind == 0) != rank.after_backward;
  }

  // Last microbatch whose forward is admitted, looking no further than `upto`; -1: none.
  int admitted(int r, int stage, int upto) const {
    const double activation = p_.takes[stage], limit = p_.limit[r];
    if (std::isinf(limit)) return p_.microbatches;
    if (p_.admission == Admit::kNone) {
      return ranks_[r].level + activation <= limit * (1 + kSlack) ? p_.microbatches : -1;
    }
    return credits_[r].bound(activation, upto);
  }

  int table_of(int r) const {
    const Rank& rank = ranks_[r];
    if (p_.tables == 1 || rank.flight.value < 0) return 0;
    return rank.flight.value > p_.threshold * rank.work.value && credits_[r].roomy();
  }

  void begin(int r, int kind, int stage, int i) {
    Rank& rank = ranks_[r];
    const int slot = slot_of(kind);
    const uint32_t a = action(slot, stage, i);
    const size_t row = size_t(kind) * p_.stages + stage;
    const double length = p_.duration[p_.by_microbatch ? row * p_.microbatches + i : row];
    const double start = std::max(rank.free_s, come_[a]);
    rank.end_s = start + length;
    rank.level += p_.takes[row];
    out_.peak[r] = std::max(out_.peak[r], rank.level);
    rank.level -= p_.frees[row];
    credits_[r].run(kind, i, p_.takes[row], p_.frees[row]);
    const int64_t at = p_.offsets[r] + done_[r]++;
    out_.codes[at] = uint32_t(i) | uint32_t(stage) << 17 | uint32_t(kind) << 29;
    out_.start[at] = start;
    out_.end[at] = rank.end_s;
    rank.work.add(length);
    if (kind != 3) rank.after_backward = kind != 0;
    rank.idle = false;
    rank.free_s = rank.end_s;
    consumers(slot, stage, [&](int to, int s, const double* wire) { send(r, to, s, i, wire); });
    push({rank.free_s, r, a});
  }

  void send(int r, int slot, int stage, int i, const double* wire) {
    const int other = rank_of(slot, stage, i);
    if (other == r) return;
    Rank& rank = ranks_[r];
    const size_t pair = size_t(r) * p_.ranks + other;
    const double sent = std::max(rank.end_s, link_s_[pair]) + wire[pair];
    link_s_[pair] = sent;
    const double arrival = sent + p_.latency[pair];
    if (p_.send != 0) rank.free_s = std::max(rank.free_s, p_.send == 1 ? arrival : sent);
    rank.flight.add(arrival - rank.end_s);
    push({arrival, -1, action(slot, stage, i)});
  }

  void push(const Event& event) {
    events_.push_back(event);
    std::push_heap(events_.begin(), events_.end());
  }

  const PolicyProblem& p_;
  const PolicyResult& out_;
  const int kinds_, backward_;
  std::vector<double> come_;
  std::vector<uint8_t> missing_;
  std::vector<Rank> ranks_;
  std::vector<Bucket> buckets_;
  std::vector<Credits> credits_;
  std::vector<double> link_s_;
  std::vector<int64_t> done_;
  std::vector<Event> events_;
};

}  // namespace

std::vector<int64_t> run_policy(const PolicyProblem& problem, const PolicyResult& result) {
  return Runner(problem, result).run();
}

}  // namespace mappnb
