// Python's view of policy.hpp: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "policy.hpp"

namespace nb = nanobind;
using mappnb::PolicyProblem;
using mappnb::PolicyResult;

namespace {

template <typename T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// Refuses offsets that are not those of the placement: the run writes by them.
void check_offsets(const PolicyProblem& p) {
  const int64_t ordinary = std::clamp<int64_t>(p.mirrored_from, 0, p.microbatches);
  std::vector<int64_t> count(p.ranks, 0);
  for (int i = 0; i < 4 * p.stages; i++) {
    require(p.where[i] >= 0 && p.where[i] < p.ranks, "where: a rank outside the ranks");
    const bool mirrored = i >= 2 * p.stages, backward = (i / p.stages) % 2;
    count[p.where[i]] += (mirrored ? p.microbatches - ordinary : ordinary) * (backward && p.split ? 2 : 1);
  }
  require(p.offsets[0] == 0, "offsets: expected 0 first");
  for (int r = 0; r < p.ranks; r++) {
    require(p.offsets[r + 1] - p.offsets[r] == count[r], "offsets: not those of the placement");
  }
}

void check_finite(const double* values, size_t n, const char* what) {
  require(std::all_of(values, values + n, [](double x) { return std::isfinite(x); }), what);
}

// The C++ run trusts its input: whatever would make it read or write elsewhere, or never end, is refused here.
void check_problem(const PolicyProblem& p, Array<const int32_t, 3> where, Array<const double, 3> duration,
                   Array<const double, 3> links, Array<const double, 4> priority, Array<const double, 3> memory,
                   Array<const int64_t, 1> offsets) {
  const size_t stages = where.shape(2), mbs = size_t(p.microbatches), ranks = size_t(p.ranks);
  require(where.shape(0) == 2 && where.shape(1) == 2 && stages >= 1 && p.microbatches >= 1, "where: shape");
  require(stages <= 4096 && mbs <= 131072, "more stages or microbatches than a code holds");
  require(duration.size() == 4 * stages * (p.by_microbatch ? mbs : 1), "duration: shape");
  require(links.shape(0) == 3 && links.shape(1) == ranks && links.shape(2) == ranks, "links: shape");
  require((p.tables == 1 || p.tables == 2) && priority.size() == p.tables * 4 * stages * mbs, "priority: shape");
  require(memory.shape(0) == 2 && memory.size() == 8 * stages, "memory: shape");
  require(offsets.shape(0) == ranks + 1, "offsets: shape");
  require(p.send >= 0 && p.send <= 2, "send: expected 0, 1 or 2");
  require(p.admission == mappnb::Admit::kNone || p.admission == mappnb::Admit::kCredits, "admission: expected 0 or 1");
  check_offsets(p);
  check_finite(duration.data(), duration.size(), "duration: not finite");
  check_finite(links.data(), links.size(), "links: not finite");
  check_finite(priority.data(), priority.size(), "priority: not finite");
}

std::vector<int64_t> policy_run(Array<const int32_t, 3> where, int64_t mirrored_from, int microbatches, bool split,
                                Array<const double, 3> duration, Array<const double, 3> links, int send,
                                Array<const double, 4> priority, double threshold, bool alternate,
                                Array<const double, 3> memory, Array<const double, 1> limit, int admission,
                                Array<const int64_t, 1> offsets, Array<uint32_t, 1> codes, Array<double, 2> times,
                                Array<double, 1> peak) {
  PolicyProblem p{};
  p.where = where.data();
  p.mirrored_from = mirrored_from;
  p.ranks = int(limit.shape(0));
  p.stages = int(where.shape(2));
  p.microbatches = microbatches;
  p.split = split;
  p.duration = duration.data();
  p.by_microbatch = duration.shape(2) > 1;
  p.latency = links.data();
  p.transfer = p.latency + p.ranks * p.ranks;
  p.ship = p.transfer + p.ranks * p.ranks;
  p.send = send;
  p.priority = priority.data();
  p.tables = int(priority.shape(0));
  p.threshold = threshold;
  p.alternate = alternate;
  p.takes = memory.data();
  p.frees = p.takes + 4 * p.stages;
  p.limit = limit.data();
  p.admission = mappnb::Admit(admission);
  p.offsets = offsets.data();
  check_problem(p, where, duration, links, priority, memory, offsets);
  require(size_t(p.offsets[p.ranks]) == codes.shape(0), "codes: shape");
  require(times.shape(0) == 2 && times.shape(1) == codes.shape(0), "times: shape");
  require(peak.shape(0) == size_t(p.ranks), "peak: shape");
  nb::gil_scoped_release unlocked;
  return run_policy(p, PolicyResult{codes.data(), times.data(), times.data() + codes.shape(0), peak.data()});
}

}  // namespace

void register_policy(nb::module_& m) {
  m.def("policy_run", &policy_run, nb::arg("where"), nb::arg("mirrored_from"), nb::arg("microbatches"),
        nb::arg("split"), nb::arg("duration"), nb::arg("links"), nb::arg("send"), nb::arg("priority"),
        nb::arg("threshold"), nb::arg("alternate"), nb::arg("memory"), nb::arg("limit"), nb::arg("admission"),
        nb::arg("offsets"), nb::arg("codes"), nb::arg("times"), nb::arg("peak"),
        "Run a policy into codes, times and peak; returns how many actions each rank ran. See mappnb.sched.policies.");
}
