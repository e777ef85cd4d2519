#include "replay.hpp"

#include <algorithm>
#include <limits>
#include <queue>

namespace mappnb {
namespace {

// Who follows whom: the dependencies turned round, and the next operation of each stream.
struct Followers {
  std::vector<int64_t> offsets;
  std::vector<int32_t> op;
  std::vector<double> lag;
  std::vector<int32_t> next;   // on the same stream, -1: none
  std::vector<int32_t> unmet;  // dependencies of each operation, its stream's predecessor among them

  explicit Followers(const Graph& g) : offsets(g.ops + 1, 0), next(g.ops, -1), unmet(g.ops, 0) {
    const int64_t edges = g.dep_offsets[g.ops];
    op.resize(edges);
    lag.resize(edges);
    for (int64_t e = 0; e < edges; e++) offsets[g.dep[e] + 1]++;
    for (int64_t i = 0; i < g.ops; i++) offsets[i + 1] += offsets[i];
    std::vector<int64_t> at(offsets.begin(), offsets.end() - 1);
    std::vector<int32_t> last(g.streams, -1);
    for (int64_t i = 0; i < g.ops; i++) {
      for (int64_t e = g.dep_offsets[i]; e < g.dep_offsets[i + 1]; e++) {
        const int64_t to = at[g.dep[e]]++;
        op[to] = int32_t(i);
        lag[to] = g.lag[e];
      }
      unmet[i] = int32_t(g.dep_offsets[i + 1] - g.dep_offsets[i]);
      if (g.stream[i] < 0) continue;
      int32_t& before = last[g.stream[i]];
      if (before >= 0) {
        next[before] = int32_t(i);
        unmet[i]++;
      }
      before = int32_t(i);
    }
  }
};

// What both ways of replaying share: readiness, groups, ends.
class Base {
 public:
  Base(const Graph& g, Replayed* out) : g_(g), out_(*out), follow_(g), missing_(g.groups, 0), members_(g.groups) {
    for (int64_t i = 0; i < g.ops; i++) {
      out_.start[i] = out_.end[i] = 0;
      out_.cause[i] = -1;
      out_.late[i] = int32_t(i);
      if (g.group[i] >= 0) members_[g.group[i]].push_back(int32_t(i));
    }
    for (int64_t i = 0; i < g.groups; i++) missing_[i] = int32_t(members_[i].size());
    out_.order.reserve(g.ops);
  }

 protected:
  // One dependency of `op` has ended at `time`; true once all have. `start` holds the readiness until then.
  bool arrive(int32_t op, double time, int32_t from) {
    if (time > out_.start[op]) {
      out_.start[op] = time;
      out_.cause[op] = from;
    }
    return --follow_.unmet[op] == 0;
  }

  template <typename Ready>
  void finish(int32_t op, double time, Ready ready) {
    out_.end[op] = time;
    out_.order.push_back(op);
    for (int64_t e = follow_.offsets[op]; e < follow_.offsets[op + 1]; e++)
      if (arrive(follow_.op[e], time + follow_.lag[e], op)) ready(follow_.op[e]);
    const int32_t next = follow_.next[op];
    if (next >= 0 && arrive(next, time, op)) ready(next);
  }

  // A member of a group has begun; true if it was the last to come.
  bool joined(int32_t op) {
    const int32_t group = g_.group[op];
    if (--missing_[group] > 0) return false;
    int32_t last = op;
    for (const int32_t m : members_[group])
      if (out_.start[m] > out_.start[last]) last = m;
    for (const int32_t m : members_[group]) out_.late[m] = last;
    return true;
  }

  const Graph& g_;
  Replayed& out_;
  Followers follow_;
  std::vector<int32_t> missing_;
  std::vector<std::vector<int32_t>> members_;
};

// Without queues and interference the order of work does not matter: a stack will do.
class Topological : Base {
 public:
  using Base::Base;

  void run() {
    for (int64_t i = g_.ops - 1; i >= 0; i--)
      if (follow_.unmet[i] == 0) stack_.push_back(int32_t(i));
    const auto ready = [this](int32_t op) { stack_.push_back(op); };
    while (!stack_.empty()) {
      const int32_t op = stack_.back();
      stack_.pop_back();
      out_.start[op] += g_.delay[op];
      if (g_.group[op] < 0) {
        finish(op, out_.start[op] + g_.duration[op], ready);
      } else if (joined(op)) {
        const double begun = out_.start[out_.late[op]];
        for (const int32_t m : members_[g_.group[op]]) finish(m, begun + g_.duration[m], ready);
      }
    }
  }

 private:
  std::vector<int32_t> stack_;
};

// In the order of time: for queues and for interference.
class ByEvents : Base {
 public:
  ByEvents(const Graph& g, Replayed* out)
      : Base(g, out),
        free_(g.queues, 0.0),
        holder_(g.queues, -1),
        running_(g.streams, -1),
        active_(g.streams, 0),
        remaining_(g.ops, 0.0),
        since_(g.ops, 0.0),
        version_(g.ops, 0) {
    out_.served.assign(2 * g.ops, -1);
  }

