#include "schedule.hpp"

#include <algorithm>

namespace mappnb {
namespace {

constexpr double kNotCome = -1.0;  // below that: not come, and rank -(2 + value) waits for it

// Raises `ready` to when an input is there; false, with the rank noted as waiting, if it has not come.
inline bool take(double* slot, int rank, double* ready) {
  const double come = *slot;
  if (come < 0) {
    *slot = -2.0 - rank;
    return false;
  }
  if (come > *ready) *ready = come;
  return true;
}

// Input of actions by (pass, stage, microbatch): when it is there, or who waits.
class Arrivals {
 public:
  Arrivals(int passes, int stages, int microbatches)
      : stages_(stages), microbatches_(microbatches), slot_(size_t(passes) * stages * microbatches, kNotCome) {}
  double* at(int pass, uint32_t stage, uint32_t microbatch) {
    return &slot_[(size_t(pass) * stages_ + stage) * microbatches_ + microbatch];
  }

 private:
  size_t stages_, microbatches_;
  std::vector<double> slot_;
};

// Messages take a latency and nothing else; no pairs, no second copy of a stage, no disaggregation, equal microbatches.
// The same as Runner in the fewest instructions: planning times some ten thousand orders a second with it.
std::vector<int64_t> run_plain(const Pass& pass) {
  const uint32_t* const codes = pass.codes;
  double *const start = pass.start, *const end = pass.end;
  const size_t stages = pass.stages, microbatches = pass.microbatches;
  std::vector<double> slots(2 * stages * microbatches, kNotCome), clock(pass.ranks, 0.0);
  double *const forward = slots.data(), *const backward = forward + stages * microbatches;
  const double* const duration = pass.duration;
  const double *const forth = pass.next.latency, *const back = forth + stages;
  std::vector<int64_t> next(pass.offsets, pass.offsets + pass.ranks);
  std::vector<int> work;
  work.reserve(pass.ranks);
  for (int r = pass.ranks - 1; r >= 0; r--) work.push_back(r);
  while (!work.empty()) {
    const int rank = work.back();
    work.pop_back();
    const int64_t stop = pass.offsets[rank + 1];
    int64_t i = next[rank];
    double now = clock[rank];
    const auto run = [&](const double* length) {
      start[i] = now;
      now += *length;
      end[i] = now;
    };
    const auto post = [&](double* to, double lag) {
      const double was = *to;
      *to = now + lag;
      if (was < kNotCome) work.push_back(int(-2.0 - was));
    };
    for (; i < stop; i++) {
      const Code code{codes[i]};
      const size_t stage = code.stage(), at = stage * microbatches + code.microbatch();
      const uint32_t kind = code.kind();
      if (kind == 0) {
        if (stage && !take(forward + at, rank, &now)) break;
        run(duration + stage);
        if (stage + 1 == stages) {
          post(backward + at, 0);
        } else {
          post(forward + at + microbatches, forth[stage]);
        }
      } else if (kind == 3) {
        run(duration + 3 * stages + stage);
      } else {
        if (!take(backward + at, rank, &now)) break;
        run(duration + kind * stages + stage);
        if (stage) post(backward + at - microbatches, back[stage]);
      }
    }
    next[rank] = i;
    clock[rank] = now;
  }
  return next;
}

// The whole model: pairs, links that messages pass one after the other, second copies of stages, disaggregation.
class Runner {
 public:
  explicit Runner(const Pass& pass)
      : p_(pass),
        come_(pass.ship.link ? 3 : 2, pass.stages, pass.microbatches),
        clock_(pass.ranks, 0.0),
        next_(pass.offsets, pass.offsets + pass.ranks),
        link_(pass.links, 0.0) {}

  std::vector<int64_t> run() {
    for (int r = p_.ranks - 1; r >= 0; r--) work_.push_back(r);
    while (!work_.empty()) {
      const int rank = work_.back();
      work_.pop_back();
      advance(rank);
    }
    return next_;
  }

 private:
  void advance(int rank) {
    const int64_t stop = p_.offsets[rank + 1];
    int64_t i = next_[rank];
    double now = clock_[rank];
    while (i < stop) {
      const Code code{p_.codes[i]};
      if (code.paired() && i + 1 < stop) {
        const Code second{p_.codes[i + 1]};
        double ready = now;
        if (!need(code, rank, &ready) || !need(second, rank, &ready)) break;
        const double length = (duration(code) + duration(second)) * p_.overlap_ratio;
        const double done = ready + length;
        p_.start[i] = p_.start[i + 1] = ready;
        p_.end[i] = p_.end[i + 1] = done;
        now = tell(second, done, tell(code, done, done));
        i += 2;
        continue;
      }
      double ready = now;
      if (!need(code, rank, &ready)) break;
      const double done = ready + duration(code);
      p_.start[i] = ready;
      p_.end[i] = done;
      now = tell(code, done, done);
      i++;
    }
    next_[rank] = i;
    clock_[rank] = now;
  }

  double duration(Code code) const {
    const size_t row = size_t(code.kind()) * p_.stages + code.stage();
    return p_.by_microbatch ? p_.duration[row * p_.microbatches + code.microbatch()] : p_.duration[row];
  }

  // Raises `ready` to when the input is there; false, with the rank noted as waiting, if it has not come.
  bool need(Code code, int rank, double* ready) {
    const uint32_t kind = code.kind(), stage = code.stage();
    if (kind == 3 || (kind == 0 && stage == 0)) return true;
    if (!take(come_.at(kind != 0, stage, code.microbatch()), rank, ready)) return false;
    if (kind == 0 || !p_.ship.link) return true;
    return take(come_.at(2, stage, code.microbatch()), rank, ready);
  }

  // Passes the result on; returns when the rank goes on.
  double tell(Code code, double done, double now) {
    const uint32_t kind = code.kind(), stage = code.stage(), mb = code.microbatch();
    if (kind == 3) return now;
    if (kind != 0) return stage ? post(come_.at(1, stage - 1, mb), p_.next, table(1, stage, mb), done, now) : now;
    const bool last = stage + 1 == uint32_t(p_.stages);
    if (p_.ship.link) {
      if (!last) now = post(come_.at(0, stage + 1, mb), p_.next, table(0, stage, mb), done, now);
      if (last) post(come_.at(1, stage, mb), Hops{}, 0, done, now);
      return post(come_.at(2, stage, mb), p_.ship, stage, done, now);
    }
    if (last) return post(come_.at(1, stage, mb), Hops{}, 0, done, now);
    return post(come_.at(0, stage + 1, mb), p_.next, table(0, stage, mb), done, now);
  }

  size_t table(int backward, uint32_t stage, uint32_t mb) const {
    const int mirrored = int64_t(mb) >= p_.mirrored_from;
    return size_t(mirrored * 2 + backward) * p_.stages + stage;
  }

  double post(double* slot, const Hops& hops, size_t at, double done, double now) {
    double arrival = done;
    if (hops.link && hops.link[at] >= 0) {
      double& link = link_[hops.link[at]];
      link = std::max(done, link) + hops.wire[at];
      arrival = link + hops.latency[at];
      if (p_.send != Send::kAsync) now = std::max(now, p_.send == Send::kSync ? arrival : link);
    }
    const double was = *slot;
    *slot = arrival;
    if (was < kNotCome) work_.push_back(int(-2.0 - was));
    return now;
  }

  const Pass& p_;
  Arrivals come_;
  std::vector<double> clock_;
  std::vector<int64_t> next_;
  std::vector<double> link_;
  std::vector<int> work_;
};

bool plain(const Pass& pass) {
  if (pass.ship.link || pass.send != Send::kAsync || pass.mirrored_from < pass.microbatches) return false;
  if (pass.by_microbatch || pass.any_paired) return false;
  for (int i = 0; i < 4 * pass.stages; i++)
    if (pass.next.wire[i] != 0) return false;
  return true;
}

}  // namespace

std::vector<int64_t> run_pass(const Pass& pass) { return plain(pass) ? run_plain(pass) : Runner(pass).run(); }

void one_forward_one_backward(int ranks, int chunks, int microbatches, int group, const int64_t* warm_up,
                              uint32_t* codes) {
  constexpr uint32_t kStage = 1u << 17, kBackward = 1u << 29;
  std::vector<uint32_t> forward, backward;  // the visits of rank 0
  const size_t n = size_t(chunks) * microbatches;
  forward.reserve(n);
  backward.reserve(n);
  for (int first = 0; first < microbatches; first += group) {
    const int stop = std::min(first + group, microbatches);
    for (int chunk = 0; chunk < chunks; chunk++) {
      for (int mb = first; mb < stop; mb++) {
        forward.push_back(uint32_t(chunk) * ranks * kStage + mb);
        backward.push_back(uint32_t(chunks - 1 - chunk) * ranks * kStage + kBackward + mb);
      }
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    const uint32_t shift = rank * kStage;
    const size_t warm = std::min(size_t(std::max<int64_t>(warm_up[rank], 0)), n);
    for (size_t i = 0; i < warm; i++) *codes++ = forward[i] + shift;
    for (size_t i = warm; i < n; i++) {
      *codes++ = forward[i] + shift;
      *codes++ = backward[i - warm] + shift;
    }
    for (size_t i = n - warm; i < n; i++) *codes++ = backward[i] + shift;
  }
}

}  // namespace mappnb