  void run() {
    for (int64_t i = 0; i < g_.ops; i++)
      if (follow_.unmet[i] == 0) push(g_.delay[i], kReady, int32_t(i));
    while (!events_.empty()) {
      const Event e = events_.top();
      events_.pop();
      if (e.what == kReady) on_ready(e.op, e.time);
      if (e.what == kStart) begin(e.op, e.time);
      if (e.what == kEnd && e.version == version_[e.op]) on_end(e.op, e.time);
    }
  }

 private:
  enum What { kEnd = 0, kReady = 1, kStart = 2 };
  struct Event {
    double time;
    int what;
    int32_t op, version;
    bool operator>(const Event& o) const {
      if (time != o.time) return time > o.time;
      return what != o.what ? what > o.what : op > o.op;
    }
  };

  void push(double time, What what, int32_t op) { events_.push({time, what, op, version_[op]}); }

  void on_ready(int32_t op, double time) {
    out_.start[op] = time;
    if (g_.group[op] >= 0) {
      if (joined(op))
        for (const int32_t m : members_[g_.group[op]]) push(time + g_.duration[m], kEnd, m);
      return;
    }
    double at = time;
    for (int k = 0; k < 2; k++) {
      const int32_t q = g_.queue[2 * op + k];
      if (q < 0 || free_[q] <= at) continue;
      at = free_[q];
      out_.cause[op] = holder_[q];
    }
    for (int k = 0; k < 2; k++) {
      const int32_t q = g_.queue[2 * op + k];
      if (q < 0) continue;
      if (holder_[q] >= 0) out_.served[2 * holder_[q] + (g_.queue[2 * holder_[q]] == q ? 0 : 1)] = op;
      free_[q] = at + g_.duration[op];
      holder_[q] = op;
    }
    out_.start[op] = at;
    if (at > time) return push(at, kStart, op);
    begin(op, time);
  }

  void begin(int32_t op, double time) {
    each_slowed(op, [&](int32_t s) {
      if (active_[s]++ == 0) turn(s, time, 1.0, 1.0 + g_.interference);
    });
    const int32_t s = g_.stream[op];
    double length = g_.duration[op];
    if (s >= 0) {
      running_[s] = op;
      remaining_[op] = length;
      since_[op] = time;
      if (active_[s] > 0) length *= 1.0 + g_.interference;
    }
    push(time + length, kEnd, op);
  }

  void on_end(int32_t op, double time) {
    const int32_t s = g_.stream[op];
    if (s >= 0 && running_[s] == op) running_[s] = -1;
    if (g_.group[op] < 0)
      each_slowed(op, [&](int32_t k) {
        if (--active_[k] == 0) turn(k, time, 1.0 + g_.interference, 1.0);
      });
    finish(op, time, [this](int32_t next) { push(out_.start[next] + g_.delay[next], kReady, next); });
  }

  // The running operation of a stream goes on at another pace.
  void turn(int32_t stream, double time, double was, double now) {
    const int32_t op = running_[stream];
    if (op < 0) return;
    remaining_[op] = std::max(0.0, remaining_[op] - (time - since_[op]) / was);
    since_[op] = time;
    version_[op]++;
    push(time + remaining_[op] * now, kEnd, op);
  }

  template <typename Do>
  void each_slowed(int32_t op, Do what) {
    if (g_.interference == 0) return;
    for (int k = 0; k < 2; k++)
      if (g_.slows[2 * op + k] >= 0) what(g_.slows[2 * op + k]);
  }

  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::vector<double> free_;
  std::vector<int32_t> holder_, running_, active_;
  std::vector<double> remaining_, since_;
  std::vector<int32_t> version_;
};

}  // namespace

void replay(const Graph& graph, bool by_events, Replayed* out) {
  if (by_events || graph.queues > 0 || graph.interference > 0) {
    ByEvents(graph, out).run();
  } else {
    Topological(graph, out).run();
  }
}

void latest(const Graph& g, const Replayed& done, double horizon, double* latest_start, double* latest_end) {
  const Followers follow(g);
  std::vector<double> release(g.groups, std::numeric_limits<double>::infinity());
  std::vector<std::vector<int32_t>> waiting(g.groups);
  std::vector<int32_t> missing(g.groups, 0);
  for (int64_t i = 0; i < g.ops; i++)
    if (g.group[i] >= 0) missing[g.group[i]]++;
  for (auto it = done.order.rbegin(); it != done.order.rend(); ++it) {
    const int32_t op = *it;
    double end = horizon;
    const auto before = [&](int32_t next, double lag) {
      end = std::min(end, latest_start[next] - g.delay[next] - lag);
    };
    for (int64_t e = follow.offsets[op]; e < follow.offsets[op + 1]; e++) before(follow.op[e], follow.lag[e]);
    if (follow.next[op] >= 0) before(follow.next[op], 0);
    for (int k = 0; !done.served.empty() && k < 2; k++)
      if (done.served[2 * op + k] >= 0) end = std::min(end, latest_start[done.served[2 * op + k]]);
    latest_end[op] = end;
    const int32_t group = g.group[op];
    if (group < 0) {
      latest_start[op] = end - (done.end[op] - done.start[op]);
      continue;
    }
    release[group] = std::min(release[group], end - g.duration[op]);
    waiting[group].push_back(op);
    if (--missing[group] == 0)
      for (const int32_t m : waiting[group]) latest_start[m] = release[group];
  }
}

}  // namespace mappnb
